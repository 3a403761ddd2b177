"""Samplers of random reductions, over axes and over windows."""

from __future__ import annotations

from typing import Any

from xrl_jax.graph import kinds, ops
from xrl_jax.language.rule import Pattern, Var
from xrl_jax.verify.samplers.base import Drawing, Drawn, Rejected, Want, argument_dtypes, subset
from xrl_jax.verify.samplers.kinds import attributes


def reduce(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Drawn:
    spec = ops.OPS[p.op]
    (inner,) = argument_dtypes(m, spec, 1, dtype)
    (field,) = spec.of_kind(kinds.AXES, kinds.ONE_AXIS)
    fresh = not m.known(p.args[0])
    if want is None:
        arg = m.make(p.args[0], m.shape(1) if fresh else None, inner)
        drawn = attributes(m, p.op, len(m.shape_of(arg)), dtype) | known
        if field.kind == kinds.ONE_AXIS and 0 in m.shape_of(arg):
            raise Rejected  # an empty axis has no largest element to index
        return [arg], drawn
    if field.name in known:
        gone = ops.axes_of(int(known[field.name]))
        rank = len(want) + len(gone)
        if any(a >= rank for a in gone):
            raise Rejected
    else:
        rank = len(want) + (1 if field.kind == kinds.ONE_AXIS else m.number(1, 2))
        if rank > m.most + 1:
            raise Rejected
        gone = subset(m, rank, rank - len(want))
    rest = iter(want)
    sizes = tuple(None if d in gone else next(rest) for d in range(rank))
    drawn = attributes(m, p.op, rank, dtype) | {field.name: ops.mask_of(gone)}
    return [m.make(p.args[0], sizes, inner)], drawn


def window(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Drawn:
    fresh = not m.known(p.args[0])
    own: tuple[int, ...] | None = None
    arg = -1
    if want is None or (not fresh and isinstance(p.args[0], Var)):
        first = (m.number(1, 2), m.number(1, 3), m.number(3, 7), m.number(2, 7))
        skipped = 0 if m.chance(0.6) else m.number(0, 3)
        arg = m.make(p.args[0], first[skipped:] if fresh else None, dtype)
        own = m.shape_of(arg)
    rank = len(own if own is not None else want or ())
    if rank > ops.OPS[p.op].fields[0].width:
        raise Rejected
    drawn = _windows(m, rank) | known
    if own is not None:
        if m.chance(0.15):  # one window over the whole array
            whole = {"window": [max(n, 1) for n in own], "low": [0] * rank, "high": [0] * rank}
            drawn = drawn | whole | known
        # XLA aborts on negative padding if the window has one element.
        cut = [i for i in range(rank) if own[i] > drawn["window"][i] > 1]
        if cut and "low" not in known and m.chance(0.1):
            drawn["low"] = [-1 if i == cut[0] else a for i, a in enumerate(drawn["low"])]
        return [arg], drawn
    assert want is not None
    size, stride, low, high = (
        [int(v) for v in drawn[f][:rank]] for f in ("window", "stride", "low", "high")
    )
    wanted = tuple(
        (n - 1) * s + w - a - b
        for n, w, s, a, b in zip(m.fill(want), size, stride, low, high, strict=True)
    )
    if any(n < 0 for n in wanted):
        raise Rejected
    return [m.make(p.args[0], wanted, dtype)], drawn


def _windows(m: Drawing, rank: int) -> dict[str, list[int]]:
    plain = [m.chance(0.45) for _ in range(rank)]
    size = [1 if f else m.number(1, 3) for f in plain]
    stride = [1 if f or m.chance(0.6) else 2 for f in plain]
    low, high = (
        [
            0 if f or m.chance(0.5) else m.number(0, w - more)
            for f, w in zip(plain, size, strict=True)
        ]
        for more in (1, 0)
    )
    return {"window": size, "stride": stride, "low": low, "high": high}
