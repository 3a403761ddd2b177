"""How each operation is written in ONNX: one dict, operator -> function of the writer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import lax

from xrl_jax.backends.plain import conv_layouts, dot_dims

if TYPE_CHECKING:
    from experiments.onnx_flat import Op
    from experiments.onnx_out import Writer


class OnnxOutError(ValueError):
    """A program that cannot be said in ONNX; the message names the operator."""


@dataclass(frozen=True)
class Value:
    """What an ONNX node reads: a name, and a shape that may lack the repetitions of the operation's
    (axes of size 1, no leading axes), as ONNX broadcasts by itself.
    """

    name: str
    shape: tuple[int, ...]
    array: np.ndarray | None = None  # of a constant, which gets its name when it is written


def without_leading_ones(shape: Sequence[int]) -> tuple[int, ...]:
    first = next((d for d, n in enumerate(shape) if n != 1), len(shape))
    return tuple(shape[first:])


def write_operation(w: Writer, i: int) -> Value:
    """Append the nodes of an operation.

    Raises:
      OnnxOutError: ONNX cannot say it.
    """
    op = w.flat.ops[i]
    if op.name not in TABLE:
        raise _unsayable(op)
    return TABLE[op.name](w, i)


def write_pattern(w: Writer, i: int) -> Value:
    """Append the operator that stands for a pattern."""
    op, whole = w.flat.ops[i], w.patterns[i]
    inputs = [w.constant(a) if isinstance(a, np.ndarray) else w.exact(a) for a in whole.inputs]
    match whole.op_type:
        case "Conv":
            return conv(w, whole.of, bias=inputs[2])
        case "AveragePool":
            return pool(w, whole.of, "AveragePool", **whole.attributes)
        case "BatchNormalization":
            rank, axis = len(op.shape), whole.axis
            perm = [0, axis, *(d for d in range(1, rank) if d != axis)]
            x = w.transpose(inputs[0], perm)
            y = w.node("BatchNormalization", x, *inputs[1:], shape=x.shape, **whole.attributes)
            return w.transpose(y, np.argsort(perm).tolist())
        case "GlobalAveragePool":
            shape = (*inputs[0].shape[:2], 1, 1)
            return w.reshape(w.node("GlobalAveragePool", *inputs, shape=shape), op.shape)
        case "ReduceMean":
            axes = w.ints(whole.attributes["axes"])
            keep = whole.attributes["keepdims"]
            return w.node("ReduceMean", inputs[0], axes, shape=op.shape, keepdims=keep)
        case _:
            return w.node(whole.op_type, *inputs, shape=op.shape, **whole.attributes)


def _unsayable(op: Op, why: str = "") -> OnnxOutError:
    detail = f" {why}" if why else ""
    return OnnxOutError(f"ONNX cannot say {op.name!r}{detail} ({op.dtype}{list(op.shape)})")


# --- elementwise ---


def _elementwise(op_type: str, **attrs: Any) -> Writing:
    def write(w: Writer, i: int) -> Value:
        return w.apply(op_type, *(w.loose(a) for a in w.flat.ops[i].args), **attrs)

    return write


def _logical(boolean: str, integer: str) -> Writing:
    def write(w: Writer, i: int) -> Value:
        op = w.flat.ops[i]
        is_bool = w.flat.ops[op.args[0]].dtype == "bool"
        return w.apply(boolean if is_bool else integer, *(w.loose(a) for a in op.args))

    return write


def _composed(write: Callable[..., Value]) -> Writing:
    """From a function of the writer, its dtype's numbers and the arguments."""

    def composed(w: Writer, i: int) -> Value:
        op = w.flat.ops[i]
        dtype = w.flat.ops[op.args[0]].dtype
        return write(w, lambda n: w.constant(n, dtype), *(w.loose(a) for a in op.args))

    return composed


def _integer_pow(w: Writer, i: int) -> Value:
    op = w.flat.ops[i]
    x, exponent = w.loose(op.args[0]), op.number("exponent")
    if exponent == 2:
        return w.apply("Mul", x, x)
    return w.apply("Pow", x, w.constant(exponent, op.dtype))


