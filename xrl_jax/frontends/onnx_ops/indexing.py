"""ONNX operators that read or write by index: gather, scatter, one-hot, top-k, arg-max."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import (
    Array,
    Node,
    Translation,
    UnsupportedOnnxError,
    Value,
    axis_of,
    canonical,
    device,
    is_host,
    select,
)
from xrl_jax.frontends.onnx_ops.shape import gather_axis


def wrap(index: Value, length: int) -> Array:
    """Add `length` to negative indices; known indices become int32, others keep their dtype."""
    if is_host(index):
        host = np.asarray(index).astype(np.int64)
        return device(np.where(host < 0, host + length, host).astype(np.int32))
    index = device(index)
    if jnp.issubdtype(index.dtype, jnp.unsignedinteger):
        return index
    zero, end = index.dtype.type(0), index.dtype.type(length)
    return lax.select(lax.lt(index, zero), lax.add(index, end), index)


def gather(node: Node, x: Value, index: Value) -> Array:
    x = device(x)
    axis = axis_of(node.get("axis", 0), x.ndim)
    if is_host(index) and index.size == 1:
        # With one known index this is a slice, which rewrite rules can match.
        start = int(np.asarray(index).reshape(()))
        start = start + x.shape[axis] if start < 0 else start
        piece = lax.slice_in_dim(x, start, start + 1, axis=axis)
        return jnp.reshape(piece, (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))
    return gather_axis(x, wrap(index, x.shape[axis]), axis)


def points_along(index: Array, axis: int) -> Array:
    """Return points for `gather_points`: each element's own position, with `index` along `axis`."""
    own = [lax.broadcasted_iota(index.dtype, index.shape, i) for i in range(index.ndim)]
    own[axis] = index
    return jnp.stack(own, axis=-1)


def gather_elements(node: Node, x: Value, index: Value) -> Array:
    x = device(x)
    axis = axis_of(node.get("axis", 0), x.ndim)
    index = wrap(index, x.shape[axis])
    return gather_points(x, points_along(index, axis))


def gather_points(x: Array, places: Array, batch: int = 0) -> Array:
    """Gather x at points: the last axis of `places` indexes the axes of x after the batch axes."""
    depth = places.shape[-1]
    lead = places.ndim - 1
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(lead, lead + x.ndim - depth - batch)),
        collapsed_slice_dims=tuple(range(batch, batch + depth)),
        start_index_map=tuple(range(batch, batch + depth)),
        operand_batching_dims=tuple(range(batch)),
        start_indices_batching_dims=tuple(range(batch)),
    )
    sizes = (1,) * (batch + depth) + x.shape[batch + depth :]
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, places, numbers, sizes, mode=mode)


def wrap_points(places: Value, lengths: tuple[int, ...]) -> Array:
    parts = [wrap(places[..., i], length) for i, length in enumerate(lengths)]
    return jnp.stack(parts, axis=-1)


def gather_nd(node: Node, x: Value, places: Value) -> Array:
    x = device(x)
    batch = node.get("batch_dims", 0)
    lengths = x.shape[batch : batch + places.shape[-1]]
    return gather_points(x, wrap_points(places, lengths), batch)


SCATTERS: dict[str, Callable[..., Array]] = {
    "none": lax.scatter,
    "add": lax.scatter_add,
    "mul": lax.scatter_mul,
    "max": lax.scatter_max,
    "min": lax.scatter_min,
}


def scatter_points(x: Array, places: Array, updates: Array, reduction: str) -> Array:
    """Write updates into x at points (as in `gather_points`), combining by `reduction`."""
    depth, lead = places.shape[-1], places.ndim - 1
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(lead, updates.ndim)),
        inserted_window_dims=tuple(range(depth)),
        scatter_dims_to_operand_dims=tuple(range(depth)),
    )
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return SCATTERS[reduction](x, places, updates, numbers, mode=mode)


def scatter_elements(node: Node, x: Value, index: Value, updates: Value) -> Array:
    x, updates = device(x), device(updates)
    axis = axis_of(node.get("axis", 0), x.ndim)
    index = wrap(index, x.shape[axis])
    return scatter_points(x, points_along(index, axis), updates, node.get("reduction", "none"))


def scatter_nd(node: Node, x: Value, places: Value, updates: Value) -> Array:
    x, updates = device(x), device(updates)
    places = wrap_points(places, x.shape[: places.shape[-1]])
    return scatter_points(x, places, updates, node.get("reduction", "none"))


