"""Convolutions in one of two layouts, and the functions that their lowerings share.

Letters: N batch, G groups, C features per group, O features of the result (P per group), S spatial
shape of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product as positions_of
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node
from xrl_jax.libraries.xla.plain import conv_layouts, dims, dtype_attr, number


@dataclass(frozen=True)
class Conv:
    """A convolution with features first (N C spatial) or last (N spatial C); kernel O C spatial.

    `out` is the layout of the node's result.
    """

    first: bool
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    groups: int
    precision: Any
    dtype: str
    out: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.stride) + 2

    @property
    def feature(self) -> int:
        """The feature axis of the left argument and the result."""
        return 1 if self.first else self.rank - 1

    @property
    def layout(self) -> tuple[int, ...]:
        """Positions of (batch, feature, spatial...)."""
        n = self.rank
        return tuple(range(n)) if self.first else (0, n - 1, *range(1, n - 1))

    def close(self, y: jax.Array) -> jax.Array:
        """Return the result in the layout and dtype of the node."""
        here = self.layout
        perm = [0] * self.rank
        for role, position in enumerate(self.out):
            perm[position] = here[role]
        return lax.transpose(y.astype(self.dtype), perm)


def open_conv(
    node: Node, x: jax.Array, w: jax.Array, *, first: bool | None = None
) -> tuple[Conv, jax.Array, jax.Array]:
    """Return the convolution, x with features first or last, and the kernel as O C spatial.

    By default features are first if they are first in the node's layout, otherwise last.
    """
    left, right, out = conv_layouts(node)
    n = len(left) - 2
    if first is None:
        first = left == tuple(range(n + 2))
    c = Conv(
        first=first,
        stride=dims(node, "stride", n),
        padding=tuple(zip(dims(node, "low", n), dims(node, "high", n), strict=True)),
        lhs_dilation=dims(node, "lhs_dilation", n),
        rhs_dilation=dims(node, "rhs_dilation", n),
        groups=number(node, "groups"),
        precision=ops.decode_precision(number(node, "precision")),
        dtype=dtype_attr(node),
        out=out,
    )
    order = left if first else (left[0], *left[2:], left[1])
    return c, lax.transpose(x, order), lax.transpose(w, right)


def dense(c: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute XLA's own convolution in this layout, with the matching kernel (OIHW or HWIO)."""
    n = c.rank
    if any(low < 0 or high < 0 for low, high in c.padding):
        # XLA:CPU takes a 1x1 kernel with padding (-1, 1) for one without padding (jax 0.10.2).
        x = padded(c, x)
        c = replace(c, padding=((0, 0),) * (n - 2), lhs_dilation=(1,) * (n - 2))
    spec = tuple(range(n)) if c.first else (n - 1, n - 2, *range(n - 2))
    w = w if c.first else lax.transpose(w, (*range(2, n), 1, 0))
    return lax.conv_general_dilated(
        x,
        w,
        c.stride,
        c.padding,
        c.lhs_dilation,
        c.rhs_dilation,
        lax.ConvDimensionNumbers(c.layout, spec, c.layout),
        feature_group_count=c.groups,
        precision=c.precision,
    )


def padded(c: Conv, x: jax.Array) -> jax.Array:
    """Return the input with padding and dilation applied."""
    config = [(0, 0, 0)] * c.rank
    for axis, (low, high), dilation in zip(c.layout[2:], c.padding, c.lhs_dilation, strict=True):
        config[axis] = (low, high, dilation - 1)
    if not any(any(entry) for entry in config):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def taps(
    c: Conv, x: jax.Array, kernel: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], jax.Array]]:
    """Yield each kernel position and the part of the padded input that it reads: N features S or
    N S features.
    """
    spatial = c.layout[2:]
    x = padded(c, x)
    for position in positions_of(*(range(k) for k in kernel)):
        start, limit, step = [0] * c.rank, list(x.shape), [1] * c.rank
        for axis, at, k, dilation, stride in zip(
            spatial, position, kernel, c.rhs_dilation, c.stride, strict=True
        ):
            out = (x.shape[axis] - (k - 1) * dilation - 1) // stride + 1
            start[axis], step[axis] = at * dilation, stride
            limit[axis] = at * dilation + (out - 1) * stride + 1
        whole = not any(start) and limit == [*x.shape] and max(step) == 1
        yield position, x if whole else lax.slice(x, start, limit, step)


def accumulator(dtype: Any) -> Any:
    """Return the dtype to accumulate in."""
    return jnp.promote_types(dtype, jnp.float32)


def contract(
    c: Conv,
    x: jax.Array,
    w: jax.Array,
    *,
    in_first: bool,
    product: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """Multiply x [N features S] or [N S features] by w [O, C], contracting the features of each
    group; the result has O features.

    The kernel is stored [.., C, P] if `in_first`, else [.., P, C]. `product` replaces
    `lax.dot_general`.
    """
    g, width, n = c.groups, w.shape[1], x.shape[0]
    sizes = tuple(x.shape[a] for a in c.layout[2:])
    p, area = w.shape[0] // g, math.prod(sizes)
    grouped = w.reshape(g, p, width)
    kernel = lax.transpose(grouped, (0, 2, 1)) if in_first else grouped
    over = 1 if in_first else 2
    if g == 1:
        kernel, over = kernel[0], over - 1
    product = product or partial(
        lax.dot_general, precision=c.precision, preferred_element_type=accumulator(x.dtype)
    )
    if not c.first:
        if g == 1:
            rows = x.reshape(n * area, width)
            y = product(rows, kernel, (((1,), (over,)), ((), ())))
        else:
            rows = x.reshape(n * area, g, width)
            y = product(rows, kernel, (((2,), (over,)), ((1,), (0,))))
            y = lax.transpose(y, (1, 0, 2))
        return y.reshape(n, *sizes, g * p)
    if g == 1 and n == 1:
        columns = x.reshape(width, area)
        y = product(kernel, columns, (((over,), (0,)), ((), ())))
    elif g == 1:
        columns = x.reshape(n, width, area)
        y = product(kernel, columns, (((over,), (1,)), ((), ())))
        y = lax.transpose(y, (1, 0, 2))
    elif n == 1:
        columns = x.reshape(g, width, area)
        y = product(kernel, columns, (((over,), (1,)), ((0,), (0,))))
    else:
        columns = x.reshape(n, g, width, area)
        y = product(kernel, columns, (((over,), (2,)), ((0,), (1,))))
        y = lax.transpose(y, (2, 0, 1, 3))
    return y.reshape(n, g * p, *sizes)


def merge(w: jax.Array, groups: int, k: int) -> jax.Array:
    """Return a kernel of `groups` groups as one of `groups / k`, block-diagonal with k blocks."""
    if k == 1:
        return w
    outs, width, *kernel = w.shape
    blocks = w.reshape(groups // k, k, outs // groups, 1, width, *kernel)
    row = lax.broadcasted_iota(jnp.int32, (1, k, 1, k, 1, *(1 for _ in kernel)), 1)
    column = lax.broadcasted_iota(jnp.int32, row.shape, 3)
    zero = jnp.zeros((), w.dtype)
    return jnp.where(row == column, blocks, zero).reshape(outs, k * width, *kernel)
