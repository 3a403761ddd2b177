"""The table of samplers, one for each shape rule; they draw attributes and fitting arguments.

A sampler draws a node for a pattern. A shape may be required (with None for any size), and the
pattern or a hint may fix some attributes. The sampler gets its arguments from the `Drawing`; if an
argument exists already, it draws attributes that fit that argument. It raises `Rejected` if a draw
cannot be completed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from xrl_jax.verify.samplers.base import Drawn
from xrl_jax.verify.samplers.contraction import conv, dot
from xrl_jax.verify.samplers.elementwise import elementwise, like_first
from xrl_jax.verify.samplers.movement import broadcast, concat, pad, reshape, slice_, transpose
from xrl_jax.verify.samplers.reduction import reduce, window

SAMPLERS: Mapping[str, Callable[..., Drawn]] = MappingProxyType(
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