def _select(w: Writer, i: int) -> Value:
    which, if_false, if_true = (w.loose(a) for a in w.flat.ops[i].args)
    return w.apply("Where", which, if_true, if_false)


def _clamp(w: Writer, i: int) -> Value:
    low, x, high = (w.loose(a) for a in w.flat.ops[i].args)
    return w.apply("Min", w.apply("Max", x, low), high)


def _cast(w: Writer, i: int) -> Value:
    op = w.flat.ops[i]
    return w.cast(w.loose(op.args[0]), op.dtype)


def _round(w: Writer, i: int) -> Value:
    op = w.flat.ops[i]
    if op.number("method") != int(lax.RoundingMethod.TO_NEAREST_EVEN):
        raise _unsayable(op, "away from zero")
    return w.apply("Round", w.loose(op.args[0]))


# --- movement ---


def _broadcast(w: Writer, i: int) -> Value:
    """At most a reshape: ONNX repeats by itself where it is read."""
    op = w.flat.ops[i]
    rank = len(w.flat.ops[op.args[0]].shape)
    value = w.loose(op.args[0])
    sizes = [1] * (rank - len(value.shape)) + list(value.shape)
    shape = [1] * len(op.shape)
    for d, n in zip(op.dims("dims", rank), sizes, strict=True):
        shape[d] = n
    if without_leading_ones(shape) == without_leading_ones(value.shape):
        return value if len(value.shape) <= len(op.shape) else w.reshape(value, shape)
    return w.reshape(value, shape)


def _reshape(w: Writer, i: int) -> Value:
    op = w.flat.ops[i]
    return w.reshape(w.exact(op.args[0]), op.shape)


def _transpose(w: Writer, i: int) -> Value:
    op = w.flat.ops[i]
    return w.transpose(w.exact(op.args[0]), op.dims("perm", len(op.shape)))


def _concat(w: Writer, i: int) -> Value:
    """One node for a chain: the table's operators hold few arguments."""
    op = w.flat.ops[i]
    parts: list[int] = []

    def collect(index: int) -> None:
        part = w.flat.ops[index]
        inner = part.name == "concat" and part.number("axis") == op.number("axis")
        if index == i or (inner and len(w.consumers[index]) == 1):
            for a in part.args:
                collect(a)
        else:
            parts.append(index)

    collect(i)
    values = [w.exact(p) for p in parts]
    return w.node("Concat", *values, shape=op.shape, axis=op.number("axis"))


def _slice(w: Writer, i: int) -> Value:
    op = w.flat.ops[i]
    x, rank = w.exact(op.args[0]), len(op.shape)
    start, limit, stride = (op.dims(f, rank) for f in ("start", "limit", "stride"))
    axes = [d for d in range(rank) if (start[d], limit[d], stride[d]) != (0, x.shape[d], 1)]
    picked = [w.ints([field[d] for d in axes]) for field in (start, limit)]
    steps = [w.ints([stride[d] for d in axes])] if any(stride[d] != 1 for d in axes) else []
    return w.node("Slice", x, *picked, w.ints(axes), *steps, shape=op.shape)


def _rev(w: Writer, i: int) -> Value:
    op = w.flat.ops[i]
    starts = [op.shape[d] - 1 for d in op.axes]
    ends = [-op.shape[d] - 1 for d in op.axes]
    fields = (starts, ends, op.axes, [-1] * len(starts))
    return w.node("Slice", w.exact(op.args[0]), *map(w.ints, fields), shape=op.shape)


def _pad(w: Writer, i: int) -> Value:
    op = w.flat.ops[i]
    rank = len(op.shape)
    low, high, interior = (op.dims(f, rank) for f in ("low", "high", "interior"))
    if any(interior):
        raise _unsayable(op, "between elements")
    return _padded(w, w.exact(op.args[0]), low, high, w.exact(op.args[1]))


def _padded(w: Writer, x: Value, low: Sequence[int], high: Sequence[int], value: Value) -> Value:
    shape = [a + n + b for a, n, b in zip(low, x.shape, high, strict=True)]
    return w.node("Pad", x, w.ints([*low, *high]), value, shape=shape)


# --- reductions ---


