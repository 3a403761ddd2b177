"""Lowerings of pooling, reductions and softmax to lax code.

Sums of 16-bit floats are accumulated in float32, as XLA does.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from functools import cached_property
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node
from xrl_jax.libraries.base import Facts, Lowering, all_of
from xrl_jax.libraries.xla.plain import axes_of, dims

_MAX_TERMS = 64  # window positions, each of which becomes an operation
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_COMBINE: dict[str, Callable[..., jax.Array]] = {
    "window_sum": lax.add,
    "window_max": lax.max,
    "window_min": lax.min,
}
_REDUCE: dict[str, Callable[..., jax.Array]] = {
    "window_sum": lax.reduce_sum,
    "window_max": lax.reduce_max,
    "window_min": lax.reduce_min,
}


def _identity(op: str, dtype: str) -> np.ndarray:
    """Return the identity element of the window's operation."""
    kind = jnp.dtype(dtype)
    if op == "window_sum":
        return np.zeros((), kind)
    if dtype in ops.FLOAT_DTYPES:
        return np.asarray(-math.inf if op == "window_max" else math.inf, kind)
    info = jnp.iinfo(kind)
    return np.asarray(info.min if op == "window_max" else info.max, kind)


def _padded_input(node: Node, x: jax.Array) -> jax.Array:
    """Return the padded input; for sums of floats in float32 at least."""
    if node.op == "window_sum" and node.dtype in ops.FLOAT_DTYPES:
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    widths = [
        (*e, 0) for e in zip(dims(node, "low", x.ndim), dims(node, "high", x.ndim), strict=True)
    ]
    if any(any(w) for w in widths):
        x = lax.pad(x, jnp.asarray(_identity(node.op, x.dtype.name)), widths)
    return x


def _combined(
    node: Node, x: jax.Array, window: tuple[int, ...], stride: tuple[int, ...]
) -> jax.Array:
    """Pool a padded array with one elementwise operation per window position."""
    out = [(n - w) // s + 1 for n, w, s in zip(x.shape, window, stride, strict=True)]
    total: jax.Array | None = None
    for start in product(*(range(w) for w in window)):
        limit = [a + (n - 1) * s + 1 for a, n, s in zip(start, out, stride, strict=True)]
        part = lax.slice(x, start, limit, stride)
        total = part if total is None else _COMBINE[node.op](total, part)
    assert total is not None
    return total


def _shifted(node: Node, x: jax.Array) -> jax.Array:
    """Pool with one operation for each position of the whole window."""
    window, stride = dims(node, "window", x.ndim), dims(node, "stride", x.ndim)
    return _combined(node, _padded_input(node, x), window, stride).astype(node.dtype)


def _separable(node: Node, x: jax.Array) -> jax.Array:
    """Pool along one dimension after the other."""
    y = _padded_input(node, x)
    for d in reversed(range(x.ndim)):
        window, stride = [1] * x.ndim, [1] * x.ndim
        window[d], stride[d] = (dims(node, f, x.ndim)[d] for f in ("window", "stride"))
        y = _combined(node, y, tuple(window), tuple(stride))
    return y.astype(node.dtype)


def _reduced(node: Node, x: jax.Array) -> jax.Array:
    """Pool with windows that cover whole dimensions, as a reduction over these."""
    axes = tuple(d for d, w in enumerate(dims(node, "window", x.ndim)) if w > 1)
    return _REDUCE[node.op](x, axes).reshape(node.shape)


class WindowFacts(Facts):
    """Facts of a pooling over up to four dimensions."""

    @cached_property
    def suits(self) -> Any:
        """Whether values are floats, or integers of 8 bits or more, and nothing is empty."""
        dtype = self.view.dtype
        integers = (dtype == ops.DTYPE_CODE[d] for d in _INTEGERS)
        return functools.reduce(operator.or_, integers, self.is_float(dtype)) & self.nonempty

    @cached_property
    def window(self) -> tuple[Any, ...]:
        return self.numbers("window")

    @cached_property
    def few(self) -> Any:
        n = self.product(*self.window)
        return (n > 1) & (n <= _MAX_TERMS)

    @cached_property
    def several(self) -> Any:
        """Whether more than one dimension has a window, and their sizes add up to few terms."""
        wide = sum((n > 1) * 1 for n in self.window)
        terms = sum((n > 1) * n for n in self.window)
        return (wide > 1) & (terms <= _MAX_TERMS)

    @cached_property
    def whole(self) -> Any:
        """Whether along each dimension the window is 1 or covers the whole array, unpadded."""
        sizes = [self.view.arg_shapes[0][i] for i in range(4)]
        fields = zip(*(self.numbers(n) for n in ("window", "stride", "low", "high")), strict=True)
        return all_of(
            ((window == size) | ((window == 1) & (stride == 1))) & (low == 0) & (high == 0)
            for (window, stride, low, high), size in zip(fields, sizes, strict=True)
        )


WINDOW: tuple[Lowering, ...] = (
    Lowering("shifted", _shifted, ("suits", "few"), source="XLA gap: shifted maxima x2.4"),
    Lowering("separable", _separable, ("suits", "several"), source="XLA gap: separable x5.9"),
    Lowering("reduced", _reduced, ("suits", "whole"), source="XLA gap: global pooling"),
)


def _ones_product(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the sum over `axes`, computed as a product with ones."""
    ones = np.ones([x.shape[d] for d in axes], x.dtype)
    return lax.dot_general(
        x,
        ones,
        ((axes, tuple(range(len(axes)))), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    ).astype(x.dtype)


class AxesFacts(Facts):
    """Facts of a reduction or softmax over a mask of axes."""

    @cached_property
    def is_float_sum(self) -> Any:
        """Whether floats are summed over at least one axis, and nothing is empty."""
        return self.is_float(self.view.dtype) & (self.number("axes") != 0) & self.nonempty


_FLOAT_SUM = ("is_float_sum",)
_BY_MATMUL = "XLA gap: means by matmul x1.6"
REDUCE_SUM: tuple[Lowering, ...] = (
    Lowering(
        "matmul",
        lambda node, x: _ones_product(x, axes_of(node)),
        _FLOAT_SUM,
        source=_BY_MATMUL,
    ),
)


def _softmax_parts(node: Node, x: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Return exp(x - max), and a function that restores reduced axes as axes of size one."""
    axes = axes_of(node)
    shape = tuple(1 if d in axes else n for d, n in enumerate(x.shape))

    def spread(reduced: jax.Array) -> jax.Array:
        return reduced.reshape(shape)

    return jnp.exp(x - lax.stop_gradient(spread(lax.reduce_max(x, axes)))), spread


def _reciprocal(node: Node, x: jax.Array) -> jax.Array:
    """Compute the softmax with one division per sum, then products."""
    weights, spread = _softmax_parts(node, x)
    total = lax.reduce_sum(weights, axes_of(node))
    return weights * spread(1 / total)


def _softmax_matmul(node: Node, x: jax.Array) -> jax.Array:
    """Compute the softmax with its sums as products with ones."""
    weights, spread = _softmax_parts(node, x)
    return weights / spread(_ones_product(weights, axes_of(node)))


SOFTMAX: tuple[Lowering, ...] = (
    Lowering("reciprocal", _reciprocal, _FLOAT_SUM, source="derived"),
    Lowering("matmul", _softmax_matmul, _FLOAT_SUM, source=_BY_MATMUL),
)