def tensor_scatter(node: Node, cache: Value, update: Value, starts: Value | None = None) -> Array:
    """Write `update` [B, ..., S, ...] into a cache along `axis`, at each batch entry's start."""
    cache, update = device(cache), device(update)
    axis = axis_of(node.get("axis", -2), cache.ndim)
    length = cache.shape[axis]
    index = lax.broadcasted_iota(np.int32, update.shape, axis)
    if starts is not None:
        first = lax.convert_element_type(device(starts), np.int32)
        index = index + lax.broadcast_in_dim(first, update.shape, (0,))
    if node.get("mode", "linear") == "circular":
        index = lax.rem(index, np.int32(length))
    return scatter_points(cache, points_along(index, axis), update, "none")


def one_hot(node: Node, index: Value, depth: Value, values: Value) -> Array:
    count = int(node.host(depth, "depth").reshape(()))
    axis = axis_of(node.get("axis", -1), index.ndim + 1)
    index, values = device(index), device(values)
    shape = (*index.shape[:axis], count, *index.shape[axis:])
    index = lax.select(index < index.dtype.type(0), index + index.dtype.type(count), index)
    places = lax.convert_element_type(lax.broadcasted_iota(np.int32, shape, axis), index.dtype)
    return select(jnp.equal(lax.expand_dims(index, (axis,)), places), values[1], values[0])


def arg_best(find: Callable[..., Array]) -> Translation:
    def translate(node: Node, x: Value) -> Array:
        x = device(x)
        axis = axis_of(node.get("axis", 0), x.ndim)
        dtype = canonical(np.int64)
        if node.get("select_last_index", 0):
            last = dtype.type(x.shape[axis] - 1)
            result = last - find(lax.rev(x, (axis,)), axis, dtype)
        else:
            result = find(x, axis, dtype)
        return lax.expand_dims(result, (axis,)) if node.get("keepdims", 1) else result

    return translate


def top_k(node: Node, x: Value, k: Value | None = None) -> tuple[Array, Array]:
    """Return the k largest or smallest along an axis and their indices; ties keep their order."""
    count = node.attributes["k"] if k is None else int(node.host(k, "k").reshape(()))
    x = device(x)
    axis = axis_of(node.get("axis", -1), x.ndim)
    moved = jnp.swapaxes(x, axis, -1)
    if node.get("largest", 1):
        values, index = lax.top_k(moved, count)
    else:
        places = lax.broadcasted_iota(np.int32, moved.shape, moved.ndim - 1)
        values, index = lax.sort((moved, places), dimension=-1, is_stable=True, num_keys=1)
        values, index = values[..., :count], index[..., :count]
    index = lax.convert_element_type(index, canonical(np.int64))
    return jnp.swapaxes(values, axis, -1), jnp.swapaxes(index, axis, -1)


def compress(node: Node, x: Value, condition: Value) -> Array:
    kept = np.flatnonzero(node.host(condition, "condition")).astype(np.int32)
    x = device(x)
    axis = node.get("axis", None)
    if axis is None:
        return gather_axis(jnp.reshape(x, -1), device(kept), 0)
    return gather_axis(x, device(kept), axis_of(axis, x.ndim))


def reverse_sequence(node: Node, x: Value, lengths: Value) -> Array:
    """Reverse the first lengths[b] steps of each batch entry b."""
    x = device(x)
    time, batch = node.get("time_axis", 0), node.get("batch_axis", 1)
    steps = lax.broadcasted_iota(np.int32, x.shape, time)
    length = lax.convert_element_type(device(lengths), np.int32)
    length = lax.broadcast_in_dim(length, x.shape, (batch,))
    index = lax.select(steps < length, length - np.int32(1) - steps, steps)
    return gather_points(x, points_along(index, time))


def refuse_dynamic_size(node: Node, *values: Value | None) -> Array:
    """Raise, because the size of the result depends on data; known inputs are folded instead."""
    raise UnsupportedOnnxError(
        f"{node}: its result has a size that depends on data, which is not supported", (node.op,)
    )


TRANSLATIONS: dict[str, Translation] = {
    "ArgMax": arg_best(lax.argmax),
    "ArgMin": arg_best(lax.argmin),
    "Compress": compress,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "NonZero": refuse_dynamic_size,
    "OneHot": one_hot,
    "ReverseSequence": reverse_sequence,
    "Scatter": scatter_elements,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    "TensorScatter": tensor_scatter,
    "TopK": top_k,
    "Unique": refuse_dynamic_size,
}
