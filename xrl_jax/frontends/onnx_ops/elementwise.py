"""Elementwise ONNX operators: arithmetic, comparison, logic, bits and casts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import (
    Array,
    Node,
    Translation,
    Value,
    align,
    broadcast,
    canonical,
    device,
    is_float,
    is_host,
    like,
    select,
)


def unary(function: Callable[[Any], Array]) -> Translation:
    return lambda node, x: function(device(x))


def binary(function: Callable[[Any, Any], Array]) -> Translation:
    return lambda node, x, y: function(*align(x, y))


def variadic(function: Callable[[Any, Any], Array]) -> Callable[..., Array]:
    def translate(node: Node, *values: Value) -> Array:
        return functools.reduce(lambda x, y: function(*align(x, y)), values[1:], device(values[0]))

    return translate


def mean(node: Node, *values: Value) -> Array:
    total = variadic(jnp.add)(node, *values)
    return lax.div(total, like(total, len(values)))


def divide(x: Value, y: Value) -> Array:
    """Divide; integers round towards zero, as in C."""
    return jnp.divide(x, y) if is_float(x) else lax.div(*broadcast(x, y))


def modulo(node: Node, x: Value, y: Value) -> Array:
    """Return the remainder with the sign of the divisor (fmod=0) or of the dividend (fmod=1)."""
    x, y = broadcast(x, y)
    remainder = lax.rem(x, y)
    if node.get("fmod", 0):
        return remainder
    zero = lax.full_like(x, 0)
    differs = lax.ne(lax.lt(remainder, zero), lax.lt(y, zero))
    wrong = lax.bitwise_and(differs, lax.ne(remainder, zero))
    return lax.select(wrong, lax.add(remainder, y), remainder)


def power(node: Node, x: Value, y: Value) -> Array:
    """Return x ** y in the dtype of x."""
    dtype = canonical(x.dtype)
    if is_host(y) and y.size == 1 and y.ndim <= x.ndim and is_float(x):
        exponent = float(y.reshape(()))
        if exponent == 2:
            return lax.square(device(x))
        if exponent.is_integer() and abs(exponent) <= 16:
            return lax.integer_pow(device(x), int(exponent))
    x, y = broadcast(x, y)
    if is_float(x):
        return lax.pow(x, lax.convert_element_type(y, dtype))
    if is_float(y):
        return lax.convert_element_type(lax.pow(lax.convert_element_type(x, y.dtype), y), dtype)
    return lax.convert_element_type(jnp.power(x, lax.convert_element_type(y, dtype)), dtype)


def absolute(x: Array) -> Array:
    return x if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else lax.abs(x)


def reciprocal(x: Array) -> Array:
    return lax.div(like(x, 1), x)


def is_infinite(node: Node, x: Value) -> Array:
    x = device(x)
    negative = lax.eq(x, like(x, -np.inf))
    positive = lax.eq(x, like(x, np.inf))
    if not node.get("detect_negative", 1):
        return positive if node.get("detect_positive", 1) else lax.full_like(positive, False)
    return lax.bitwise_or(negative, positive) if node.get("detect_positive", 1) else negative


def bit_shift(node: Node, x: Value, y: Value) -> Array:
    x, y = broadcast(x, y)
    if node.get("direction", "") == "LEFT":
        return lax.shift_left(x, y)
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        return lax.shift_right_arithmetic(x, y)
    return lax.shift_right_logical(x, y)


def where(node: Node, condition: Value, x: Value, y: Value) -> Array:
    return select(condition, x, y)


def cast_to(x: Value, dtype: Any) -> Value:
    if is_host(x):
        return np.asarray(x).astype(dtype)
    return lax.convert_element_type(x, canonical(dtype))


def cast(node: Node, x: Value) -> Value:
    from onnx import helper

    return cast_to(x, helper.tensor_dtype_to_np_dtype(node.attributes["to"]))


def cast_like(node: Node, x: Value, target: Value) -> Value:
    return cast_to(x, target.dtype)


def bit_cast(node: Node, x: Value) -> Value:
    from onnx import helper

    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(node.attributes["to"]))
    if is_host(x):
        return np.asarray(x).view(dtype)
    if canonical(dtype).itemsize != dtype.itemsize or canonical(x.dtype) != x.dtype:
        raise node.unsupported(f"{dtype} without jax_enable_x64")
    if x.dtype == np.bool_:
        x = lax.convert_element_type(x, np.uint8)
    return lax.bitcast_convert_type(x, canonical(dtype))


def clip(node: Node, x: Value, low: Value | None = None, high: Value | None = None) -> Array:
    """Clip to [min, max], which are attributes before opset 11 and inputs since."""
    x = device(x)
    if node.opset < 11:
        low = np.asarray(node.get("min", np.finfo(np.float32).min), x.dtype)
        high = np.asarray(node.get("max", np.finfo(np.float32).max), x.dtype)
    if low is not None:
        x = lax.max(*align(x, low))
    return x if high is None else lax.min(*align(x, high))


TRANSLATIONS: dict[str, Translation] = {
    "Abs": unary(absolute),
    "Acos": unary(lax.acos),
    "Acosh": unary(lax.acosh),
    "Add": binary(jnp.add),
    "And": binary(jnp.bitwise_and),
    "Asin": unary(lax.asin),
    "Asinh": unary(lax.asinh),
    "Atan": unary(lax.atan),
    "Atanh": unary(lax.atanh),
    "BitCast": bit_cast,
    "BitShift": bit_shift,
    "BitwiseAnd": binary(jnp.bitwise_and),
    "BitwiseNot": unary(lax.bitwise_not),
    "BitwiseOr": binary(jnp.bitwise_or),
    "BitwiseXor": binary(jnp.bitwise_xor),
    "Cast": cast,
    "CastLike": cast_like,
    "Ceil": unary(lax.ceil),
    "Clip": clip,
    "Cos": unary(lax.cos),
    "Cosh": unary(lax.cosh),
    "Div": binary(divide),
    "Equal": binary(jnp.equal),
    "Erf": unary(lax.erf),
    "Exp": unary(lax.exp),
    "Floor": unary(lax.floor),
    "Greater": binary(jnp.greater),
    "GreaterOrEqual": binary(jnp.greater_equal),
    "IsInf": is_infinite,
    "IsNaN": unary(lambda x: lax.ne(x, x)),
    "Less": binary(jnp.less),
    "LessOrEqual": binary(jnp.less_equal),
    "Log": unary(lax.log),
    "Max": variadic(jnp.maximum),
    "Mean": mean,
    "Min": variadic(jnp.minimum),
    "Mod": modulo,
    "Mul": binary(jnp.multiply),
    "Neg": unary(lax.neg),
    "Not": unary(lax.bitwise_not),
    "Or": binary(jnp.bitwise_or),
    "Pow": power,
    "Reciprocal": unary(reciprocal),
    "Round": unary(lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)),
    "Sign": unary(lax.sign),
    "Sin": unary(lax.sin),
    "Sinh": unary(lax.sinh),
    "Sqrt": unary(lax.sqrt),
    "Sub": binary(jnp.subtract),
    "Sum": variadic(jnp.add),
    "Tan": unary(lax.tan),
    "Where": where,
    "Xor": binary(jnp.bitwise_xor),
}
