"""Samplers of random operators that move elements: transposes, reshapes, slices and the like."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from xrl_jax.graph import ops
from xrl_jax.language.rule import Pattern, Var
from xrl_jax.verify.samplers.base import Drawing, Drawn, Rejected, Want, permutation, subset
from xrl_jax.verify.samplers.kinds import attributes


def transpose(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Drawn:
    perm = known.get("perm")
    if want is not None:
        perm = tuple(perm[: len(want)]) if perm else permutation(m, len(want))
        if sorted(perm) != list(range(len(want))):
            raise Rejected
        back: list[int | None] = [None] * len(want)
        for i, d in enumerate(perm):
            back[d] = want[i]
        return [m.make(p.args[0], tuple(back), dtype)], {"perm": perm}
    fresh = not m.known(p.args[0])
    arg = m.make(p.args[0], m.shape(min(2, m.most)) if fresh else None, dtype)
    return [arg], attributes(m, p.op, len(m.shape_of(arg)), dtype)


def _refactor(m: Drawing, shape: Sequence[int]) -> tuple[int, ...]:
    """Draw another shape with the same number of elements."""
    sizes = list(shape)
    for _ in range(m.number(1, 2)):
        kind = m.number(0, 3)
        if kind == 0 and len(sizes) > 1:
            i = m.number(0, len(sizes) - 2)
            sizes[i : i + 2] = [sizes[i] * sizes[i + 1]]
        elif kind == 1 and sizes:
            i = m.number(0, len(sizes) - 1)
            parts = [d for d in range(1, sizes[i] + 1) if sizes[i] % d == 0]
            if parts and len(sizes) < 5:
                d = int(m.rng.choice(parts))
                sizes[i : i + 1] = [d, sizes[i] // d]
        elif kind == 2 and len(sizes) < 5:
            sizes.insert(m.number(0, len(sizes)), 1)
        elif 1 in sizes:
            sizes.remove(1)
    return tuple(sizes)


def reshape(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Drawn:
    if want is not None:
        shape = m.fill(want)
        if m.known(p.args[0]) and isinstance(p.args[0], Var):
            return [m.make(p.args[0], None, dtype)], {"shape": shape, "rank": len(shape)}
        arg = m.make(p.args[0], _refactor(m, shape), dtype)
        return [arg], {"shape": shape, "rank": len(shape)}
    arg = m.make(p.args[0], None, dtype)
    shape = _refactor(m, m.shape_of(arg))
    return [arg], {"shape": shape, "rank": len(shape)}


def broadcast(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Drawn:
    arg = (
        m.make(p.args[0], None, dtype)
        if m.known(p.args[0]) and (want is None or isinstance(p.args[0], Var))
        else None
    )
    dims = known.get("dims")
    if want is None:
        if "shape" in known:
            want = tuple(known["shape"][: known["rank"]])
        else:
            own = m.shape_of(arg) if arg is not None else m.shape(0, m.most - 1)
            rank = min(len(own) + m.number(0, 2), m.most + 1, ops.MAX_RANK)
            at = subset(m, rank, len(own))
            sizes: list[int | None] = [None] * rank
            for i, d in enumerate(at):
                sizes[d] = m.size() if own[i] == 1 else own[i]
            full = m.fill(sizes)
            if arg is None:
                arg = m.make(p.args[0], own, dtype)
            return [arg], {"shape": full, "rank": rank, "dims": at}
    full = m.fill(want)
    rank = len(full)
    if arg is not None:
        own = m.shape_of(arg)
        if dims is None:
            if len(own) > rank:
                raise Rejected
            options = [subset(m, rank, len(own)) for _ in range(4)]
            good = [
                o for o in options if all(s in (1, full[d]) for s, d in zip(own, o, strict=True))
            ]
            if not good:
                raise Rejected
            dims = good[0]
        return [arg], {"shape": full, "rank": rank, "dims": dims}
    if dims is None:
        k = m.number(0, rank) if m.chance(0.5) else min(1, rank)
        k = rank if m.chance(0.15) else k
        if (wanted := m.rank_of(p.args[0])) is not None:
            k = min(wanted, rank)
        dims = subset(m, rank, k)
    else:
        dims = tuple(d for d in dims if 0 <= d < rank)
    own = tuple(1 if m.chance(0.15) else full[d] for d in dims)
    return [m.make(p.args[0], own, dtype)], {"shape": full, "rank": rank, "dims": dims}


def concat(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Drawn:
    n = len(p.args)
    if want is not None:
        full = m.fill(want)
        if not full:
            raise Rejected
        axis = int(known.get("axis", m.number(0, len(full) - 1)))
        if axis >= len(full) or full[axis] < n:
            raise Rejected
        cuts = (
            sorted(int(c) for c in m.rng.choice(range(1, full[axis]), size=n - 1, replace=False))
            if n > 1
            else []
        )
        ends = [0, *cuts, full[axis]]
        parts = [b - a for a, b in itertools.pairwise(ends)]
        args = [
            m.make(a, (*full[:axis], parts[i], *full[axis + 1 :]), dtype)
            for i, a in enumerate(p.args)
        ]
        return args, {"axis": axis}
    order = sorted(range(n), key=lambda i: (not m.known(p.args[i]), i))
    first = order[0]
    got = {first: m.make(p.args[first], None if m.known(p.args[first]) else m.shape(1), dtype)}
    base = m.shape_of(got[first])
    if not base:
        raise Rejected
    axis = int(known.get("axis", m.number(0, len(base) - 1)))
    if axis >= len(base):
        raise Rejected
    for i in order[1:]:
        got[i] = m.make(p.args[i], (*base[:axis], None, *base[axis + 1 :]), dtype)
    return [got[i] for i in range(n)], {"axis": axis}


def _rest_of_a_slice(m: Drawing, arg: int) -> dict[str, Any] | None:
    """Return attributes of the slice that follows an existing slice of the same array, or None.

    It is taken along the first axis that the existing slice cuts.
    """
    own = m.shape_of(arg)
    for node in m.nodes:
        if node.op == "slice" and node.args == (arg,):
            attrs: list[Any] = [node.attr(f) for f in ("start", "limit", "stride")]
            start, limit, stride = (list(a[: len(own)]) for a in attrs)
            for axis, n in enumerate(own):
                if limit[axis] < n:
                    start[axis], limit[axis] = limit[axis], n
                    return {"start": start, "limit": limit, "stride": stride}
    return None


def slice_(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Drawn:
    if want is not None and not (isinstance(p.args[0], Var) and m.known(p.args[0])):
        full = m.fill(want)
        start, stride, size = [], [], []
        for n in full:
            whole = m.chance(0.6)
            s = 1 if whole or m.chance(0.6) else 2
            a = 0 if whole else m.number(0, 2)
            start.append(a)
            stride.append(s)
            size.append(a + max((n - 1) * s + 1, 0) + (0 if whole else m.number(0, 2)))
        limit = [a + max((n - 1) * s + 1, 0) for a, n, s in zip(start, full, stride, strict=True)]
        return [m.make(p.args[0], tuple(size), dtype)], {
            "start": start,
            "limit": limit,
            "stride": stride,
        }
    arg = m.make(p.args[0], None, dtype)
    own = m.shape_of(arg)
    rest = _rest_of_a_slice(m, arg) if m.chance(0.6) else None
    if rest is not None:
        return [arg], rest
    if own and m.chance(0.4):  # a prefix along one axis
        axis = m.number(0, len(own) - 1)
        head = m.number(min(1, own[axis]), own[axis])
        return [arg], {
            "start": (0,) * len(own),
            "limit": (*own[:axis], head, *own[axis + 1 :]),
            "stride": (1,) * len(own),
        }
    start, limit, stride = [], [], []
    for i, n in enumerate(own):
        if (want is None and m.chance(0.5)) or (
            want is not None and i < len(want) and want[i] == n
        ):
            bounds = (0, n, 1)
        else:
            a = m.number(0, n if m.zero else max(n - 1, 0))
            bounds = (a, m.number(a if m.zero else min(a + 1, n), n), 1 if m.chance(0.7) else 2)
        start.append(bounds[0])
        limit.append(bounds[1])
        stride.append(bounds[2])
    return [arg], {"start": start, "limit": limit, "stride": stride}


def pad(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Drawn:
    def amounts(rank: int) -> tuple[list[int], list[int], list[int]]:
        plain = [m.chance(0.5) for _ in range(rank)]
        lows = [0 if f else m.number(-1, 2) for f in plain]
        highs = [0 if f else m.number(-1, 2) for f in plain]
        return lows, highs, [0 if f or m.chance(0.8) else 1 for f in plain]

    if want is not None and not (isinstance(p.args[0], Var) and m.known(p.args[0])):
        full = m.fill(want)
        low, high, interior = amounts(len(full))
        interior = [0] * len(full)
        size = tuple(n - a - b for n, a, b in zip(full, low, high, strict=True))
        if any(n < 0 for n in size):
            raise Rejected
        arg = m.make(p.args[0], size, dtype)
    else:
        arg = m.make(p.args[0], None, dtype)
        low, high, interior = amounts(len(m.shape_of(arg)))
    value = m.make(p.args[1], (), dtype)
    return [arg, value], {"low": low, "high": high, "interior": interior}
