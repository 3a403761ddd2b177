"""Writes pooling, convolutions and matrix products, for which ONNX fixes the order of axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xrl_jax.backends.onnx.flat import Op
from xrl_jax.backends.onnx.values import Value, export_error
from xrl_jax.backends.onnx.writer import Writer
from xrl_jax.libraries.xla.plain import conv_layouts, dot_dims


def pool(w: Writer, op: Op, op_type: str, **attrs: int) -> Value:
    """Write pooling that leaves out two axes or more; the first two become batch and channels."""
    rank = len(op.shape)
    fields = [op.node.dims(f, rank) for f in ("window", "stride", "low", "high")]
    window, stride, low, high = fields
    idle = [
        d for d in range(rank) if all(f[d] == n for f, n in zip(fields, (1, 1, 0, 0), strict=True))
    ]
    if rank < 3 or len(idle) < 2:
        raise export_error(op, "unless its window leaves out two axes")
    spatial = [d for d in range(rank) if d not in idle[:2]]
    x = w.exact(op.args[0])
    if any(not 0 <= p < n for p, n in zip((*low, *high), window * 2, strict=True)):
        neutral = {"MaxPool": -math.inf}.get(op_type, 0.0)
        x = padded(w, x, low, high, w.constant(neutral, op.dtype))
        low = high = (0,) * rank
    y = w.node(
        op_type,
        w.transpose(x, (*idle[:2], *spatial)),
        shape=[op.shape[d] for d in (*idle[:2], *spatial)],
        kernel_shape=[window[d] for d in spatial],
        strides=[stride[d] for d in spatial],
        pads=[p[d] for p in (low, high) for d in spatial],
        **attrs,
    )
    return w.transpose(y, np.argsort((*idle[:2], *spatial)).tolist())


def conv(w: Writer, op: Op, bias: Value | None = None) -> Value:
    """Write a convolution in layout NC...; operands and result in other layouts are transposed."""
    left, right, out = conv_layouts(op.node)
    n = len(left) - 2
    if op.node.scalar_attr("batch_groups") != 1:
        raise export_error(op, "with a batch_group_count above 1")
    if any(d != 1 for d in op.node.dims("lhs_dilation", n)):
        raise export_error(op, "of a dilated input")
    low, high = op.node.dims("low", n), op.node.dims("high", n)
    x = w.transpose(w.exact(op.args[0]), left)
    if min(*low, *high) < 0:
        x = padded(w, x, (0, 0, *low), (0, 0, *high), w.constant(0, op.dtype))
        low = high = (0,) * n
    kernel = w.transpose(w.exact(op.args[1]), right)
    y = w.node(
        "Conv",
        x,
        kernel,
        *(() if bias is None else (bias,)),
        shape=[op.shape[d] for d in out],
        kernel_shape=kernel.shape[2:],
        strides=op.node.dims("stride", n),
        pads=(*low, *high),
        dilations=op.node.dims("rhs_dilation", n),
        group=op.node.scalar_attr("groups"),
    )
    return w.transpose(y, np.argsort(out).tolist())


def dot(w: Writer, op: Op) -> Value:
    """Write a MatMul, with the operands in the order whose transposes move fewer elements."""
    (lc, rc), (lb, rb) = dot_dims(op.node)
    sides = []
    for a, contracted, batch in zip(op.args, (lc, rc), (lb, rb), strict=True):
        value = w.exact(a)
        if w.flat.ops[a].dtype != op.dtype:
            value = w.cast(value, op.dtype)
        free = [d for d in range(len(value.shape)) if d not in (*contracted, *batch)]
        sides.append(_Side(value, tuple(batch), tuple(free), tuple(contracted)))
    left, right = sides
    n, a, b = len(lb), len(left.free), len(right.free)
    batch = tuple(range(n))
    swapped = (*batch, *range(n + b, n + b + a), *range(n, n + b))
    if _transposed_elements(w, op, right, left, swapped) < _transposed_elements(
        w, op, left, right, tuple(range(n + a + b))
    ):
        return w.transpose(_product(w, right, left), swapped)
    return _product(w, left, right)


@dataclass(frozen=True)
class _Side:
    """An operand of a contraction, and its batch, free and contracted axes."""

    value: Value
    batch: tuple[int, ...]
    free: tuple[int, ...]
    contracted: tuple[int, ...]

    def sizes(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.value.shape[d] for d in axes)


def _transposed_elements(
    w: Writer, op: Op, first: _Side, second: _Side, perm: tuple[int, ...]
) -> float:
    """Return how many elements transposes would move for the product of `first` and `second`,
    transposed by `perm`.
    """
    orders = (
        (first.value, (*first.batch, *first.free, *first.contracted)),
        (second.value, (*second.batch, *second.contracted, *second.free)),
    )
    total = 0.0
    for value, order in orders:
        if value.array is None and order != tuple(range(len(order))):
            total += math.prod(value.shape)
    readers = w.consumers[op.index]
    if len(readers) == 1 and readers[0] >= 0 and w.flat.ops[readers[0]].name == "transpose":
        perm = tuple(perm[p] for p in w.flat.ops[readers[0]].node.dims("perm", len(perm)))
    if perm != tuple(range(len(perm))):
        total += math.prod(op.shape)
    return total


def _product(w: Writer, first: _Side, second: _Side) -> Value:
    """Return the product, of shape [batch, free of first, free of second]."""
    batch, rows, columns = (
        first.sizes(first.batch),
        first.sizes(first.free),
        second.sizes(second.free),
    )
    inner = (math.prod(first.sizes(first.contracted)),)
    shape = (*batch, *rows, *columns)
    if batch:
        rows = (math.prod(rows),)
    if batch or len(columns) > 1:
        columns = (math.prod(columns),)
    a = w.transpose(first.value, (*first.batch, *first.free, *first.contracted))
    b = w.transpose(second.value, (*second.batch, *second.contracted, *second.free))
    product = w.node(
        "MatMul",
        w.reshape(a, (*batch, *rows, *inner)),
        w.reshape(b, (*batch, *inner, *columns)),
        shape=(*batch, *rows, *columns),
    )
    return w.reshape(product, shape)


def padded(w: Writer, x: Value, low: Sequence[int], high: Sequence[int], value: Value) -> Value:
    shape = [a + n + b for a, n, b in zip(low, x.shape, high, strict=True)]
    return w.node("Pad", x, w.ints([*low, *high]), value, shape=shape)
