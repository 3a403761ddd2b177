"""Ways for a contraction to become lax code: operand order, which axis is contracted, batches as a
loop.

In what follows a `dot_general` is B batch, M free on the left, N free on the right, K contracted,
each a run of axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node
from xrl_jax.libraries.onednn import calls as onednn
from xrl_jax.libraries.onednn.calls import NOTHING, Epilogue
from xrl_jax.lowerings.plain import Lowering, accumulator, dot_dims, number

_MAX_LOOP = 64  # products that one batched product may be unrolled into


@dataclass(frozen=True)
class Axes:
    """The axes of the two arguments by their part in the contraction."""

    lhs_batch: tuple[int, ...]
    lhs_free: tuple[int, ...]
    lhs_contract: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    rhs_free: tuple[int, ...]
    rhs_contract: tuple[int, ...]


def _axes(node: Node, lhs_rank: int, rhs_rank: int) -> Axes:
    (lc, rc), (lb, rb) = dot_dims(node)
    return Axes(
        lb,
        tuple(d for d in range(lhs_rank) if d not in lc + lb),
        lc,
        rb,
        tuple(d for d in range(rhs_rank) if d not in rc + rb),
        rc,
    )


def _product(node: Node, lhs: jax.Array, rhs: jax.Array, numbers: Any) -> jax.Array:
    return lax.dot_general(
        lhs,
        rhs,
        numbers,
        precision=ops.decode_precision(number(node, "precision")),
        preferred_element_type=accumulator(node, lhs, rhs),
    )


def _matrices(
    node: Node, lhs: jax.Array, rhs: jax.Array, *, out_in: bool
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    """The left argument as [B, M, K], the right one as [B, N, K] if `out_in` else [B, K, N], and
    the result's shape.

    The batch axis is missing where there is none.
    """
    a = _axes(node, lhs.ndim, rhs.ndim)

    def sizes(x: jax.Array, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(x.shape[d] for d in axes)

    batch, m, n = sizes(lhs, a.lhs_batch), sizes(lhs, a.lhs_free), sizes(rhs, a.rhs_free)
    k = math.prod(sizes(lhs, a.lhs_contract))
    head = (math.prod(batch),) if batch else ()
    left = lax.transpose(lhs, (*a.lhs_batch, *a.lhs_free, *a.lhs_contract))
    left = left.reshape(*head, math.prod(m), k)
    tail = (*a.rhs_free, *a.rhs_contract) if out_in else (*a.rhs_contract, *a.rhs_free)
    right = lax.transpose(rhs, (*a.rhs_batch, *tail))
    right = right.reshape(*head, *((math.prod(n), k) if out_in else (k, math.prod(n))))
    return left, right, (*batch, *m, *n)


def _as_matrices(out_in: bool, *, library: bool = False) -> Callable[..., jax.Array]:
    """[B, M, K] by [B, N, K] if `out_in` (a weight is stored [out, in]), else by [B, K, N]; by
    oneDNN, where it is there, if `library`.
    """

    def fn(node: Node, lhs: jax.Array, rhs: jax.Array, epilogue: Epilogue = NOTHING) -> jax.Array:
        left, right, shape = _matrices(node, lhs, rhs, out_in=out_in)
        b = left.ndim - 2
        batch = tuple(range(b))
        numbers = ((b + 1,), (b + 1 if out_in else b,)), (batch, batch)
        if not library or not onednn.takes(left, right):
            return epilogue(_product(node, left, right, numbers).reshape(shape))
        if epilogue.addend is not None:
            rows = epilogue.addend.reshape(*left.shape[:-1], -1)
            epilogue = epilogue._replace(addend=rows)
        return onednn.dot_general(left, right, numbers, epilogue).reshape(shape)

    return fn


def _swapped(node: Node, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """(Bᵀ Aᵀ)ᵀ."""
    (lc, rc), (lb, rb) = dot_dims(node)
    a = _axes(node, lhs.ndim, rhs.ndim)
    y = _product(node, rhs, lhs, ((rc, lc), (rb, lb)))
    b, n, m = len(lb), len(a.rhs_free), len(a.lhs_free)
    order = (*range(b), *range(b + n, b + n + m), *range(b, b + n))
    return lax.transpose(y, order)


def _loop(out_in: bool) -> Callable[..., jax.Array]:
    """One matrix product for each element of the batch."""

    def fn(node: Node, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        left, right, shape = _matrices(node, lhs, rhs, out_in=out_in)
        contract = ((1,), (1,)) if out_in else ((1,), (0,))
        parts = [
            _product(node, left[i], right[i], (contract, ((), ()))) for i in range(left.shape[0])
        ]
        return lax.concatenate([p[None] for p in parts], 0).reshape(shape)

    return fn


def _suits(node: Node, args: tuple[Node, ...]) -> bool:
    """Floating point throughout, and nothing empty."""
    dtypes = {a.dtype for a in args} | {node.dtype}
    return dtypes <= set(ops.FLOAT_DTYPES) and all(d for n in (node, *args) for d in n.shape)


def _symmetric(node: Node, args: tuple[Node, ...]) -> bool:
    """Whether the precision is the same for both arguments, so that they may change places."""
    precision = ops.decode_precision(number(node, "precision"))
    return not isinstance(precision, tuple) or precision[0] == precision[1]


def _layout(node: Node, args: tuple[Node, ...], *, out_in: bool) -> bool:
    """Whether the arguments are [B, M, K] and [B, N, K] (`out_in`) or [B, K, N] already."""
    a = _axes(node, len(args[0].shape), len(args[1].shape))
    b = len(a.lhs_batch)
    left = (*a.lhs_batch, *a.lhs_free, *a.lhs_contract) == (*range(b), b, b + 1)
    tail = (*a.rhs_free, *a.rhs_contract) if out_in else (*a.rhs_contract, *a.rhs_free)
    return b <= 1 and left and (*a.rhs_batch, *tail) == (*range(b), b, b + 1)


def _batch(node: Node, args: tuple[Node, ...]) -> int:
    (_, _), (lb, _) = dot_dims(node)
    return math.prod(args[0].shape[d] for d in lb)


def _is_batched(node: Node, args: tuple[Node, ...]) -> bool:
    return _suits(node, args) and 1 < _batch(node, args) <= _MAX_LOOP


def _single(node: Node, args: tuple[Node, ...]) -> bool:
    return _suits(node, args) and {node.dtype, *(a.dtype for a in args)} == {"float32"}


def _ends_in_columns(node: Node, args: tuple[Node, ...]) -> bool:
    """Whether the result is [.., N], N one axis of the right argument, without a batch."""
    a = _axes(node, len(args[0].shape), len(args[1].shape))
    return len(a.rhs_free) == 1 and not a.rhs_batch


DOT: tuple[Lowering, ...] = (
    Lowering(
        "flat",
        _as_matrices(False),
        lambda n, args: _suits(n, args) and not _layout(n, args, out_in=False),
    ),
    Lowering(
        "transposed",
        _as_matrices(True),
        lambda n, args: _suits(n, args) and not _layout(n, args, out_in=True),
    ),
    Lowering("swapped", _swapped, lambda n, args: _suits(n, args) and _symmetric(n, args)),
    Lowering("loop", _loop(False), _is_batched),
    Lowering("loop_transposed", _loop(True), _is_batched),
    Lowering("onednn", _as_matrices(False, library=True), _single, _ends_in_columns),
    Lowering("onednn_transposed", _as_matrices(True, library=True), _single, _ends_in_columns),
)
