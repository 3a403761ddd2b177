"""Makers of random operators, one for each shape family: attributes, and arguments whose shapes
fit.

A maker is asked for a node of a pattern, perhaps of a wanted shape (None where any size will do),
and with some attributes fixed by the pattern or by a hint. It asks the `Maker` of `instances` for
its arguments, and raises `Rejected` where a draw leads nowhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from xrl_jax.graph import ops
from xrl_jax.rewrite.rule import Pattern, Var

if TYPE_CHECKING:
    from xrl_jax.rewrite.instances import Maker

Want = tuple[int | None, ...] | None
Made = tuple[list[int], dict[str, Any]]


class Rejected(Exception):  # noqa: N818 - not an error: this proposal does not fit
    """A draw that leads nowhere."""


def elementwise(m: Maker, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
    inner = [dtype] * len(p.args)
    if ops.OPS[p.op].dtype == "bool":
        inner = [
            ("float32" if p.op == "is_finite" else str(m.rng.choice(("float32", "int32"))))
        ] * len(p.args)
        if dtype != "bool":
            raise Rejected
    if p.op == "select":
        inner[0] = "bool"
    if p.op == "cast":
        inner = [str(m.rng.choice(("float32", "bfloat16", "float16", "int32", "float64", "int8")))]
    attrs: dict[str, Any] = {"dtype": ops.DTYPE_CODE[dtype]} if p.op == "cast" else {}
    if p.op == "integer_pow":
        attrs["exponent"] = int(m.rng.choice((-2, -1, 0, 1, 2, 3)))
    order = sorted(range(len(p.args)), key=lambda i: (not m.known(p.args[i]), i))
    got: dict[int, int] = {}
    full: Want = want
    for k, i in enumerate(order):
        arg = p.args[i]
        last = k == len(order) - 1
        fresh = isinstance(arg, Var) and arg.name not in m.bound
        value = isinstance(arg, Var) and arg.name in m.hints.value
        scalar = (
            len(p.args) > 1
            and fresh
            and (value or m.chance(0.2))
            and (not last or full is not None)
        )
        if isinstance(arg, Var) and m.hints.rank.get(arg.name) == 0:
            scalar = True
        if isinstance(arg, Var) and not fresh and m.shape_of(m.bound[arg.name]) == ():
            scalar = True
        aim: Want = () if scalar and (full is None or len(full) or value) else full
        if fresh and not scalar and aim is None and not last and m.chance(0.8):
            aim = m.shape()
        got[i] = m.make(arg, aim, inner[i])
        shape = m.shape_of(got[i])
        if shape != () and not scalar:
            full = shape
    return [got[i] for i in range(len(p.args))], attrs


def _perm(m: Maker, rank: int) -> tuple[int, ...]:
    return tuple(int(i) for i in m.rng.permutation(rank))


def _transpose(m: Maker, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
    perm = known.get("perm")
    if want is not None:
        perm = tuple(perm[: len(want)]) if perm else _perm(m, len(want))
        if sorted(perm) != list(range(len(want))):
            raise Rejected
        back: list[int | None] = [None] * len(want)
        for i, d in enumerate(perm):
            back[d] = want[i]
        return [m.make(p.args[0], tuple(back), dtype)], {"perm": perm}
    fresh = not m.known(p.args[0])
    arg = m.make(p.args[0], m.shape(2, 4) if fresh else None, dtype)
    return [arg], {"perm": perm or _perm(m, len(m.shape_of(arg)))}


def _refactor(m: Maker, shape: Sequence[int]) -> tuple[int, ...]:
    """Another shape with as many elements."""
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


def _reshape(m: Maker, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
    if want is not None:
        shape = m.fill(want)
        if m.known(p.args[0]) and isinstance(p.args[0], Var):
            return [m.make(p.args[0], None, dtype)], {"shape": shape, "rank": len(shape)}
        arg = m.make(p.args[0], _refactor(m, shape), dtype)
        return [arg], {"shape": shape, "rank": len(shape)}
    arg = m.make(p.args[0], None, dtype)
    shape = _refactor(m, m.shape_of(arg))
    return [arg], {"shape": shape, "rank": len(shape)}


def _some(m: Maker, rank: int, k: int) -> tuple[int, ...]:
    return tuple(sorted(int(i) for i in m.rng.choice(rank, size=k, replace=False)))


def _broadcast(m: Maker, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
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
            own = m.shape_of(arg) if arg is not None else m.shape(0, 3)
            rank = min(len(own) + m.number(0, 2), 5)
            at = _some(m, rank, len(own))
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
            options = [_some(m, rank, len(own)) for _ in range(4)]
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
        if isinstance(p.args[0], Var) and p.args[0].name in m.hints.rank:
            k = min(m.hints.rank[p.args[0].name], rank)
        dims = _some(m, rank, k)
    else:
        dims = tuple(d for d in dims if 0 <= d < rank)
    own = tuple(1 if m.chance(0.15) else full[d] for d in dims)
    return [m.make(p.args[0], own, dtype)], {"shape": full, "rank": rank, "dims": dims}


def _concat(m: Maker, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
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
    got = {first: m.make(p.args[first], None if m.known(p.args[first]) else m.shape(1, 4), dtype)}
    base = m.shape_of(got[first])
    if not base:
        raise Rejected
    axis = int(known.get("axis", m.number(0, len(base) - 1)))
    if axis >= len(base):
        raise Rejected
    for i in order[1:]:
        got[i] = m.make(p.args[i], (*base[:axis], None, *base[axis + 1 :]), dtype)
    return [got[i] for i in range(n)], {"axis": axis}


def _rest_of_a_slice(m: Maker, arg: int) -> dict[str, Any] | None:
    """The part behind another slice of the same array, along the first axis that it cuts."""
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


def _slice(m: Maker, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
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
    if own and m.chance(0.4):  # the head along one axis
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


def _pad(m: Maker, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
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


def _axes(m: Maker, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
    """`rev`, `softmax`: a mask of axes that stay."""
    arg = m.make(p.args[0], want, dtype)
    rank = len(m.shape_of(arg))
    return [arg], {"axes": ops.mask_of(_some(m, rank, m.number(min(1, rank), min(2, rank))))}


def _reduce(m: Maker, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
    if "axes" in known and want is not None:
        gone = ops.axes_of(int(known["axes"]))
        rank = len(want) + len(gone)
        if any(a >= rank for a in gone):
            raise Rejected
    elif want is not None:
        rank = len(want) + m.number(1, 2)
        if rank > 5:
            raise Rejected
        gone = _some(m, rank, rank - len(want))
    else:
        fresh = not m.known(p.args[0])
        arg = m.make(p.args[0], m.shape(1, 4) if fresh else None, dtype)
        rank = len(m.shape_of(arg))
        return [arg], {"axes": ops.mask_of(_some(m, rank, m.number(min(1, rank), min(2, rank))))}
    rest = iter(want)
    sizes = tuple(None if d in gone else next(rest) for d in range(rank))
    return [m.make(p.args[0], sizes, dtype)], {"axes": ops.mask_of(gone)}


def _cumulative(m: Maker, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
    arg = m.make(p.args[0], want, dtype)
    rank = len(m.shape_of(arg))
    if not rank:
        raise Rejected
    return [arg], {"axis": m.number(0, rank - 1), "reverse": m.number(0, 1)}


def _window(m: Maker, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
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


def _place(
    parts: dict[int, int | None], n_free: int, sizes: Sequence[int | None]
) -> tuple[int | None, ...]:
    """A shape with given sizes at given positions, the free ones filled in order."""
    rank = len(parts) + n_free
    if any(d >= rank for d in parts) or rank > ops.MAX_RANK:
        raise Rejected
    free = iter(sizes)
    return tuple(parts[d] if d in parts else next(free) for d in range(rank))


def _dot(m: Maker, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
    lists = {
        f: ops.unpack_dims(int(known[f]))
        for f in ("lhs_contract", "rhs_contract", "lhs_batch", "rhs_batch")
        if f in known
    }
    left, right = p.args
    turned = isinstance(left, Var) and left.name not in m.bound and m.known(right)
    one, two = (right, left) if turned else (left, right)
    mine, yours = ("rhs", "lhs") if turned else ("lhs", "rhs")
    own: tuple[int, ...] | None = None
    index = -1
    if m.known(one) and (want is None or isinstance(one, Var) or m.chance(0.5)):
        index = m.make(one, None, dtype)
        own = m.shape_of(index)
    n_batch = len(
        lists.get("lhs_batch", lists.get("rhs_batch", (0,) * int(m.rng.choice((0, 0, 1, 2)))))
    )
    n_contract = len(
        lists.get(
            "lhs_contract", lists.get("rhs_contract", (0,) * int(m.rng.choice((1, 1, 1, 1, 2, 0))))
        )
    )
    if own is not None and len(own) < n_batch + n_contract:
        n_batch = n_batch if "lhs_batch" in lists else 0
        if len(own) < n_batch + n_contract:
            raise Rejected
    plain = m.chance(0.5)
    inner = [n for n in m.nodes if n.op == "dot" and n.attr("lhs_batch")]
    if inner and not lists and m.chance(0.6):  # a dot of a dot, over the same batch
        n_batch, n_contract, plain = len(ops.unpack_dims(int(inner[-1].attr("lhs_batch")))), 1, True  # type: ignore[arg-type]
        if own is not None and len(own) < n_batch + n_contract:
            raise Rejected

    def dims(rank: int, side: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(contract, batch) of one side."""
        batch = lists.get(f"{side}_batch")
        contract = lists.get(f"{side}_contract")
        free = list(
            range(rank)
            if plain and side == "rhs"
            else reversed(range(rank))
            if plain
            else _perm(m, rank)
        )
        if batch is None:
            pool = (
                sorted(d for d in free if d not in (contract or ()))
                if plain
                else [d for d in free if d not in (contract or ())]
            )
            batch = tuple(pool[:n_batch])
        if contract is None:
            contract = tuple([d for d in free if d not in batch][:n_contract])
        if (
            len(batch) != n_batch
            or len(contract) != n_contract
            or any(d >= rank for d in batch + contract)
        ):
            raise Rejected
        return contract, batch

    n_free_two = m.number(0, 2) if not plain else 1
    if want is not None:
        total = len(want) - n_batch
        if own is not None:
            n_free_two = total - (len(own) - n_batch - n_contract)
        else:
            n_free_two = m.number(0, max(total, 0)) if not plain else min(1, max(total, 0))
        if n_free_two < 0 or total - n_free_two < 0:
            raise Rejected
    n_free_one = (len(want) - n_batch - n_free_two) if want is not None else m.number(0, 2)
    if isinstance(one, Var) and one.name in m.hints.rank and want is None:
        n_free_one = max(m.hints.rank[one.name] - n_batch - n_contract, 0)
    if isinstance(two, Var) and two.name in m.hints.rank and want is None:
        n_free_two = max(m.hints.rank[two.name] - n_batch - n_contract, 0)
    n_free_one = len(own) - n_batch - n_contract if own is not None else n_free_one
    wanted = list(want[n_batch:]) if want is not None else [None] * (n_free_one + n_free_two)
    split = n_free_two if turned else n_free_one
    pieces = {"lhs": wanted[:split], "rhs": wanted[split:]}
    c1, b1 = dims(n_batch + n_contract + n_free_one, mine)
    if own is None:
        parts: dict[int, int | None] = {d: m.size() for d in c1} | {
            d: (want[i] if want is not None else None) for i, d in enumerate(b1)
        }
        index = m.make(one, _place(parts, n_free_one, pieces[mine]), dtype)
        own = m.shape_of(index)
    c2, b2 = dims(n_batch + n_contract + n_free_two, yours)
    parts = {d: own[e] for d, e in zip((*c2, *b2), (*c1, *b1), strict=True)}
    other = m.make(two, _place(parts, n_free_two, pieces[yours]), dtype)
    attrs = {
        f"{mine}_contract": ops.pack_dims(c1),
        f"{mine}_batch": ops.pack_dims(b1),
        f"{yours}_contract": ops.pack_dims(c2),
        f"{yours}_batch": ops.pack_dims(b2),
        "dtype": ops.DTYPE_CODE[dtype],
    }
    return ([other, index] if turned else [index, other]), attrs


