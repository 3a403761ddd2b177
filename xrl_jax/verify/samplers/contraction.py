"""Samplers of random contractions and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xrl_jax.graph import ops
from xrl_jax.language.rule import Pattern, Var
from xrl_jax.verify.samplers.base import Drawing, Drawn, Rejected, Want, permutation


def _place(
    parts: dict[int, int | None], n_free: int, sizes: Sequence[int | None]
) -> tuple[int | None, ...]:
    """Return a shape with the sizes `parts` at their positions and `sizes` in order elsewhere."""
    rank = len(parts) + n_free
    if any(d >= rank for d in parts) or rank > ops.MAX_RANK:
        raise Rejected
    free = iter(sizes)
    return tuple(parts[d] if d in parts else next(free) for d in range(rank))


@dataclass(frozen=True)
class _DimensionNumbers:
    """Dimension numbers of a product, as far as they are fixed.

    Attributes:
      lists: the fixed lists of dimensions.
      plain: whether the other lists are in the usual order.
    """

    lists: dict[str, tuple[int, ...]]
    n_batch: int
    n_contract: int
    plain: bool

    @property
    def n_used(self) -> int:
        """The number of batch and contracted dimensions of an operand."""
        return self.n_batch + self.n_contract

    def of_side(self, m: Drawing, rank: int, side: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the lists (contract, batch) of one operand."""
        batch, contract = (self.lists.get(f"{side}_{what}") for what in ("batch", "contract"))
        order = list(range(rank))
        if not self.plain:
            order = list(permutation(m, rank))
        elif side == "lhs":
            order.reverse()
        if batch is None:
            left = [d for d in order if d not in (contract or ())]
            batch = tuple((sorted(left) if self.plain else left)[: self.n_batch])
        if contract is None:
            contract = tuple([d for d in order if d not in batch][: self.n_contract])
        if (len(batch), len(contract)) != (self.n_batch, self.n_contract):
            raise Rejected
        if any(d >= rank for d in batch + contract):
            raise Rejected
        return contract, batch


def _dimension_numbers(m: Drawing, known: dict[str, Any], rank: int | None) -> _DimensionNumbers:
    """Draw dimension numbers of a product whose first operand has this rank (None: unknown)."""
    names = ("lhs_contract", "rhs_contract", "lhs_batch", "rhs_batch")
    lists = {f: ops.unpack_dims(int(known[f])) for f in names if f in known}

    def length(what: str, drawn: int) -> int:
        given = lists.get(f"lhs_{what}", lists.get(f"rhs_{what}"))
        return drawn if given is None else len(given)

    n_batch = length("batch", int(m.rng.choice((0, 0, 1, 2))))
    n_contract = length("contract", int(m.rng.choice((1, 1, 1, 1, 2, 0))))
    if rank is not None and rank < n_batch + n_contract and "lhs_batch" not in lists:
        n_batch = 0
    if rank is not None and rank < n_batch + n_contract:
        raise Rejected
    plain = m.chance(0.5)
    inner = [n for n in m.nodes if n.op == "dot" and n.attr("lhs_batch")]
    if inner and not lists and m.chance(0.6):  # a product of a product, with the same batch
        n_batch, n_contract, plain = (
            len(ops.unpack_dims(inner[-1].scalar_attr("lhs_batch"))),
            1,
            True,
        )
    if rank is not None and rank < n_batch + n_contract:
        raise Rejected
    return _DimensionNumbers(lists, n_batch, n_contract, plain)


def _free(
    m: Drawing,
    numbers: _DimensionNumbers,
    want: Want,
    rank: int | None,
    args: Sequence[Pattern | Var],
) -> tuple[int, int]:
    """Draw the numbers of free dimensions of both operands; `rank` is the first one's, or None."""
    one, two = (m.rank_of(a) for a in args)
    n_two = 1 if numbers.plain else m.number(0, 2)
    if want is None:
        n_one = m.number(0, 2)
        n_one = n_one if one is None else max(one - numbers.n_used, 0)
        n_two = n_two if two is None else max(two - numbers.n_used, 0)
        return n_one if rank is None else rank - numbers.n_used, n_two
    total = len(want) - numbers.n_batch
    if rank is not None:
        n_two = total - (rank - numbers.n_used)
    else:
        n_two = min(1, max(total, 0)) if numbers.plain else m.number(0, max(total, 0))
    if n_two < 0 or total - n_two < 0:
        raise Rejected
    return total - n_two, n_two


# Types of operands whose products are summed in a wider type.
_NARROWER = {"float32": ("bfloat16", "float16"), "float64": ("float32",), "int32": ("int8",)}


