"""Random attributes, drawn according to the kind of their field in the op table.

Attributes of kinds that depend on more than the rank of an argument (sizes, starts and ends, steps,
packed axes, layouts) are drawn by the samplers of the operators that have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from xrl_jax.graph import kinds, ops
from xrl_jax.graph.kinds import Kind
from xrl_jax.verify.samplers.base import Drawing, Rejected, permutation, subset


def _axis(m: Drawing, rank: int) -> int:
    if not rank:
        raise Rejected
    return m.number(0, rank - 1)


def _axes(m: Drawing, rank: int) -> int:
    """Draw a mask of axes, more often of one or two than of none or many."""
    least, most = (min(1, rank), min(2, rank)) if m.chance(0.7) else (0, rank)
    return ops.mask_of(subset(m, rank, m.number(least, most)))


_BY_KIND: Mapping[Kind, Callable[[Drawing, int], Any]] = MappingProxyType(
    {
        kinds.NATURAL: lambda m, rank: m.number(0, 3),
        kinds.COUNT: lambda m, rank: m.number(1, 3),
        kinds.FLAG: lambda m, rank: m.number(0, 1),
        kinds.AXIS: _axis,
        kinds.AXES: _axes,
        kinds.ONE_AXIS: lambda m, rank: 1 << _axis(m, rank),
        kinds.PERMUTATION: permutation,
    }
)


def attributes(m: Drawing, op: str, rank: int, dtype: str) -> dict[str, Any]:
    """Draw attributes of an operator; return them by name.

    Args:
      rank: rank of the first argument; of the node itself if it has no arguments.
      dtype: dtype of the node.
    """
    drawn: dict[str, Any] = {}
    for field in ops.OPS[op].fields:
        if field.kind == kinds.DTYPE:
            drawn[field.name] = ops.DTYPE_CODE[dtype]
        elif field.kind == kinds.INTEGER:  # integers have no negative powers
            drawn[field.name] = m.number(-3 if dtype in ops.TAKES["inexact"] else 0, 5)
        elif field.kind in _BY_KIND:
            drawn[field.name] = _BY_KIND[field.kind](m, rank)
    return drawn
