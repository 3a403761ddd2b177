"""Runnable experiments: networks, benchmarks and command lines on top of `xrl_jax`."""