def _of_operands(m: Drawing, dtype: str) -> str:
    """Draw the type of both operands, mostly that of the result."""
    narrower = _NARROWER.get(dtype, ())
    return str(m.rng.choice(narrower)) if narrower and m.chance(0.05) else dtype


def dot(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Drawn:
    left, right = p.args
    result_dtype, dtype = dtype, _of_operands(m, dtype)
    exchanged = isinstance(left, Var) and left.name not in m.bound and m.known(right)
    one, two = (right, left) if exchanged else (left, right)
    mine, yours = ("rhs", "lhs") if exchanged else ("lhs", "rhs")
    own: tuple[int, ...] | None = None
    index = -1
    if m.known(one) and (want is None or isinstance(one, Var) or m.chance(0.5)):
        index = m.make(one, None, dtype)
        own = m.shape_of(index)
    rank = None if own is None else len(own)
    numbers = _dimension_numbers(m, known, rank)
    n_batch = numbers.n_batch
    n_one, n_two = _free(m, numbers, want, rank, (one, two))
    wanted = list(want[n_batch:]) if want is not None else [None] * (n_one + n_two)
    split = n_two if exchanged else n_one
    pieces = {"lhs": wanted[:split], "rhs": wanted[split:]}
    c1, b1 = numbers.of_side(m, numbers.n_used + n_one, mine)
    if own is None:
        parts: dict[int, int | None] = {d: m.size() for d in c1} | {
            d: (want[i] if want is not None else None) for i, d in enumerate(b1)
        }
        index = m.make(one, _place(parts, n_one, pieces[mine]), dtype)
        own = m.shape_of(index)
    c2, b2 = numbers.of_side(m, numbers.n_used + n_two, yours)
    parts = {d: own[e] for d, e in zip((*c2, *b2), (*c1, *b1), strict=True)}
    other = m.make(two, _place(parts, n_two, pieces[yours]), dtype)
    attrs = {
        f"{mine}_contract": ops.pack_dims(c1),
        f"{mine}_batch": ops.pack_dims(b1),
        f"{yours}_contract": ops.pack_dims(c2),
        f"{yours}_batch": ops.pack_dims(b2),
        "dtype": ops.DTYPE_CODE[result_dtype],
    }
    return ([other, index] if exchanged else [index, other]), attrs


_OF_ONE_DIMENSION = {(0, 1, 2, 3): (0, 1, 2), (0, 3, 1, 2): (0, 2, 1), (3, 2, 0, 1): (2, 1, 0)}


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
            layout = at if n == 2 else _OF_ONE_DIMENSION[at]
        else:
            layout = permutation(m, n + 2)
        codes.append(layout)
    return tuple(codes)


@dataclass
class _Window:
    """The window of a convolution: lists with one entry per spatial dimension."""

    stride: list[int]
    low: list[int]
    high: list[int]
    lhs_dilation: list[int]  # dilation of the image
    rhs_dilation: list[int]  # of the kernel
    kernel: list[int]

    def image_size(self, axis: int, size: int) -> int:
        """Return the image size along an axis for which the result has this size."""
        reach = (self.kernel[axis] - 1) * self.rhs_dilation[axis] + 1
        needed = (size - 1) * self.stride[axis] + reach - self.low[axis] - self.high[axis]
        if self.lhs_dilation[axis] != 1 or needed < 1:
            raise Rejected
        return needed


@dataclass
class _Features:
    """The numbers of groups, features and images of a convolution."""

    groups: int
    are_fixed: bool  # whether `groups` is
    batches: int  # batch groups
    per_group: int
    outs: int
    n_batch: int

    def of_result(self, m: Drawing) -> int:
        """Draw a number of result features that fits the groups."""
        return self.groups * int(m.rng.choice(m.features)) * self.batches


def _n_spatial(
    m: Drawing, known: dict[str, Any], want: Want, operands: Sequence[int | None]
) -> int:
    n = 2 if m.chance(0.85) else 1
    for at in operands:
        if at is not None:
            n = len(m.shape_of(at)) - 2
    if want is not None:
        n = len(want) - 2
    if "lhs_layout" in known:
        n = sum(d >= 0 for d in ops.LAYOUTS[int(known["lhs_layout"])]) - 2
    if n not in (1, 2):
        raise Rejected
    return n


def _window_and_features(m: Drawing, n: int, known: dict[str, Any]) -> tuple[_Window, _Features]:
    """Draw a window and features without regard to existing operands."""
    usual = n == 2 and m.chance(0.15)  # 3x3, stride 1, one group: the most frequent convolution
    if usual:
        ones = (1, 1)
        plain = {"stride": ones, "lhs_dilation": ones, "rhs_dilation": ones, "groups": 1}
        known = plain | known

    def drawn(name: str, choices: Sequence[int]) -> list[int]:
        row = known[name][:n] if name in known else [int(m.rng.choice(choices)) for _ in range(n)]
        return [int(v) for v in row]

    stride = drawn("stride", (1, 1, 2, 3))
    low, high = (drawn(f, (0, 0, 1, 1, 2, -1)) for f in ("low", "high"))
    lhs_dilation = drawn("lhs_dilation", (1, 1, 1, 1, 1, 2))
    rhs_dilation = drawn("rhs_dilation", (1, 1, 1, 1, 2))
    groups = int(known.get("groups", m.rng.choice((1, 1, 1, 1, 2, 2, 4, 8))))
    batches = int(known.get("batch_groups", 2 if groups == 1 and m.chance(0.1) else 1))
    kernel = [int(m.rng.choice((1, 1, 2, 3, 3))) for _ in range(n)]
    if usual:
        kernel = [3] * n
    elif m.chance(0.3):
        kernel = [1] * n
        if m.chance(0.7):
            low, high = (list(known.get(f, (0,) * n)[:n]) for f in ("low", "high"))
    per_group = int(m.rng.choice(m.features))
    features = _Features(groups, "groups" in known, batches, per_group, outs=0, n_batch=0)
    features.outs = features.of_result(m)
    features.n_batch = m.number(1, 2) * batches
    return _Window(stride, low, high, lhs_dilation, rhs_dilation, kernel), features


def _fit_image(m: Drawing, f: _Features, shape: Sequence[int], *, has_kernel: bool) -> None:
    """Set the features to fit an image of this shape [images, features, ...]."""
    if has_kernel and not f.are_fixed:
        if f.per_group == 0 or shape[1] % f.per_group:
            raise Rejected
        f.groups = shape[1] // f.per_group
    elif shape[1] % f.groups:
        f.groups = 1
    f.n_batch, f.per_group = shape[0], shape[1] // f.groups
    if not has_kernel:
        f.outs = f.of_result(m)


def conv(m: Drawing, p: Pattern, want: Want, dtype: str, known: dict[str, Any]) -> Drawn:
    x, w = p.args
    result_dtype, dtype = dtype, _of_operands(m, dtype)
    x_at = m.make(x, None, dtype) if m.known(x) and (isinstance(x, Var) or want is None) else None
    w_at = m.make(w, None, dtype) if isinstance(w, Var) and m.known(w) else None
    n = _n_spatial(m, known, want, (x_at, w_at))
    left, right, out = _layouts(m, n, known)
    window, f = _window_and_features(m, n, known)
    if w_at is not None:
        f.outs, f.per_group, *window.kernel = (m.shape_of(w_at)[d] for d in right)
    features = f.per_group * f.groups
    if x_at is not None:
        shape = [m.shape_of(x_at)[d] for d in left]
        _fit_image(m, f, shape, has_kernel=w_at is not None)
    elif want is not None:
        images, outs = (want[d] for d in out[:2])
        f.outs = outs if outs is not None and w_at is None else f.outs
        f.n_batch = (1 if images is None else images) * f.batches
        if f.groups > 1 and f.outs % f.groups and not f.are_fixed:
            f.groups = 1
        features = f.per_group * f.groups
    if x_at is None:
        targets = [want[d] if want is not None else None for d in out[2:]]
        spatial = [
            m.number(2, 6) if size is None else window.image_size(i, size)
            for i, size in enumerate(targets)
        ]
        x_at = m.make(x, _arranged(left, (f.n_batch, features, *spatial)), dtype)
    if w_at is None:
        w_at = m.make(w, _arranged(right, (f.outs, f.per_group, *window.kernel)), dtype)
    attrs = {
        "stride": window.stride,
        "low": window.low,
        "high": window.high,
        "lhs_dilation": window.lhs_dilation,
        "rhs_dilation": window.rhs_dilation,
        "groups": f.groups,
        "batch_groups": f.batches,
        "lhs_layout": ops.LAYOUT_CODE[left],
        "rhs_layout": ops.LAYOUT_CODE[right],
        "out_layout": ops.LAYOUT_CODE[out],
        "dtype": ops.DTYPE_CODE[result_dtype],
    }
    return [x_at, w_at], attrs


def _arranged(layout: Sequence[int], sizes: Sequence[int | None]) -> Want:
    shape: list[int | None] = [None] * len(layout)
    for role, position in enumerate(layout):
        shape[position] = sizes[role]
    return tuple(shape)
