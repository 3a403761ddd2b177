"""Samplers of random reductions, over axes and over windows."""

from __future__ import annotations

from typing import Any

from xrl_jax.graph import ops
from xrl_jax.language.rule import Pattern, Var
from xrl_jax.verify.samplers.base import Drawing, Made, Rejected, Want, subset


def axes(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
    """`rev`, `softmax`: a mask of axes that stay."""
    arg = m.make(p.args[0], want, dtype)
    rank = len(m.shape_of(arg))
    return [arg], {"axes": ops.mask_of(subset(m, rank, m.number(min(1, rank), min(2, rank))))}


def reduce(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
    if "axes" in known and want is not None:
        gone = ops.axes_of(int(known["axes"]))
        rank = len(want) + len(gone)
        if any(a >= rank for a in gone):
            raise Rejected
    elif want is not None:
        rank = len(want) + m.number(1, 2)
        if rank > 5:
            raise Rejected
        gone = subset(m, rank, rank - len(want))
    else:
        fresh = not m.known(p.args[0])
        arg = m.make(p.args[0], m.shape(1, 4) if fresh else None, dtype)
        rank = len(m.shape_of(arg))
        return [arg], {"axes": ops.mask_of(subset(m, rank, m.number(min(1, rank), min(2, rank))))}
    rest = iter(want)
    sizes = tuple(None if d in gone else next(rest) for d in range(rank))
    return [m.make(p.args[0], sizes, dtype)], {"axes": ops.mask_of(gone)}


def cumulative(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
    arg = m.make(p.args[0], want, dtype)
    rank = len(m.shape_of(arg))
    if not rank:
        raise Rejected
    return [arg], {"axis": m.number(0, rank - 1), "reverse": m.number(0, 1)}


def window(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
    fresh = not m.known(p.args[0])
    arg = None
    if want is None or (not fresh and isinstance(p.args[0], Var)):
        arg = m.make(
            p.args[0],
            (m.number(1, 2), m.number(1, 3), m.number(3, 6), m.number(2, 6)) if fresh else None,
            dtype,
        )
        rank = len(m.shape_of(arg))
    else:
        rank = len(want)
    if rank > 4:
        raise Rejected
    plain = [m.chance(0.45) for _ in range(rank)]
    window = [1 if f else m.number(1, 3) for f in plain]
    stride = [1 if f or m.chance(0.6) else 2 for f in plain]
    low = [
        0 if f or m.chance(0.5) else m.number(0, w - 1) for f, w in zip(plain, window, strict=True)
    ]
    high = [0 if f or m.chance(0.5) else m.number(0, w) for f, w in zip(plain, window, strict=True)]
    drawn = {"window": window, "stride": stride, "low": low, "high": high} | known
    if arg is None:
        assert want is not None
        window, stride, low, high = (
            [int(v) for v in drawn[f][:rank]] for f in ("window", "stride", "low", "high")
        )
        size = tuple(
            (n - 1) * s + w - a - b
            for n, w, s, a, b in zip(m.fill(want), window, stride, low, high, strict=True)
        )
        if any(n < 0 for n in size):
            raise Rejected
        arg = m.make(p.args[0], size, dtype)
    return [arg], drawn
