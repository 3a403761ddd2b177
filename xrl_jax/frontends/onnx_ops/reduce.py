"""ONNX reductions and running sums."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import (
    Node,
    Translation,
    Value,
    axis_of,
    device,
    is_float,
    like,
)


def reduced_axes(node: Node, x: Value, axes: Value | None) -> tuple[int, ...] | None:
    """Return the axes to reduce, or None where the node is an identity."""
    chosen = node.get("axes", ()) if axes is None else node.ints(axes, "axes")
    if not chosen:
        return None if node.get("noop_with_empty_axes", 0) else tuple(range(x.ndim))
    return tuple(axis_of(axis, x.ndim) for axis in chosen)


def reduction(
    reduce: Callable[..., jax.Array],
    before: Callable[[jax.Array], jax.Array] | None = None,
    after: Callable[[jax.Array], jax.Array] | None = None,
) -> Translation:
    def translate(node: Node, x: Value, axes: Value | None = None) -> jax.Array:
        x = device(x)
        x = before(x) if before else x
        chosen = reduced_axes(node, x, axes)
        if chosen is not None:
            keep = bool(node.get("keepdims", 1))
            dtype = x.dtype
            x = lax.convert_element_type(reduce(x, axis=chosen, keepdims=keep), dtype)
        return after(x) if after else x

    return translate


def mean(x: jax.Array, axis: tuple[int, ...], keepdims: bool) -> jax.Array:
    if is_float(x):
        return jnp.mean(x, axis=axis, keepdims=keepdims)
    count = math.prod(x.shape[i] for i in axis)
    total = jnp.sum(x, axis=axis, keepdims=keepdims)
    return lax.div(total, like(total, count))


def largest(x: jax.Array, axis: tuple[int, ...], keepdims: bool) -> jax.Array:
    if x.dtype == np.bool_:
        return jnp.any(x, axis=axis, keepdims=keepdims)
    initial = -np.inf if is_float(x) else np.iinfo(x.dtype).min
    empty = any(x.shape[i] == 0 for i in axis)
    return jnp.max(x, axis=axis, keepdims=keepdims, initial=like(x, initial) if empty else None)


def smallest(x: jax.Array, axis: tuple[int, ...], keepdims: bool) -> jax.Array:
    if x.dtype == np.bool_:
        return jnp.all(x, axis=axis, keepdims=keepdims)
    initial = np.inf if is_float(x) else np.iinfo(x.dtype).max
    empty = any(x.shape[i] == 0 for i in axis)
    return jnp.min(x, axis=axis, keepdims=keepdims, initial=like(x, initial) if empty else None)


def log_sum_exp(x: jax.Array, axis: tuple[int, ...], keepdims: bool) -> jax.Array:
    top = lax.stop_gradient(largest(x, axis, True))
    zero = lax.full_like(top, 0)
    top = lax.select(lax.is_finite(top), top, zero)
    total = lax.log(jnp.sum(lax.exp(x - top), axis=axis, keepdims=True)) + top
    return total if keepdims else lax.squeeze(total, axis)


def cumulative(run: Callable[..., jax.Array], start: float) -> Translation:
    def translate(node: Node, x: Value, axis_input: Value) -> jax.Array:
        x = device(x)
        axis = axis_of(int(node.host(axis_input, "axis").reshape(())), x.ndim)
        backwards = bool(node.get("reverse", 0))
        result = run(x, axis, reverse=backwards)
        if not node.get("exclusive", 0):
            return result
        # Exclusive: drop the full total and start from the neutral element.
        pads = [(0, 0, 0)] * x.ndim
        pads[axis] = (-1, 1, 0) if backwards else (1, -1, 0)
        return lax.pad(result, like(result, start), pads)

    return translate


def total(x: jax.Array, axis: tuple[int, ...], keepdims: bool) -> jax.Array:
    return jnp.sum(x, axis=axis, keepdims=keepdims)


def product(x: jax.Array, axis: tuple[int, ...], keepdims: bool) -> jax.Array:
    return jnp.prod(x, axis=axis, keepdims=keepdims)


TRANSLATIONS: dict[str, Translation] = {
    "CumProd": cumulative(lax.cumprod, 1),
    "CumSum": cumulative(lax.cumsum, 0),
    "ReduceL1": reduction(total, before=jnp.abs),
    "ReduceL2": reduction(total, before=lax.square, after=lax.sqrt),
    "ReduceLogSum": reduction(total, after=lax.log),
    "ReduceLogSumExp": reduction(log_sum_exp),
    "ReduceMax": reduction(largest),
    "ReduceMean": reduction(mean),
    "ReduceMin": reduction(smallest),
    "ReduceProd": reduction(product),
    "ReduceSum": reduction(total),
    "ReduceSumSquare": reduction(total, before=lax.square),
}
