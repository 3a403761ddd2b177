"""Compile options of XLA that several parts use."""

from __future__ import annotations

import jax

YNN = "xla_cpu_experimental_ynn_fusion_type"  # the compile option of what goes to YNNPACK


def keeping_nan() -> dict[str, str]:
    """Compile options with which XLA keeps NaN on the default device: YNNPACK's kernels on the CPU
    make it a number where a bound and a sum are one kernel.
    """
    return {YNN: ""} if jax.default_backend() == "cpu" else {}
