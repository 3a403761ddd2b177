"""Samplers of random operators, one for each shape family: attributes, and arguments whose shapes
fit.

A sampler is asked for a node of a pattern, perhaps of a wanted shape (None where any size will do),
and with some attributes fixed by the pattern or by a hint. It asks the `Drawing` for its arguments,
and raises `Rejected` where a draw leads nowhere.
"""

from __future__ import annotations

from collections.abc import Callable

from xrl_jax.graph import ops
from xrl_jax.verify.samplers.base import Made
from xrl_jax.verify.samplers.contraction import conv, dot
from xrl_jax.verify.samplers.movement import broadcast, concat, pad, reshape, slice_, transpose
from xrl_jax.verify.samplers.reduction import axes, cumulative, reduce, window

SAMPLERS: dict[str, Callable[..., Made]] = {
    "transpose": transpose, "reshape": reshape, "broadcast": broadcast, "concat": concat,
    "slice": slice_, "pad": pad, "rev": axes, "softmax": axes, "dot": dot, "conv": conv,
    **dict.fromkeys((n for n in ops.OPS if n.startswith("reduce_")), reduce),
    **dict.fromkeys((n for n in ops.OPS if n.startswith("window_")), window),
    **dict.fromkeys((n for n in ops.OPS if n.startswith("cum")), cumulative),
}  # fmt: skip