def _layouts(m: Maker, n: int, known: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    codes = []
    kind = m.rng.random()
    for f, first, last in (
        ("lhs_layout", (0, 1, 2, 3), (0, 3, 1, 2)),
        ("rhs_layout", (0, 1, 2, 3), (3, 2, 0, 1)),
        ("out_layout", (0, 1, 2, 3), (0, 3, 1, 2)),
    ):
        if f in known:
            layout = tuple(d for d in ops.LAYOUTS[int(known[f])] if d >= 0)
            if len(layout) != n + 2:
                raise Rejected
        elif kind < 0.8:
            at = first if kind < 0.45 else last
            layout = (
                tuple(d for d in at if d < 4)
                if n == 2
                else {(0, 1, 2, 3): (0, 1, 2), (0, 3, 1, 2): (0, 2, 1), (3, 2, 0, 1): (2, 1, 0)}[at]
            )
        else:
            layout = _perm(m, n + 2)
        codes.append(layout)
    return tuple(codes)


def _conv(m: Maker, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
    x, w = p.args
    x_at = m.make(x, None, dtype) if m.known(x) and (isinstance(x, Var) or want is None) else None
    w_at = m.make(w, None, dtype) if isinstance(w, Var) and m.known(w) else None
    n = 2 if m.chance(0.85) else 1
    for at in (x_at, w_at):
        if at is not None:
            n = len(m.shape_of(at)) - 2
    if want is not None:
        n = len(want) - 2
    if "lhs_layout" in known:
        n = sum(d >= 0 for d in ops.LAYOUTS[int(known["lhs_layout"])]) - 2
    if n not in (1, 2):
        raise Rejected
    left, right, out = _layouts(m, n, known)

    def drawn(name: str, choices: Sequence[int]) -> list[int]:
        row = known[name][:n] if name in known else [int(m.rng.choice(choices)) for _ in range(n)]
        return [int(v) for v in row]

    stride = drawn("stride", (1, 1, 2, 3))
    low, high = (drawn(f, (0, 0, 1, 1, 2, -1)) for f in ("low", "high"))
    spread, dilation = (
        drawn("lhs_dilation", (1, 1, 1, 1, 1, 2)),
        drawn("rhs_dilation", (1, 1, 1, 1, 2)),
    )
    groups = int(known.get("groups", m.rng.choice((1, 1, 1, 1, 2, 2, 4, 8))))
    batches = int(known.get("batch_groups", 2 if groups == 1 and m.chance(0.1) else 1))
    kernel = [int(m.rng.choice((1, 1, 2, 3, 3))) for _ in range(n)]
    if m.chance(0.3):
        kernel = [1] * n
        if m.chance(0.7):
            low, high = (known[f][:n] if f in known else [0] * n for f in ("low", "high"))
    per_group, outs, n_batch = (
        m.number(1, 2),
        groups * m.number(1, 2) * batches,
        m.number(1, 2) * batches,
    )
    if w_at is not None:
        shape = [m.shape_of(w_at)[d] for d in right]
        outs, per_group, kernel = shape[0], shape[1], list(shape[2:])
    features = per_group * groups
    if x_at is not None:
        shape = [m.shape_of(x_at)[d] for d in left]
        if w_at is not None and "groups" not in known:
            if per_group == 0 or shape[1] % per_group:
                raise Rejected
            groups = shape[1] // per_group
        elif shape[1] % groups:
            groups = 1
        features, n_batch = shape[1], shape[0]
        per_group = features // groups
        outs = outs if w_at is not None else groups * m.number(1, 2) * batches
    elif want is not None:
        sizes = [want[d] for d in out]
        outs = sizes[1] if sizes[1] is not None and w_at is None else outs
        n_batch = (sizes[0] if sizes[0] is not None else 1) * batches
        if groups > 1 and outs % groups and "groups" not in known:
            groups = 1
        features = per_group * groups
    if x_at is None:
        spatial: list[int] = []
        for i in range(n):
            target = want[out[2 + i]] if want is not None else None
            if target is None:
                spatial.append(m.number(2, 6))
                continue
            k = kernel[i]
            assert k is not None
            room = (target - 1) * stride[i] + (k - 1) * dilation[i] + 1 - low[i] - high[i]
            if spread[i] != 1 or room < 1:
                raise Rejected
            spatial.append(room)
        x_at = m.make(x, _arranged(left, (n_batch, features, *spatial)), dtype)
    if w_at is None:
        w_at = m.make(w, _arranged(right, (outs, per_group, *kernel)), dtype)
    attrs = {
        "stride": stride,
        "low": low,
        "high": high,
        "lhs_dilation": spread,
        "rhs_dilation": dilation,
        "groups": groups,
        "batch_groups": batches,
        "lhs_layout": ops.LAYOUT_CODE[left],
        "rhs_layout": ops.LAYOUT_CODE[right],
        "out_layout": ops.LAYOUT_CODE[out],
        "dtype": ops.DTYPE_CODE[dtype],
    }
    return [x_at, w_at], attrs


def _arranged(layout: Sequence[int], sizes: Sequence[int | None]) -> Want:
    shape: list[int | None] = [None] * len(layout)
    for role, position in enumerate(layout):
        shape[position] = sizes[role]
    return tuple(shape)


MAKERS: dict[str, Callable[..., Made]] = {
    "transpose": _transpose, "reshape": _reshape, "broadcast": _broadcast, "concat": _concat,
    "slice": _slice, "pad": _pad, "rev": _axes, "softmax": _axes, "dot": _dot, "conv": _conv,
    **dict.fromkeys((n for n in ops.OPS if n.startswith("reduce_")), _reduce),
    **dict.fromkeys((n for n in ops.OPS if n.startswith("window_")), _window),
    **dict.fromkeys((n for n in ops.OPS if n.startswith("cum")), _cumulative),
}  # fmt: skip
