"""Writes gathers, and dynamic slices and their updates."""

from __future__ import annotations

import math

from jax import lax

from xrl_jax.backends.onnx.flat import Op, uniform_value
from xrl_jax.backends.onnx.values import Value, export_error
from xrl_jax.backends.onnx.writer import Writer


def gather(w: Writer, op: Op) -> Value:
    """Write a gather of rows along one axis, such as `x[indices]` or `jnp.take`."""
    assert op.equation is not None
    params, (source, indices) = op.equation.params, op.args
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    x = w.flat.ops[source].shape
    axes = tuple(numbers.start_index_map)
    rank = len(w.flat.ops[indices].shape) - 1
    if len(axes) == 1:
        axis = axes[0]
        whole = tuple(n for d, n in enumerate(x) if d != axis)
        offsets = [d for d in range(len(op.shape)) if not axis <= d < axis + rank]
        if (
            tuple(numbers.collapsed_slice_dims) == axes
            and not numbers.operand_batching_dims
            and tuple(n for d, n in enumerate(sizes) if d != axis) == whole
            and list(numbers.offset_dims) == offsets
        ):
            clips = params["mode"] == lax.GatherScatterMode.CLIP
            rows = _rows(w, indices, x[axis], keep_wrap=clips)
            if clips:
                low, high = (w.constant(n, w.flat.ops[indices].dtype) for n in (0, x[axis] - 1))
                rows = w.node("Clip", rows, low, high, shape=rows.shape)
            return w.node("Gather", w.exact(source), rows, shape=op.shape, axis=axis)
    raise export_error(op, "of anything but rows along one axis")


def _rows(w: Writer, i: int, size: int, *, keep_wrap: bool) -> Value:
    """Return indices without their last axis, which has size 1.

    Unless `keep_wrap`, the wrapping of negative indices is removed, as ONNX also counts them from
    the end.
    """
    shape = w.flat.ops[i].shape[:-1]
    j = i
    while w.flat.ops[j].name in ("broadcast", "reshape"):
        inner = w.flat.ops[j].args[0]
        if math.prod(w.flat.ops[inner].shape) != math.prod(shape):
            break
        j = inner
    given = None if keep_wrap else _wrapped(w, j, size)
    return w.reshape(w.exact(j if given is None else given), shape)


def _wrapped(w: Writer, i: int, size: int) -> int | None:
    """Return k if the operation is where(k < 0, k + size, k), else None."""
    ops = w.flat.ops
    if ops[i].name != "select":
        return None
    which, given, raised = ops[i].args
    if ops[which].name != "lt" or ops[raised].name != "add" or given not in ops[raised].args:
        return None
    left, right = ops[which].args
    (added,) = [a for a in ops[raised].args if a != given] or [given]
    is_wrap = left == given and uniform_value(ops[right]) == 0 and uniform_value(ops[added]) == size
    return given if is_wrap else None


def _starts(w: Writer, i: int, size: int) -> Value:
    """Return a start index as int64 of shape [1], clipped to 0..size as in JAX."""
    start = w.reshape(w.cast(w.exact(i), "int64"), (1,))
    low, high = w.constant(0, "int64"), w.constant(size, "int64")
    return w.node("Clip", start, low, high, shape=(1,))


def dynamic_slice(w: Writer, op: Op) -> Value:
    x, starts = w.exact(op.args[0]), op.args[1:]
    axes = [d for d, n in enumerate(op.shape) if n != x.shape[d]]
    if not axes:
        return x
    first = [_starts(w, starts[d], x.shape[d] - op.shape[d]) for d in axes]
    start = first[0] if len(axes) == 1 else w.node("Concat", *first, shape=(len(axes),), axis=0)
    end = w.apply("Add", start, w.ints([op.shape[d] for d in axes]))
    return w.node("Slice", x, start, end, w.ints(axes), shape=op.shape)


def dynamic_update_slice(w: Writer, op: Op) -> Value:
    x, update, starts = w.exact(op.args[0]), w.exact(op.args[1]), op.args[2:]
    axes = [d for d, n in enumerate(update.shape) if n != x.shape[d]]
    if not axes:
        return update
    if len(axes) > 1:
        raise export_error(op, "along several axes")
    (axis,) = axes
    size, rank = update.shape[axis], len(op.shape)
    first = _starts(w, starts[axis], x.shape[axis] - size)
    rows = first if size == 1 else w.apply("Add", first, w.ints(range(size)))
    rows = w.reshape(rows, [size if d == axis else 1 for d in range(rank)])
    where = w.node("Expand", rows, w.ints(update.shape), shape=update.shape)
    return w.node("ScatterElements", x, where, update, shape=op.shape, axis=axis)
