"""XLA as a library: the plain lowering of every operator, and further lowerings to lax code."""

from __future__ import annotations

from collections.abc import Mapping

from xrl_jax.graph import ops
from xrl_jax.libraries.base import Facts, Library, Lowering
from xrl_jax.libraries.xla.conv import CONV
from xrl_jax.libraries.xla.conv_facts import ConvFacts
from xrl_jax.libraries.xla.dot import DOT, DotFacts
from xrl_jax.libraries.xla.plain import PLAIN
from xrl_jax.libraries.xla.pool import (
    REDUCE_SUM,
    SOFTMAX,
    WINDOW,
    AxesFacts,
    WindowFacts,
)

_WINDOWS = ("window_sum", "window_max", "window_min")
_MORE: Mapping[str, tuple[Lowering, ...]] = {
    "conv": CONV,
    "dot": DOT,
    "reduce_sum": REDUCE_SUM,
    "softmax": SOFTMAX,
    **dict.fromkeys(_WINDOWS, WINDOW),
}
_FACTS: Mapping[str, type[Facts]] = {
    "conv": ConvFacts,
    "dot": DotFacts,
    "reduce_sum": AxesFacts,
    "softmax": AxesFacts,
    **dict.fromkeys(_WINDOWS, WindowFacts),
}
# Times of its lowerings relative to the plain one. On x86 CPUs: medians over the regions of
# ResNeXt-50, SqueezeNet and BERT (jax 0.10.2). `python -m experiments.priors` prints them.
_PRIORS: Mapping[str, Mapping[tuple[str, int], str]] = {
    "cpu": {
        ("conv", 0): "overhang 0.73 half_columns 0.76 half_rows 0.77 im2col 0.81 taps 1.12",
        ("conv", 1): "matmul 0.74 matmul_transposed 0.84 nhwc_matmul 0.84 overhang 0.86 nhwc 0.96",
        ("conv", 2): "nhwc_split4 0.23 nhwc_shifted 0.24 nhwc_split2 0.28 half_rows 0.31 "
        "rotated 0.32 half_columns 0.34 split2 0.38 split4 0.5 nhwc_split 0.5 shifted 0.59 "
        "split 0.6 taps 0.62 dense 0.66 overhang 0.79 nchw_shifted 0.8 im2col 0.89 nhwc 0.89 "
        "nchw 1.09",
        ("dot", 0): "flat 0.78 transposed 0.99 swapped 1.17",
        ("dot", 1): "loop 0.85 loop_transposed 0.9 swapped 1.04",
        ("reduce_sum", 0): "matmul 1.15",
        ("window_max", 0): "separable 0.35 shifted 0.45",
    },
    # Predicted for an H200 (jax 0.10.2), from operators of MobileNetV2.
    "gpu": {
        ("conv", 0): "taps 3 im2col 2 half_rows 3 half_columns 3 overhang 3",
        ("conv", 1): "matmul 1 matmul_transposed 1 nhwc_matmul 1 overhang 3",
        ("conv", 2): "nhwc_shifted 0.4 shifted 0.4 taps 0.4 dense 1 im2col 2.5 half_rows 3 "
        "half_columns 3 split 20 split2 15 split4 15 nhwc_split 20 nhwc_split2 15 nhwc_split4 15",
    },
}
# cuDNN adds a bias and a residual and applies a ReLU in the kernel of a convolution; kernels of
# products made by Triton compute the elementwise operators that follow.
_ABSORBING: Mapping[str, frozenset[str]] = {"gpu": frozenset({"conv", "dot"})}


class Xla(Library):
    """XLA itself."""

    name = "xla"

    def lowerings(self) -> Mapping[str, tuple[Lowering, ...]]:
        return {op: (PLAIN[op], *_MORE.get(op, ())) for op in ops.OPS}

    def facts(self) -> Mapping[str, type[Facts]]:
        return _FACTS

    def priors(self, platform: str) -> Mapping[tuple[str, int], str]:
        return _PRIORS.get(platform, {})

    def absorbing(self, platform: str) -> frozenset[str]:
        return _ABSORBING.get(platform, frozenset())


LIBRARY = Xla()
