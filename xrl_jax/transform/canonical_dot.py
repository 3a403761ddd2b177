"""The canonical form of products.

Transposes of operands are absorbed into the dimension numbers where these can express them.
Adjacent dimensions that are contracted, or that are free in the right operand, are merged into one;
those of a weight need not be adjacent.
A weight that is multiplied by a vector comes second, as weights do that are multiplied by several.
A product without contraction becomes a multiplication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node

Dims = tuple[int, ...]


class Builder(Protocol):
    """The graph that new nodes are appended to; see `canonical.Canonical`."""

    nodes: list[Node]
    prepared: set[int]

    def add_op(self, op: str, args: Sequence[int], **attrs: int | Sequence[int]) -> int | None: ...
    def reshape(self, index: int, shape: Sequence[int]) -> int | None: ...
    def broadcast(self, index: int, shape: Sequence[int], dims: Sequence[int]) -> int | None: ...


class Side(NamedTuple):
    """An operand of a product.

    Attributes:
      index: index of its node.
      contract, batch: dimension numbers.
    """

    index: int
    shape: Dims
    contract: Dims
    batch: Dims

    @property
    def free(self) -> Dims:
        return tuple(d for d in range(len(self.shape)) if d not in (*self.contract, *self.batch))


def sides(g: Builder, node: Node) -> tuple[Side, Side]:
    """Return the operands of a product."""

    def dims(name: str) -> Dims:
        return ops.unpack_dims(node.scalar_attr(name))

    left, right = (
        Side(arg, g.nodes[arg].shape, dims(f"{side}_contract"), dims(f"{side}_batch"))
        for arg, side in zip(node.args, ("lhs", "rhs"), strict=True)
    )
    return left, right


def canonical(g: Builder, node: Node) -> int | None:
    """Return a product in canonical form; None if it already is."""
    left, right = sides(g, node)
    if not left.contract:
        return _multiplied(g, node, left, right)
    for one, other, of in (
        (_without_transpose(g, left), right, 0),
        (_without_transpose(g, right), left, 1),
    ):
        if one is not None:
            return _dot(g, node, one, other) if of == 0 else _dot(g, node, other, one)
    merged = _contracting_one(g, left, right)
    if merged is not None:
        return _dot(g, node, *merged)
    return _weight_second(g, node, left, right) or _with_one_free(g, node, left, right)


def exchange_operands(g: Builder, node: Node, perm: Dims) -> int | None:
    """Return a transposed product as the product with exchanged operands.

    None unless `perm` exchanges the free dimensions of the two operands and does nothing else.
    """
    dot = g.nodes[node.args[0]]
    left, right = sides(g, dot)
    n, m, k = (len(d) for d in (left.batch, left.free, right.free))
    exchanged = (*range(n), *range(n + m, n + m + k), *range(n, n + m))
    return _dot(g, dot, right, left, is_exchanged=True) if perm == exchanged else None


def _dot(
    g: Builder, like: Node, left: Side, right: Side, *, is_exchanged: bool = False
) -> int | None:
    """Return a product of these operands, with the dtype and the precision of `like`.

    If `is_exchanged`, the precisions of the two operands are exchanged.
    """
    precision = like.scalar_attr("precision")
    named = ops.decode_precision(precision)
    if is_exchanged and isinstance(named, tuple):
        precision = ops.encode_precision(named[::-1]) or 0
    return g.add_op(
        "dot",
        [left.index, right.index],
        lhs_contract=ops.pack_dims(left.contract),
        rhs_contract=ops.pack_dims(right.contract),
        lhs_batch=ops.pack_dims(left.batch),
        rhs_batch=ops.pack_dims(right.batch),
        precision=precision,
        dtype=like.scalar_attr("dtype"),
    )


def _without_transpose(g: Builder, side: Side) -> Side | None:
    """Return the operand without its transpose.

    None if it has none, or if the transpose changes the order of the free dimensions.
    """
    x = g.nodes[side.index]
    if x.op != "transpose":
        return None
    perm = x.dims("perm")
    free = [perm[d] for d in side.free]
    if free != sorted(free):
        return None
    (source,) = x.args
    return Side(
        source,
        g.nodes[source].shape,
        tuple(perm[d] for d in side.contract),
        tuple(perm[d] for d in side.batch),
    )


def _contracting_one(g: Builder, left: Side, right: Side) -> tuple[Side, Side] | None:
    """Return both operands with their contracted dimensions merged into one.

    The dimensions must be adjacent and in the same order in both operands; otherwise None.
    """
    if len(left.contract) < 2:
        return None
    order = sorted(range(len(left.contract)), key=left.contract.__getitem__)
    both = []
    for side in (left, right):
        dims = tuple(side.contract[i] for i in order)
        if dims != tuple(range(dims[0], dims[0] + len(dims))):
            return None
        merged = _merged(g, side, dims)
        if merged is None:
            return None
        both.append(merged)
    return both[0], both[1]


def _merged(g: Builder, side: Side, dims: Dims) -> Side | None:
    """Return the operand with these adjacent dimensions merged into one."""
    first, n = dims[0], len(dims)
    size = math.prod(side.shape[d] for d in dims)
    shape = (*side.shape[:first], size, *side.shape[first + n :])
    index = g.reshape(side.index, shape)
    if index is None:
        return None

    def moved(old: Dims) -> Dims:
        return tuple(dict.fromkeys(first if d in dims else d - (n - 1) * (d > first) for d in old))

    return Side(index, shape, moved(side.contract), moved(side.batch))


def _with_one_free(g: Builder, node: Node, left: Side, right: Side) -> int | None:
    """Return the product with the free dimensions of its right operand merged into one.

    The result is reshaped to the original shape. A weight is transposed for that where necessary.
    """
    free = right.free
    if len(free) < 2:
        return None
    if free != tuple(range(free[0], free[0] + len(free))):
        if right.index not in g.prepared:
            return None
        transposed = _with_free_last(g, right)
        if transposed is None:
            return None
        right = transposed
    merged = _merged(g, right, right.free)
    made = None if merged is None else _dot(g, node, left, merged)
    return None if made is None else g.reshape(made, node.shape)


def _with_free_last(g: Builder, side: Side) -> Side | None:
    """Return the operand transposed: batch, contracted, then free dimensions."""
    order = (*side.batch, *side.contract, *side.free)
    index = g.add_op("transpose", [side.index], perm=order)
    if index is None:
        return None
    n, m = len(side.batch), len(side.contract)
    shape = tuple(side.shape[d] for d in order)
    return Side(index, shape, tuple(range(n, n + m)), tuple(range(n)))


def _weight_second(g: Builder, node: Node, weight: Side, vector: Side) -> int | None:
    """Return the product of a weight and a vector with its operands exchanged."""
    if weight.index not in g.prepared or vector.index in g.prepared or not weight.free:
        return None
    if math.prod(vector.shape[d] for d in vector.free) != 1:
        return None
    made = _dot(g, node, vector, weight, is_exchanged=True)
    return None if made is None else g.reshape(made, node.shape)


def _multiplied(g: Builder, node: Node, left: Side, right: Side) -> int | None:
    """Return a product without contraction as an elementwise multiplication.

    None unless the larger operand has as many elements as the result.
    """
    if math.prod(node.shape) != max(math.prod(left.shape), math.prod(right.shape)):
        return None
    n, m = len(left.batch), len(left.free)
    factors = []
    for side, start in ((left, n), (right, n + m)):
        place = {d: i for i, d in enumerate(side.batch)}
        place |= {d: start + i for i, d in enumerate(side.free)}
        order = sorted(range(len(side.shape)), key=place.__getitem__)
        x: int | None = side.index
        if order != list(range(len(order))):
            x = g.add_op("transpose", [side.index], perm=order)
        if x is not None and g.nodes[x].dtype != node.dtype:
            x = g.add_op("cast", [x], dtype=node.scalar_attr("dtype"))
        if x is not None:
            x = g.broadcast(x, node.shape, [place[d] for d in order])
        if x is None:
            return None
        factors.append(x)
    return g.add_op("mul", factors)
