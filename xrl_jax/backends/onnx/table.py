"""Writes operations in ONNX: `TABLE` maps each operator to the function that writes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from jax import lax

from xrl_jax.backends.onnx.contractions import conv, dot, padded, pool
from xrl_jax.backends.onnx.flat import Op
from xrl_jax.backends.onnx.indices import dynamic_slice, dynamic_update_slice, gather
from xrl_jax.backends.onnx.values import Value, export_error, without_leading_ones
from xrl_jax.backends.onnx.writer import Writer

Writing = Callable[[Writer, Op], Value]


def write_operation(w: Writer, op: Op) -> Value:
    """Append the nodes of an operation.

    Raises:
      ExportError: ONNX cannot express the operation.
    """
    if op.name not in TABLE:
        raise export_error(op)
    return TABLE[op.name](w, op)


def write_pattern(w: Writer, op: Op) -> Value:
    """Append the operator that replaces a pattern."""
    pattern = w.patterns[op.index]
    inputs = [w.constant(a) if isinstance(a, np.ndarray) else w.exact(a) for a in pattern.inputs]
    match pattern.op_type:
        case "Conv":
            return conv(w, w.flat.ops[pattern.of], bias=inputs[2])
        case "AveragePool":
            return pool(w, w.flat.ops[pattern.of], "AveragePool", **pattern.attributes)
        case "BatchNormalization":
            rank, axis = len(op.shape), pattern.axis
            perm = [0, axis, *(d for d in range(1, rank) if d != axis)]
            x = w.transpose(inputs[0], perm)
            y = w.node("BatchNormalization", x, *inputs[1:], shape=x.shape, **pattern.attributes)
            return w.transpose(y, np.argsort(perm).tolist())
        case "GlobalAveragePool":
            shape = (*inputs[0].shape[:2], 1, 1)
            return w.reshape(w.node("GlobalAveragePool", *inputs, shape=shape), op.shape)
        case "ReduceMean":
            axes = w.ints(pattern.attributes["axes"])
            keep = pattern.attributes["keepdims"]
            return w.node("ReduceMean", inputs[0], axes, shape=op.shape, keepdims=keep)
        case _:
            return w.node(pattern.op_type, *inputs, shape=op.shape, **pattern.attributes)


# --- elementwise ---


def _elementwise(op_type: str, **attrs: Any) -> Writing:
    def write(w: Writer, op: Op) -> Value:
        return w.apply(op_type, *(w.loose(a) for a in op.args), **attrs)

    return write


def _logical(boolean: str, integer: str) -> Writing:
    def write(w: Writer, op: Op) -> Value:
        is_bool = w.flat.ops[op.args[0]].dtype == "bool"
        return w.apply(boolean if is_bool else integer, *(w.loose(a) for a in op.args))

    return write


def _composed(write: Callable[..., Value]) -> Writing:
    """Wrap `write(writer, scalar, *args)`, where `scalar(n)` is n in the dtype of the arguments."""

    def composed(w: Writer, op: Op) -> Value:
        dtype = w.flat.ops[op.args[0]].dtype
        return write(w, lambda n: w.constant(n, dtype), *(w.loose(a) for a in op.args))

    return composed


def _integer_pow(w: Writer, op: Op) -> Value:
    x, exponent = w.loose(op.args[0]), op.node.scalar_attr("exponent")
    if exponent == 2:
        return w.apply("Mul", x, x)
    return w.apply("Pow", x, w.constant(exponent, op.dtype))


def _select(w: Writer, op: Op) -> Value:
    which, if_false, if_true = (w.loose(a) for a in op.args)
    return w.apply("Where", which, if_true, if_false)


def _clamp(w: Writer, op: Op) -> Value:
    low, x, high = (w.loose(a) for a in op.args)
    return w.apply("Min", w.apply("Max", x, low), high)


def _cast(w: Writer, op: Op) -> Value:
    return w.cast(w.loose(op.args[0]), op.dtype)


def _round(w: Writer, op: Op) -> Value:
    if op.node.scalar_attr("method") != int(lax.RoundingMethod.TO_NEAREST_EVEN):
        raise export_error(op, "with ties away from zero")
    return w.apply("Round", w.loose(op.args[0]))


# --- movement ---


def _broadcast(w: Writer, op: Op) -> Value:
    """Write at most a reshape, because ONNX broadcasts the value where it is read."""
    rank = len(w.flat.ops[op.args[0]].shape)
    value = w.loose(op.args[0])
    sizes = [1] * (rank - len(value.shape)) + list(value.shape)
    shape = [1] * len(op.shape)
    for d, n in zip(op.node.dims("dims", rank), sizes, strict=True):
        shape[d] = n
    if without_leading_ones(shape) == without_leading_ones(value.shape):
        return value if len(value.shape) <= len(op.shape) else w.reshape(value, shape)
    return w.reshape(value, shape)


def _reshape(w: Writer, op: Op) -> Value:
    return w.reshape(w.exact(op.args[0]), op.shape)


def _transpose(w: Writer, op: Op) -> Value:
    return w.transpose(w.exact(op.args[0]), op.node.dims("perm", len(op.shape)))


def _concat(w: Writer, op: Op) -> Value:
    """Write one node for a chain of concats, which exists because nodes have few arguments."""
    parts: list[int] = []

    def collect(index: int) -> None:
        part = w.flat.ops[index]
        inner = part.name == "concat" and part.node.scalar_attr("axis") == op.node.scalar_attr(
            "axis"
        )
        if index == op.index or (inner and len(w.consumers[index]) == 1):
            for a in part.args:
                collect(a)
        else:
            parts.append(index)

    collect(op.index)
    values = [w.exact(p) for p in parts]
    return w.node("Concat", *values, shape=op.shape, axis=op.node.scalar_attr("axis"))


def _slice(w: Writer, op: Op) -> Value:
    x, rank = w.exact(op.args[0]), len(op.shape)
    start, limit, stride = (op.node.dims(f, rank) for f in ("start", "limit", "stride"))
    axes = [d for d in range(rank) if (start[d], limit[d], stride[d]) != (0, x.shape[d], 1)]
    picked = [w.ints([field[d] for d in axes]) for field in (start, limit)]
    steps = [w.ints([stride[d] for d in axes])] if any(stride[d] != 1 for d in axes) else []
    return w.node("Slice", x, *picked, w.ints(axes), *steps, shape=op.shape)


def _rev(w: Writer, op: Op) -> Value:
    starts = [op.shape[d] - 1 for d in op.node.axes]
    ends = [-op.shape[d] - 1 for d in op.node.axes]
    fields = (starts, ends, op.node.axes, [-1] * len(starts))
    return w.node("Slice", w.exact(op.args[0]), *map(w.ints, fields), shape=op.shape)


def _pad(w: Writer, op: Op) -> Value:
    rank = len(op.shape)
    low, high, interior = (op.node.dims(f, rank) for f in ("low", "high", "interior"))
    if any(interior):
        raise export_error(op, "with padding between elements")
    return padded(w, w.exact(op.args[0]), low, high, w.exact(op.args[1]))


# --- reductions ---


def _reduce(op_type: str) -> Writing:
    def write(w: Writer, op: Op) -> Value:
        return w.node(
            op_type, w.exact(op.args[0]), w.ints(op.node.axes), shape=op.shape, keepdims=0
        )

    return write


def _reduce_bool(op_type: str) -> Writing:
    def write(w: Writer, op: Op) -> Value:
        if op.dtype != "bool":
            raise export_error(op)
        x = w.cast(w.exact(op.args[0]), "int32")
        found = w.node(op_type, x, w.ints(op.node.axes), shape=op.shape, keepdims=0)
        return w.cast(found, "bool")

    return write


def _arg_reduce(op_type: str) -> Writing:
    def write(w: Writer, op: Op) -> Value:
        (axis,) = op.node.axes
        found = w.node(op_type, w.exact(op.args[0]), shape=op.shape, axis=axis, keepdims=0)
        return found if op.dtype == "int64" else w.cast(found, op.dtype)

    return write


def _cumsum(w: Writer, op: Op) -> Value:
    axis = w.constant(op.node.scalar_attr("axis"), "int64")
    x = w.exact(op.args[0])
    return w.node("CumSum", x, axis, shape=op.shape, reverse=op.node.scalar_attr("reverse"))


def _softmax(w: Writer, op: Op) -> Value:
    if len(op.node.axes) != 1:
        raise export_error(op, "over several axes")
    return w.node("Softmax", w.exact(op.args[0]), shape=op.shape, axis=op.node.axes[0])


def _window_sum(w: Writer, op: Op) -> Value:
    size = w.constant(math.prod(op.node.dims("window", len(op.shape))), op.dtype)
    return w.apply("Mul", pool(w, op, "AveragePool", count_include_pad=1), size)


_DIRECT = (
    "neg Neg exp Exp log Log tanh Tanh logistic Sigmoid sqrt Sqrt sin Sin cos Cos tan Tan "
    "asin Asin acos Acos atan Atan sinh Sinh cosh Cosh asinh Asinh acosh Acosh atanh Atanh erf Erf "
    "abs Abs sign Sign floor Floor ceil Ceil add Add sub Sub mul Mul div Div pow Pow max Max "
    "min Min eq Equal gt Greater ge GreaterOrEqual lt Less le LessOrEqual"
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
            lambda w, n, x: w.apply("Not", w.apply("Or", w.apply("IsInf", x), w.apply("IsNaN", x)))
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
        "window_max": lambda w, op: pool(w, op, "MaxPool"),
        "conv": conv,
        "dot": dot,
        # Primitives that are not in the op table.
        "gather": gather,
        "dynamic_slice": dynamic_slice,
        "dynamic_update_slice": dynamic_update_slice,
    }
)