def _reduce(op_type: str) -> Writing:
    def write(w: Writer, i: int) -> Value:
        op = w.flat.ops[i]
        return w.node(
            op_type, w.exact(op.args[0]), w.ints(op.axes), shape=op.shape, keepdims=0
        )

    return write


def _reduce_bool(op_type: str) -> Writing:
    def write(w: Writer, i: int) -> Value:
        op = w.flat.ops[i]
        if op.dtype != "bool":
            raise _unsayable(op)
        x = w.cast(w.exact(op.args[0]), "int32")
        found = w.node(op_type, x, w.ints(op.axes), shape=op.shape, keepdims=0)
        return w.cast(found, "bool")

    return write


def _arg_reduce(op_type: str) -> Writing:
    def write(w: Writer, i: int) -> Value:
        op = w.flat.ops[i]
        (axis,) = op.axes
        found = w.node(op_type, w.exact(op.args[0]), shape=op.shape, axis=axis, keepdims=0)
        return found if op.dtype == "int64" else w.cast(found, op.dtype)

    return write


def _cumsum(w: Writer, i: int) -> Value:
    op = w.flat.ops[i]
    axis = w.constant(op.number("axis"), "int64")
    x = w.exact(op.args[0])
    return w.node("CumSum", x, axis, shape=op.shape, reverse=op.number("reverse"))


def _softmax(w: Writer, i: int) -> Value:
    op = w.flat.ops[i]
    if len(op.axes) != 1:
        raise _unsayable(op, "over several axes")
    return w.node("Softmax", w.exact(op.args[0]), shape=op.shape, axis=op.axes[0])


def pool(w: Writer, i: int, op_type: str, **attrs: int) -> Value:
    """Pooling over at most all axes but two; those become the batch and the channels."""
    op = w.flat.ops[i]
    rank = len(op.shape)
    fields = [op.dims(f, rank) for f in ("window", "stride", "low", "high")]
    window, stride, low, high = fields
    idle = [d for d in range(rank) if all(f[d] == n for f, n in zip(fields, (1, 1, 0, 0), strict=True))]
    if rank < 3 or len(idle) < 2:
        raise _unsayable(op, "over more than all axes but two")
    spatial = [d for d in range(rank) if d not in idle[:2]]
    x = w.exact(op.args[0])
    if any(not 0 <= p < n for p, n in zip((*low, *high), window * 2, strict=True)):
        neutral = {"MaxPool": -math.inf}.get(op_type, 0.0)
        x = _padded(w, x, low, high, w.constant(neutral, op.dtype))
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


def _window_sum(w: Writer, i: int) -> Value:
    op = w.flat.ops[i]
    size = w.constant(math.prod(op.dims("window", len(op.shape))), op.dtype)
    return w.apply("Mul", pool(w, i, "AveragePool", count_include_pad=1), size)


def _window_max(w: Writer, i: int) -> Value:
    return pool(w, i, "MaxPool")


# --- contractions ---


def conv(w: Writer, i: int, bias: Value | None = None) -> Value:
    """A convolution, features first; transposes where it has another layout."""
    op = w.flat.ops[i]
    left, right, out = conv_layouts(op.node)
    n = len(left) - 2
    if op.number("batch_groups") != 1:
        raise _unsayable(op, "with groups of the batch")
    if any(d != 1 for d in op.dims("lhs_dilation", n)):
        raise _unsayable(op, "of a dilated input")
    low, high = op.dims("low", n), op.dims("high", n)
    x = w.transpose(w.exact(op.args[0]), left)
    if min(*low, *high) < 0:
        x = _padded(w, x, (0, 0, *low), (0, 0, *high), w.constant(0, op.dtype))
        low = high = (0,) * n
    kernel = w.transpose(w.exact(op.args[1]), right)
    y = w.node(
        "Conv",
        x,
        kernel,
        *(() if bias is None else (bias,)),
        shape=[op.shape[d] for d in out],
        kernel_shape=kernel.shape[2:],
        strides=op.dims("stride", n),
        pads=(*low, *high),
        dilations=op.dims("rhs_dilation", n),
        group=op.number("groups"),
    )
    return w.transpose(y, np.argsort(out).tolist())


