"""Samplers of random operators, one for each shape rule: attributes, and arguments whose shapes
fit.

A sampler is asked for a node of a pattern, perhaps of a wanted shape (None where any size will do),
and with some attributes fixed by the pattern or by a hint. It asks the `Drawing` for its arguments,
and raises `Rejected` where a draw leads nowhere. Where an argument is there already, it draws
attributes that fit that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from xrl_jax.verify.samplers.base import Made
from xrl_jax.verify.samplers.contraction import conv, dot
from xrl_jax.verify.samplers.elementwise import elementwise, like_first
from xrl_jax.verify.samplers.movement import broadcast, concat, pad, reshape, slice_, transpose
from xrl_jax.verify.samplers.reduction import reduce, window

SAMPLERS: Mapping[str, Callable[..., Made]] = MappingProxyType(
    {
        "elementwise": elementwise,
        "arg0": like_first,
        "transpose": transpose,
        "reshape": reshape,
        "broadcast": broadcast,
        "concat": concat,
        "slice": slice_,
        "pad": pad,
        "reduce": reduce,
        "window": window,
        "dot": dot,
        "conv": conv,
    }
)
