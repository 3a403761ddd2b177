"""Reductions, cumulative sums and products of ONNX."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import (
    Array,
    Node,
    Translation,
    Value,
    axis_of,
    device,
    is_float,
    like,
)


def reduced_axes(node: Node, x: Value, axes: Value | None) -> tuple[int, ...] | None:
    """Return the axes to reduce, or None where the node reduces nothing."""
    chosen = node.get("axes", ()) if axes is None else node.ints(axes, "axes")
    if not chosen:
        return None if node.get("noop_with_empty_axes", 0) else tuple(range(x.ndim))
    return tuple(axis_of(axis, x.ndim) for axis in chosen)


def reduction(
    reduce: Callable[..., Array],
    before: Callable[[Array], Array] | None = None,
    after: Callable[[Array], Array] | None = None,
) -> Translation:
    def translate(node: Node, x: Value, axes: Value | None = None) -> Array:
        x = device(x)
        x = before(x) if before else x
        chosen = reduced_axes(node, x, axes)
        if chosen is not None:
            keep = bool(node.get("keepdims", 1))
            dtype = x.dtype
            x = lax.convert_element_type(reduce(x, axis=chosen, keepdims=keep), dtype)
        return after(x) if after else x

    return translate


def mean(x: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    if is_float(x):
        return jnp.mean(x, axis=axis, keepdims=keepdims)
    count = math.prod(x.shape[i] for i in axis)
    total = jnp.sum(x, axis=axis, keepdims=keepdims)
    return lax.div(total, like(total, count))


def extreme(
    reduce: Callable[..., Array], of_bools: Callable[..., Array], sign: int
) -> Callable[..., Array]:
    """Return a max (sign 1) or min (-1) reduction; of no elements, the end of the dtype's range."""

    def find(x: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
        if x.dtype == np.bool_:
            return of_bools(x, axis=axis, keepdims=keepdims)
        if all(x.shape[i] for i in axis):
            return reduce(x, axis=axis, keepdims=keepdims)
        limits = np.iinfo(x.dtype) if not is_float(x) else None
        ends = (-np.inf, np.inf) if limits is None else (limits.min, limits.max)
        return reduce(x, axis=axis, keepdims=keepdims, initial=like(x, ends[sign < 0]))

    return find


largest = extreme(jnp.max, jnp.any, 1)
smallest = extreme(jnp.min, jnp.all, -1)


def log_sum_exp(x: Array, axis: tuple[int, ...], keepdims: bool) -> Array:
    top = lax.stop_gradient(largest(x, axis, True))
    zero = lax.full_like(top, 0)
    top = lax.select(lax.is_finite(top), top, zero)
    total = lax.log(jnp.sum(lax.exp(x - top), axis=axis, keepdims=True)) + top
    return total if keepdims else lax.squeeze(total, axis)


def cumulative(run: Callable[..., Array], start: float) -> Translation:
    def translate(node: Node, x: Value, axis_input: Value) -> Array:
        x = device(x)
        axis = axis_of(int(node.host(axis_input, "axis").reshape(())), x.ndim)
        backwards = bool(node.get("reverse", 0))
        result = run(x, axis, reverse=backwards)
        if not node.get("exclusive", 0):
            return result
        # Exclusive: drop the full total and start with the neutral element.
        pads = [(0, 0, 0)] * x.ndim
        pads[axis] = (-1, 1, 0) if backwards else (1, -1, 0)
        return lax.pad(result, like(result, start), pads)

    return translate


TRANSLATIONS: dict[str, Translation] = {
    "CumProd": cumulative(lax.cumprod, 1),
    "CumSum": cumulative(lax.cumsum, 0),
    "ReduceL1": reduction(jnp.sum, before=jnp.abs),
    "ReduceL2": reduction(jnp.sum, before=lax.square, after=lax.sqrt),
    "ReduceLogSum": reduction(jnp.sum, after=lax.log),
    "ReduceLogSumExp": reduction(log_sum_exp),
    "ReduceMax": reduction(largest),
    "ReduceMean": reduction(mean),
    "ReduceMin": reduction(smallest),
    "ReduceProd": reduction(jnp.prod),
    "ReduceSum": reduction(jnp.sum),
    "ReduceSumSquare": reduction(jnp.sum, before=lax.square),
}
