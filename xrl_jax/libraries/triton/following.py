"""What follows a product inside a kernel: where the elements of each value are in the product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from xrl_jax.graph.equations import variables
from xrl_jax.libraries.triton import strided, tile
from xrl_jax.libraries.triton.operands import Operand
from xrl_jax.libraries.triton.strided import Axis, View


def axes_of(
    product: Any, equations: Sequence[Any], columns: Axis | None = None
) -> dict[Any, tuple[Axis, ...]] | None:
    """Return the axes of all values between as positions in the flat result of a product; None if
    one of them is not computed element by element, or row by row.

    Args:
      columns: the axis along which rows may be reduced; None for no reductions.
    """
    start = product.outvars[0]
    axes = {start: strided.row_major(start.aval.shape).axes}
    for e in equations:
        name, (out,) = e.primitive.name, e.outvars
        inside = [axes[v] for v in e.invars if not isinstance(v, Literal) and v in axes]
        if name in tile.MOVES:
            view = strided.viewed(View(inside[0]), e)
            made = None if view is None else view.axes
        elif name in tile.REDUCTIONS:
            reduced = e.params["axes"]
            along = strided.joined([inside[0][d] for d in reduced])
            kept = tuple(a for d, a in enumerate(inside[0]) if d not in reduced)
            made = kept if along == columns else None
        else:
            made = _merged(inside)
        if made is None:
            return None
        axes[out] = made
    return axes


def _merged(values: Sequence[tuple[Axis, ...]]) -> tuple[Axis, ...] | None:
    """Return the axes of an elementwise result; None if operands differ in what an axis is."""
    merged = []
    for same in zip(*values, strict=True):
        kinds = {a for a in same if any(p.stride for p in a)}
        if len(kinds) > 1:
            return None
        merged.append(kinds.pop() if kinds else same[0])
    return tuple(merged)


def others_fit(
    equations: Sequence[Any], others: Mapping[Any, Operand], axes: Mapping[Any, tuple[Axis, ...]]
) -> bool:
    """Return whether it is known which element of the product each element of the equations' other
    operands belongs to.
    """
    for e in equations:
        if e.primitive.name in tile.MOVES:
            continue
        for v in variables(e.invars):
            if v in others and v.aval.shape:
                at, view = axes[e.outvars[0]], others[v].view
                for known, own in zip(at, view.axes, strict=bool(view.axes)):
                    if any(p.stride for p in own) and not all(p.stride for p in known):
                        return False
    return True
