"""XLA compile options that several modules use."""

from __future__ import annotations

import jax

YNN = "xla_cpu_experimental_ynn_fusion_type"  # selects the fusions that go to YNNPACK


def keeping_nan() -> dict[str, str]:
    """Return compile options with which XLA keeps NaN on the default device.

    On the CPU they hand no fusions to YNNPACK, whose kernels turn NaN into an ordinary value when a
    lower or upper bound and a sum are fused into one kernel.
    """
    return {YNN: ""} if jax.default_backend() == "cpu" else {}