def _dot(w: Writer, i: int) -> Value:
    """MatMul, with the operands in the order that moves fewer elements about."""
    op = w.flat.ops[i]
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
    if _moved(w, i, right, left, swapped) < _moved(w, i, left, right, tuple(range(n + a + b))):
        return w.transpose(_product(w, right, left), swapped)
    return _product(w, left, right)


@dataclass(frozen=True)
class _Side:
    """An operand of a contraction and what its axes are."""

    value: Value
    batch: tuple[int, ...]
    free: tuple[int, ...]
    contracted: tuple[int, ...]

    def sizes(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.value.shape[d] for d in axes)


def _moved(w: Writer, i: int, first: _Side, second: _Side, perm: tuple[int, ...]) -> float:
    """Elements that transposes would move, for the product of `first` and `second`, transposed by
    `perm`.
    """
    orders = (
        (first.value, (*first.batch, *first.free, *first.contracted)),
        (second.value, (*second.batch, *second.contracted, *second.free)),
    )
    total = 0.0
    for value, order in orders:
        if value.array is None and order != tuple(range(len(order))):
            total += math.prod(value.shape)
    readers = w.consumers[i]
    if len(readers) == 1 and readers[0] >= 0 and w.flat.ops[readers[0]].name == "transpose":
        perm = tuple(perm[p] for p in w.flat.ops[readers[0]].dims("perm", len(perm)))
    if perm != tuple(range(len(perm))):
        total += math.prod(w.flat.ops[i].shape)
    return total


def _product(w: Writer, first: _Side, second: _Side) -> Value:
    """[batch, free of the first, free of the second]."""
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


# --- indices ---


def _gather(w: Writer, i: int) -> Value:
    """Rows of an array along one axis, as `x[indices]` and `jnp.take` make it."""
    op = w.flat.ops[i]
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
            rows = _rows(w, indices, x[axis])
            if params["mode"] == lax.GatherScatterMode.CLIP:
                low, high = (w.constant(n, w.flat.ops[indices].dtype) for n in (0, x[axis] - 1))
                rows = w.node("Clip", rows, low, high, shape=rows.shape)
            return w.node("Gather", w.exact(source), rows, shape=op.shape, axis=axis)
    raise _unsayable(op, "other than of rows along one axis")


def _rows(w: Writer, i: int, size: int) -> Value:
    """Indices without the axis of size 1 at their end, and negative ones as they are: ONNX counts
    them from the end, too.
    """
    shape = w.flat.ops[i].shape[:-1]
    op = w.flat.ops[i]
    while op.name in ("broadcast", "reshape") and math.prod(op.shape) == math.prod(shape):
        op = w.flat.ops[op.args[0]]
    if op.name == "select":
        which, given, wrapped = (w.flat.ops[a] for a in op.args)
        negative = which.name == "lt" and which.args[0] == op.args[1]
        raised = wrapped.name == "add" and op.args[1] in wrapped.args
        if negative and raised:
            numbers = (which.args[1], *(a for a in wrapped.args if a != op.args[1]))
            values = [w.flat.ops[n].value for n in numbers]
            if all(v is not None for v in values) and given.shape == op.shape:
                if (values[0] == 0).all() and (values[1] == size).all():  # type: ignore[union-attr]
                    return w.reshape(w.exact(op.args[1]), shape)
    return w.reshape(w.exact(i), shape)


def _starts(w: Writer, i: int, size: int) -> Value:
    """A start index as [1] int64, moved into 0..size as JAX does."""
    start = w.reshape(w.cast(w.exact(i), "int64"), (1,))
    low, high = w.constant(0, "int64"), w.constant(size, "int64")
    return w.node("Clip", start, low, high, shape=(1,))


def _dynamic_slice(w: Writer, i: int) -> Value:
    op = w.flat.ops[i]
    x, starts = w.exact(op.args[0]), op.args[1:]
    axes = [d for d, n in enumerate(op.shape) if n != x.shape[d]]
    if not axes:
        return x
    first = [_starts(w, starts[d], x.shape[d] - op.shape[d]) for d in axes]
    start = first[0] if len(axes) == 1 else w.node("Concat", *first, shape=(len(axes),), axis=0)
    end = w.apply("Add", start, w.ints([op.shape[d] for d in axes]))
    return w.node("Slice", x, start, end, w.ints(axes), shape=op.shape)


