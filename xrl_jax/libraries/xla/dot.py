"""Lowerings of contractions to lax code: operand order, position of the contracted axis, batches as
a loop.

Letters of a `dot_general`, each for a group of axes: B batch, M free on the left, N free on the
right, K contracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
from jax import lax

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node
from xrl_jax.libraries.base import Condition, Facts, Lowering
from xrl_jax.libraries.xla.plain import accumulator, dot_dims, number

_LISTS = ("lhs_contract", "rhs_contract", "lhs_batch", "rhs_batch")  # lists of axes
_MAX_LOOP = 64  # products that a batched one is unrolled into


@dataclass(frozen=True)
class Axes:
    """The axes of both arguments by their role in the contraction."""

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
    """Return the left argument as [B, M, K], the right one as [B, N, K] if `out_in` else
    [B, K, N], and the result's shape.

    There is no axis B if the contraction has no batch axes.
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


def as_matrices(
    node: Node,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    out_in: bool,
    product: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Compute [B, M, K] by [B, N, K] if `out_in` (weights stored [out, in]), else by [B, K, N].

    Args:
      product: function of (left, right, dimension numbers) to use instead of `lax.dot_general`.
    """
    left, right, shape = _matrices(node, lhs, rhs, out_in=out_in)
    b = left.ndim - 2
    batch = tuple(range(b))
    numbers = ((b + 1,), (b + 1 if out_in else b,)), (batch, batch)
    product = product or partial(_product, node)
    return product(left, right, numbers).reshape(shape)


def _swapped(node: Node, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Compute A B as (Bᵀ Aᵀ)ᵀ."""
    (lc, rc), (lb, rb) = dot_dims(node)
    a = _axes(node, lhs.ndim, rhs.ndim)
    y = _product(node, rhs, lhs, ((rc, lc), (rb, lb)))
    b, n, m = len(lb), len(a.rhs_free), len(a.lhs_free)
    order = (*range(b), *range(b + n, b + n + m), *range(b, b + n))
    return lax.transpose(y, order)


def _loop(out_in: bool) -> Callable[..., jax.Array]:
    """Return a lowering that computes one matrix product for each element of the batch."""

    def fn(node: Node, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        left, right, shape = _matrices(node, lhs, rhs, out_in=out_in)
        contract = ((1,), (1,)) if out_in else ((1,), (0,))
        parts = [
            _product(node, left[i], right[i], (contract, ((), ()))) for i in range(left.shape[0])
        ]
        return lax.concatenate([p[None] for p in parts], 0).reshape(shape)

    return fn


class DotFacts(Facts):
    """Facts of a contraction of two arrays."""

    @cached_property
    def suits(self) -> Any:
        """Whether all dtypes are floating-point, or those of `in_float32`, and nothing is empty."""
        result, (left, right) = self.view.dtype, self.view.arg_dtypes[:2]
        floats = self.is_float(result) & self.is_float(left) & self.is_float(right)
        return (floats | self.in_float32) & self.nonempty

    @cached_property
    def in_float32(self) -> Any:
        """Whether the dtypes are float32; that of the right argument may be narrower."""
        result, (left, right) = self.view.dtype, self.view.arg_dtypes[:2]
        return self.is_single(result) & self.is_single(left) & self.is_weight_type(right)

    @cached_property
    def _counts(self) -> Mapping[str, Any]:
        """The number of axes in each list (packed by `ops.pack_dims`)."""

        def count(name: str) -> Any:
            return sum((self.number(name) >= 8**i) * 1 for i in range(ops.MAX_RANK))

        return {name: count(name) for name in _LISTS}

    def _is_run(self, name: str, start: Any) -> Any:
        """Return whether the axes of a list are start, start + 1, and so on, in order.

        In a packed list each octal digit is an axis plus one; the first axis is the lowest digit.
        """
        digits = (1 << 3 * self._counts[name]) - 1
        return self.number(name) == ((0o654321 + start * 0o111111) & digits)

    @cached_property
    def _has_matrix_layout(self) -> Any:
        """The part of `layout_is` that does not depend on `out_in`."""
        left, b = self.view.arg_ranks[0], self._counts["lhs_batch"]
        lists = self._is_run("lhs_batch", 0) & self._is_run("rhs_batch", 0)
        lists = lists & self._is_run("lhs_contract", left - self._counts["lhs_contract"])
        return lists & (b <= 1) & (left == b + 2) & (self.view.arg_ranks[1] == b + 2)

    def layout_is(self, out_in: bool) -> Any:
        """Return whether the arguments are [B, M, K] and [B, N, K] (`out_in`) or [B, K, N]."""
        counts, right = self._counts, self.view.arg_ranks[1]
        start = right - counts["rhs_contract"] if out_in else counts["lhs_batch"]
        return self._has_matrix_layout & self._is_run("rhs_contract", start)

    @cached_property
    def symmetric(self) -> Any:
        """Whether the precision is the same for both arguments, so that they may be swapped: none,
        an algorithm (10 and above), or two equal precisions (1, 5, 9).
        """
        precision = self.number("precision")
        return (precision == 0) | (precision >= 10) | (precision % 4 == 1)

    @cached_property
    def is_batched(self) -> Any:
        """Whether there is a batch, of few products; its axes are the first of the result."""
        shape, b = self.view.shape, self._counts["lhs_batch"]
        n = self.product(*(self.xp.where(i < b, shape[i], 1) for i in range(ops.MAX_RANK)))
        return (n > 1) & (n <= _MAX_LOOP)

    @cached_property
    def without_batch(self) -> Any:
        return self._counts["rhs_batch"] == 0

    @cached_property
    def ends_in_columns(self) -> Any:
        """Whether the result is [.., N] without a batch, N being one axis of the right argument."""
        batch = self._counts["rhs_batch"]
        free = self.view.arg_ranks[1] - self._counts["rhs_contract"] - batch
        return (free == 1) & (batch == 0)


def dot_lowering(
    name: str, fn: Callable[..., jax.Array], *when: Condition, **more: Any
) -> Lowering:
    """Return a lowering that is right if `suits` and these conditions hold; `more` are further
    attributes of the row.
    """
    return Lowering(name, fn, ("suits", *when), **more)


_row = dot_lowering
_PER_HEAD = "XLA gap: one matmul per head x1.9"
DOT: tuple[Lowering, ...] = (
    _row(
        "flat",
        partial(as_matrices, out_in=False),
        lambda d: ~d.layout_is(False),
        source="XLA gap: transposed attention x1.7",
    ),
    _row(
        "transposed",
        partial(as_matrices, out_in=True),
        lambda d: ~d.layout_is(True),
        source="XLA gap: weight stored [out, in] x1.4",
    ),
    _row("swapped", _swapped, "symmetric", source="XLA gap: operand order"),
    _row("loop", _loop(False), "is_batched", source=_PER_HEAD),
    _row("loop_transposed", _loop(True), "is_batched", source=_PER_HEAD),
)
