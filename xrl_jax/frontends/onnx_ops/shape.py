"""ONNX operators that move, slice, concatenate or create arrays without arithmetic."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import (
    Array,
    Node,
    OnnxError,
    Translation,
    Value,
    axis_of,
    canonical,
    device,
    is_host,
)

# Arrays with more elements are computed by XLA instead of being constants of the graph.
HOST_LIMIT = 65536


def shape(node: Node, x: Value) -> np.ndarray:
    return np.asarray(x.shape[node.get("start", 0) : node.get("end", None)], np.int64)


def size(node: Node, x: Value) -> np.ndarray:
    return np.asarray(math.prod(x.shape), np.int64)


def identity(node: Node, x: Value) -> Value:
    return x


def dropout(node: Node, x: Value, ratio: Value | None = None, training: Value | None = None):
    """Return x and an all-true mask, because nothing is dropped at inference."""
    trains = training is not None and bool(node.host(training, "training_mode"))
    if trains and (ratio is None or float(node.host(ratio, "ratio")) != 0):
        raise node.unsupported("training mode (random numbers)")
    mask_type = np.bool_ if node.opset >= 10 else x.dtype
    return x, np.ones(x.shape, mask_type)


def reshape(node: Node, x: Value, target: Value) -> Array:
    wanted = list(node.ints(target, "the shape"))
    if not node.get("allowzero", 0):
        wanted = [x.shape[i] if n == 0 else n for i, n in enumerate(wanted)]
    return jnp.reshape(device(x), wanted)


def flatten(node: Node, x: Value) -> Array:
    axis = node.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return jnp.reshape(device(x), (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def squeeze(node: Node, x: Value, axes: Value | None = None) -> Array:
    chosen = node.get("axes", None) if axes is None else node.ints(axes, "axes")
    if chosen is None:
        chosen = [i for i, n in enumerate(x.shape) if n == 1]
    return lax.squeeze(device(x), tuple(axis_of(axis, x.ndim) for axis in chosen))


def unsqueeze(node: Node, x: Value, axes: Value | None = None) -> Array:
    chosen = node.attributes["axes"] if axes is None else node.ints(axes, "axes")
    rank = x.ndim + len(chosen)
    places = {axis_of(axis, rank) for axis in chosen}
    old = iter(x.shape)
    return jnp.reshape(device(x), [1 if i in places else next(old) for i in range(rank)])


def transpose(node: Node, x: Value) -> Array:
    return lax.transpose(device(x), node.get("perm", tuple(reversed(range(x.ndim)))))


def expand(node: Node, x: Value, target: Value) -> Value:
    wanted = np.broadcast_shapes(x.shape, node.ints(target, "the shape"))
    if is_host(x) and math.prod(wanted) <= HOST_LIMIT:
        return np.broadcast_to(x, wanted)
    return jnp.broadcast_to(device(x), wanted)


def tile(node: Node, x: Value, repeats: Value) -> Value:
    counts = node.ints(repeats, "repeats")
    if is_host(x) and x.size * math.prod(counts) <= HOST_LIMIT:
        return np.tile(x, counts)
    x = device(x)
    for axis, count in enumerate(counts):
        if count != 1:
            parts = lax.broadcast_in_dim(
                x,
                (*x.shape[:axis], count, *x.shape[axis:]),
                tuple(i + (i >= axis) for i in range(x.ndim)),
            )
            x = jnp.reshape(parts, (*x.shape[:axis], count * x.shape[axis], *x.shape[axis + 1 :]))
    return x


def concat(node: Node, *values: Value) -> Array:
    axis = axis_of(node.attributes["axis"], values[0].ndim)
    return lax.concatenate([device(value) for value in values], axis)


def split(node: Node, x: Value, sizes: Value | None = None) -> tuple[Array, ...]:
    """Split along an axis into given sizes or equal parts; the last of these may be smaller."""
    axis = axis_of(node.get("axis", 0), x.ndim)
    if sizes is not None:
        parts = node.ints(sizes, "split")
    elif "split" in node.attributes:
        parts = tuple(node.attributes["split"])
    else:
        count = node.get("num_outputs", len(node.outputs))
        length = -(-x.shape[axis] // count)
        parts = (length,) * (count - 1) + (x.shape[axis] - length * (count - 1),)
    if sum(parts) != x.shape[axis]:
        raise OnnxError(f"sizes {parts} do not add up to {x.shape[axis]}")
    return tuple(lax.split(device(x), parts, axis))


def slice_bounds(node: Node, inputs: tuple[Value | None, ...]):
    """Return starts, ends, axes and steps, which are attributes before opset 10, inputs since."""
    if node.opset < 10:
        starts, ends = node.attributes["starts"], node.attributes["ends"]
        axes = node.get("axes", tuple(range(len(starts))))
        return starts, ends, axes, (1,) * len(starts)
    names = ("starts", "ends", "axes", "steps")
    padded = inputs + (None,) * (4 - len(inputs))
    known = [None if v is None else node.ints(v, n) for v, n in zip(padded, names, strict=True)]
    starts, ends, axes, steps = known
    if starts is None or ends is None:
        raise OnnxError("starts and ends are required")
    axes = tuple(range(len(starts))) if axes is None else axes
    return starts, ends, axes, (1,) * len(starts) if steps is None else steps


def slice_(node: Node, x: Value, *inputs: Value | None) -> Array:
    x = device(x)
    cuts = [slice(None)] * x.ndim
    reverse = []
    bounds = zip(*slice_bounds(node, inputs), strict=True)
    for start, end, axis, step in bounds:
        axis = axis_of(axis, x.ndim)
        length = x.shape[axis]
        # A stop that is still negative after adding the length is before the first element.
        first, stop, stride = slice(
            max(start, -length - 1), end if end >= -length else -length - 1, step
        ).indices(length)
        if stride < 0:
            count = len(range(first, stop, stride))
            last = first + (count - 1) * stride
            reverse.append(axis)
            cuts[axis] = slice(last, first + 1, -stride) if count else slice(0, 0, 1)
        else:
            cuts[axis] = slice(first, max(first, stop), stride)
    resolved = [cut.indices(n) for cut, n in zip(cuts, x.shape, strict=True)]
    starts, stops, steps = zip(*resolved, strict=True) if resolved else ((), (), ())
    x = lax.slice(x, starts, stops, steps)
    return lax.rev(x, reverse) if reverse else x


def pad_constant(x: Array, amounts: list[tuple[int, int]], fill: Value) -> Array:
    value = jnp.reshape(device(np.asarray(fill) if np.isscalar(fill) else fill), ())
    return lax.pad(x, value.astype(x.dtype), [(low, high, 0) for low, high in amounts])


def pad_index(length: int, low: int, high: int, mode: str) -> np.ndarray:
    """Return the index of the element that each padded position copies."""
    index = np.arange(-low, length + high)
    if mode == "edge":
        return np.clip(index, 0, length - 1)
    if mode == "wrap":
        return index % length
    period = max(2 * (length - 1), 1)
    index = index % period
    return np.where(index >= length, period - index, index)


def pad(
    node: Node,
    x: Value,
    amounts: Value | None = None,
    fill: Value | None = None,
    axes: Value | None = None,
) -> Array:
    """Pad (negative amounts crop); amounts are attributes before opset 11 and inputs since."""
    x = device(x)
    flat = node.attributes["pads"] if amounts is None else node.ints(amounts, "pads")
    chosen = range(x.ndim) if axes is None else node.ints(axes, "axes")
    pairs = [(0, 0)] * x.ndim
    for axis, low, high in zip(chosen, flat[: len(flat) // 2], flat[len(flat) // 2 :], strict=True):
        pairs[axis_of(axis, x.ndim)] = (int(low), int(high))
    mode = node.get("mode", "constant")
    if mode == "constant":
        default = node.get("value", 0.0)
        return pad_constant(x, pairs, np.asarray(default, x.dtype) if fill is None else fill)
    for axis, (low, high) in enumerate(pairs):
        if (low, high) != (0, 0):
            x = take(x, pad_index(x.shape[axis], low, high, mode), axis)
    return x


def take(x: Array, index: np.ndarray, axis: int) -> Array:
    """Select along an axis by known, valid indices, by slices of runs if these are few."""
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    runs = np.split(index, breaks)
    if len(runs) > 8:
        return gather_axis(x, device(index.astype(np.int32)), axis)
    parts = [lax.slice_in_dim(x, int(run[0]), int(run[-1]) + 1, axis=axis) for run in runs]
    return lax.concatenate(parts, axis) if len(parts) > 1 else parts[0]


def gather_axis(x: Array, index: Array, axis: int) -> Array:
    """Index x along an axis by an array of any rank; indices must be within bounds."""
    kept = tuple(range(axis)) + tuple(range(axis + index.ndim, x.ndim + index.ndim - 1))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=kept, collapsed_slice_dims=(axis,), start_index_map=(axis,)
    )
    sizes = tuple(1 if i == axis else n for i, n in enumerate(x.shape))
    starts = lax.expand_dims(index, (index.ndim,))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, starts, numbers, sizes, mode=mode)


def depth_to_space(node: Node, x: Value) -> Array:
    x = device(x)
    n, c, h, w = x.shape
    b = node.attributes["blocksize"]
    if node.get("mode", "DCR") == "DCR":
        x = lax.transpose(jnp.reshape(x, (n, b, b, c // b**2, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        x = lax.transpose(jnp.reshape(x, (n, c // b**2, b, b, h, w)), (0, 1, 4, 2, 5, 3))
    return jnp.reshape(x, (n, c // b**2, h * b, w * b))


def space_to_depth(node: Node, x: Value) -> Array:
    x = device(x)
    n, c, h, w = x.shape
    b = node.attributes["blocksize"]
    x = jnp.reshape(x, (n, c, h // b, b, w // b, b))
    order = (0, 3, 5, 1, 2, 4) if node.get("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    return jnp.reshape(lax.transpose(x, order), (n, c * b * b, h // b, w // b))


def constant_of_shape(node: Node, target: Value) -> Value:
    wanted = node.ints(target, "the shape")
    value = np.asarray(node.get("value", np.zeros(1, np.float32))).reshape(())
    if math.prod(wanted) <= HOST_LIMIT:
        return np.full(wanted, value, value.dtype)
    return lax.full(wanted, value[()], canonical(value.dtype))


def range_(node: Node, start: Value, limit: Value, delta: Value) -> Value:
    names = ("start", "limit", "delta")
    bounds = zip((start, limit, delta), names, strict=True)
    first, stop, step = (node.host(value, name).reshape(()) for value, name in bounds)
    count = max(math.ceil((stop.astype(float) - first.astype(float)) / step.astype(float)), 0)
    if first.dtype.kind == "i":
        count = len(range(int(first), int(stop), int(step)))
    if count <= HOST_LIMIT:
        return (first + np.arange(count, dtype=first.dtype) * step).astype(first.dtype)
    dtype = canonical(first.dtype)
    steps = lax.iota(dtype, count)
    return steps * dtype.type(step) + dtype.type(first)


def eye_like(node: Node, x: Value) -> np.ndarray:
    from onnx import helper

    dtype = node.get("dtype", None)
    made = x.dtype if dtype is None else helper.tensor_dtype_to_np_dtype(dtype)
    return np.eye(*x.shape, k=node.get("k", 0), dtype=made)


def triangle(node: Node, x: Value, offset: Value | None = None) -> Array:
    """Keep the upper (default) or lower triangle of the last two axes; zero the rest."""
    k = 0 if offset is None else int(node.host(offset, "k").reshape(()))
    x = device(x)
    rows, columns = x.shape[-2:]
    difference = np.arange(columns)[None, :] - np.arange(rows)[:, None]
    mask = difference >= k if node.get("upper", 1) else difference <= k
    return lax.select(jnp.broadcast_to(mask, x.shape), x, lax.full_like(x, 0))


TRANSLATIONS: dict[str, Translation] = {
    "Concat": concat,
    "ConstantOfShape": constant_of_shape,
    "DepthToSpace": depth_to_space,
    "Dropout": dropout,
    "Expand": expand,
    "EyeLike": eye_like,
    "Flatten": flatten,
    "Identity": identity,
    "Pad": pad,
    "Range": range_,
    "Reshape": reshape,
    "Shape": shape,
    "Size": size,
    "Slice": slice_,
    "SpaceToDepth": space_to_depth,
    "Split": split,
    "Squeeze": squeeze,
    "Tile": tile,
    "Transpose": transpose,
    "Trilu": triangle,
    "Unsqueeze": unsqueeze,
}