def _dynamic_update_slice(w: Writer, i: int) -> Value:
    op = w.flat.ops[i]
    x, update, starts = w.exact(op.args[0]), w.exact(op.args[1]), op.args[2:]
    axes = [d for d, n in enumerate(update.shape) if n != x.shape[d]]
    if not axes:
        return update
    if len(axes) > 1:
        raise _unsayable(op, "along several axes")
    (axis,) = axes
    size, rank = update.shape[axis], len(op.shape)
    first = _starts(w, starts[axis], x.shape[axis] - size)
    rows = first if size == 1 else w.apply("Add", first, w.ints(range(size)))
    rows = w.reshape(rows, [size if d == axis else 1 for d in range(rank)])
    where = w.node("Expand", rows, w.ints(update.shape), shape=update.shape)
    return w.node("ScatterElements", x, where, update, shape=op.shape, axis=axis)


# --- the table ---

Writing = Callable[["Writer", int], Value]
_DIRECT = (
    "neg Neg exp Exp log Log tanh Tanh logistic Sigmoid sqrt Sqrt sin Sin cos Cos tan Tan asin Asin "
    "acos Acos atan Atan sinh Sinh cosh Cosh asinh Asinh acosh Acosh atanh Atanh erf Erf abs Abs "
    "sign Sign floor Floor ceil Ceil add Add sub Sub mul Mul div Div pow Pow max Max min Min "
    "eq Equal gt Greater ge GreaterOrEqual lt Less le LessOrEqual"
).split()
TABLE: Mapping[str, Writing] = MappingProxyType(
    {
        **{a: _elementwise(b) for a, b in zip(_DIRECT[::2], _DIRECT[1::2], strict=True)},
        "rem": _elementwise("Mod", fmod=1),
        "not": _logical("Not", "BitwiseNot"),
        "and": _logical("And", "BitwiseAnd"),
        "or": _logical("Or", "BitwiseOr"),
        "xor": _logical("Xor", "BitwiseXor"),
        "square": _composed(lambda w, n, x: w.apply("Mul", x, x)),
        "rsqrt": _composed(lambda w, n, x: w.apply("Reciprocal", w.apply("Sqrt", x))),
        "exp2": _composed(lambda w, n, x: w.apply("Pow", n(2), x)),
        "expm1": _composed(lambda w, n, x: w.apply("Sub", w.apply("Exp", x), n(1))),
        "log1p": _composed(lambda w, n, x: w.apply("Log", w.apply("Add", x, n(1)))),
        "erfc": _composed(lambda w, n, x: w.apply("Sub", n(1), w.apply("Erf", x))),
        "ne": _composed(lambda w, n, x, y: w.apply("Not", w.apply("Equal", x, y))),
        "is_finite": _composed(
            lambda w, n, x: w.apply(
                "Not", w.apply("Or", w.apply("IsInf", x), w.apply("IsNaN", x))
            )
        ),
        "integer_pow": _integer_pow,
        "select": _select,
        "clamp": _clamp,
        "cast": _cast,
        "round": _round,
        "broadcast": _broadcast,
        "reshape": _reshape,
        "transpose": _transpose,
        "concat": _concat,
        "slice": _slice,
        "rev": _rev,
        "pad": _pad,
        "reduce_sum": _reduce("ReduceSum"),
        "reduce_max": _reduce("ReduceMax"),
        "reduce_min": _reduce("ReduceMin"),
        "reduce_prod": _reduce("ReduceProd"),
        "reduce_and": _reduce_bool("ReduceMin"),
        "reduce_or": _reduce_bool("ReduceMax"),
        "argmax": _arg_reduce("ArgMax"),
        "argmin": _arg_reduce("ArgMin"),
        "cumsum": _cumsum,
        "softmax": _softmax,
        "window_sum": _window_sum,
        "window_max": _window_max,
        "conv": conv,
        "dot": _dot,
        # Primitives that the op table does not have.
        "gather": _gather,
        "dynamic_slice": _dynamic_slice,
        "dynamic_update_slice": _dynamic_update_slice,
    }
)
