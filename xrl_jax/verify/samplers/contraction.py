"""Samplers of random contractions and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xrl_jax.graph import ops
from xrl_jax.language.rule import Pattern, Var
from xrl_jax.verify.samplers.base import Drawing, Made, Rejected, Want, permutation


def _place(
    parts: dict[int, int | None], n_free: int, sizes: Sequence[int | None]
) -> tuple[int | None, ...]:
    """A shape with given sizes at given positions, the free ones filled in order."""
    rank = len(parts) + n_free
    if any(d >= rank for d in parts) or rank > ops.MAX_RANK:
        raise Rejected
    free = iter(sizes)
    return tuple(parts[d] if d in parts else next(free) for d in range(rank))


def dot(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
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
            else permutation(m, rank)
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
    if want is None and (rank := m.rank_of(one)) is not None:
        n_free_one = max(rank - n_batch - n_contract, 0)
    if want is None and (rank := m.rank_of(two)) is not None:
        n_free_two = max(rank - n_batch - n_contract, 0)
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


def _layouts(m: Drawing, n: int, known: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
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
            layout = permutation(m, n + 2)
        codes.append(layout)
    return tuple(codes)


def conv(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Made:
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
    usual = n == 2 and m.chance(0.15)  # what most networks have
    if usual:
        ones = (1, 1)
        plain = {"stride": ones, "lhs_dilation": ones, "rhs_dilation": ones, "groups": 1}
        known = plain | known

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
    if usual:
        kernel = [3] * n
    elif m.chance(0.3):
        kernel = [1] * n
        if m.chance(0.7):
            low, high = (known[f][:n] if f in known else [0] * n for f in ("low", "high"))
    per_group, outs, n_batch = (
        int(m.rng.choice(m.features)),
        groups * int(m.rng.choice(m.features)) * batches,
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
        outs = outs if w_at is not None else groups * int(m.rng.choice(m.features)) * batches
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
