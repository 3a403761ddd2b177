"""Ways for pooling, reductions and softmax to become lax code.

Sums of 16-bit floats are accumulated in float32, as XLA does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node
from xrl_jax.lowerings.plain import Lowering, axes_of, dims

_MAX_TERMS = 64  # window positions that are worth an operation each
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
    """The value that changes nothing under the window's operation."""
    kind = jnp.dtype(dtype)
    if op == "window_sum":
        return np.zeros((), kind)
    if dtype in ops.FLOAT_DTYPES:
        return np.asarray(-math.inf if op == "window_max" else math.inf, kind)
    info = jnp.iinfo(kind)
    return np.asarray(info.min if op == "window_max" else info.max, kind)


def _opened(node: Node, x: jax.Array) -> jax.Array:
    """The padded input, sums of floats widened."""
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
    """Pooling of a padded array as one operation for each window position."""
    out = [(n - w) // s + 1 for n, w, s in zip(x.shape, window, stride, strict=True)]
    total: jax.Array | None = None
    for start in product(*(range(w) for w in window)):
        limit = [a + (n - 1) * s + 1 for a, n, s in zip(start, out, stride, strict=True)]
        part = lax.slice(x, start, limit, stride)
        total = part if total is None else _COMBINE[node.op](total, part)
    assert total is not None
    return total


def _shifted(node: Node, x: jax.Array) -> jax.Array:
    """All window positions at once."""
    window, stride = dims(node, "window", x.ndim), dims(node, "stride", x.ndim)
    return _combined(node, _opened(node, x), window, stride).astype(node.dtype)


def _separable(node: Node, x: jax.Array) -> jax.Array:
    """One dimension after the other."""
    y = _opened(node, x)
    for d in reversed(range(x.ndim)):
        window, stride = [1] * x.ndim, [1] * x.ndim
        window[d], stride[d] = (dims(node, f, x.ndim)[d] for f in ("window", "stride"))
        y = _combined(node, y, tuple(window), tuple(stride))
    return y.astype(node.dtype)


def _reduced(node: Node, x: jax.Array) -> jax.Array:
    """A window over all of some dimensions, as a reduction."""
    axes = tuple(d for d, w in enumerate(dims(node, "window", x.ndim)) if w > 1)
    return _REDUCE[node.op](x, axes).reshape(node.shape)


def _suits(node: Node, args: tuple[Node, ...]) -> bool:
    return node.dtype in (*ops.FLOAT_DTYPES, *_INTEGERS) and all(args[0].shape) and all(node.shape)


def _windows(node: Node, args: tuple[Node, ...]) -> tuple[int, ...]:
    return dims(node, "window", len(args[0].shape))


def _few(node: Node, args: tuple[Node, ...]) -> bool:
    return _suits(node, args) and 1 < math.prod(_windows(node, args)) <= _MAX_TERMS


def _several(node: Node, args: tuple[Node, ...]) -> bool:
    wide = [w for w in _windows(node, args) if w > 1]
    return _suits(node, args) and len(wide) > 1 and sum(wide) <= _MAX_TERMS


def _whole(node: Node, args: tuple[Node, ...]) -> bool:
    rank = len(args[0].shape)
    plain = not any((*dims(node, "low", rank), *dims(node, "high", rank)))
    spans = zip(_windows(node, args), args[0].shape, dims(node, "stride", rank), strict=True)
    return _suits(node, args) and plain and all(w == n or (w == 1 and s == 1) for w, n, s in spans)


WINDOW: tuple[Lowering, ...] = (
    Lowering("shifted", _shifted, _few),
    Lowering("separable", _separable, _several),
    Lowering("reduced", _reduced, _whole),
)


def _ones_product(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The sum over `axes` as a product with ones."""
    ones = np.ones([x.shape[d] for d in axes], x.dtype)
    return lax.dot_general(
        x,
        ones,
        ((axes, tuple(range(len(axes)))), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    ).astype(x.dtype)


def _is_float_sum(node: Node, args: tuple[Node, ...]) -> bool:
    return node.dtype in ops.FLOAT_DTYPES and bool(axes_of(node)) and all(args[0].shape)


REDUCE_SUM: tuple[Lowering, ...] = (
    Lowering("matmul", lambda node, x: _ones_product(x, axes_of(node)), _is_float_sum),
)


def _softmax_parts(node: Node, x: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """exp(x - max), and what puts the reduced axes back as axes of size one."""
    axes = axes_of(node)
    shape = tuple(1 if d in axes else n for d, n in enumerate(x.shape))

    def spread(reduced: jax.Array) -> jax.Array:
        return reduced.reshape(shape)

    return jnp.exp(x - lax.stop_gradient(spread(lax.reduce_max(x, axes)))), spread


def _reciprocal(node: Node, x: jax.Array) -> jax.Array:
    """One division for each sum, then products."""
    weights, spread = _softmax_parts(node, x)
    total = lax.reduce_sum(weights, axes_of(node))
    return weights * spread(1 / total)


def _softmax_matmul(node: Node, x: jax.Array) -> jax.Array:
    """The sums as products with ones."""
    weights, spread = _softmax_parts(node, x)
    return weights / spread(_ones_product(weights, axes_of(node)))


SOFTMAX: tuple[Lowering, ...] = (
    Lowering("reciprocal", _reciprocal, _is_float_sum),
    Lowering("matmul", _softmax_matmul, _is_float_sum),
)
