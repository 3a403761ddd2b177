"""Operators on quantised arrays that ONNX Runtime's quantiser writes (its format `QOperator`).

Each is the operator of real numbers between a dequantisation and a quantisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.activation import leaky_relu
from xrl_jax.frontends.onnx_ops.base import Array, Node, Translation, on_device
from xrl_jax.frontends.onnx_ops.linalg import matmul_arrays
from xrl_jax.frontends.onnx_ops.pooling import average_pool, over_image
from xrl_jax.frontends.onnx_ops.quantise import (
    centred,
    dequantize_linear,
    quantise,
    quantize_linear,
)


def quantised(y: Array, scale: Array, zero: Array | None, dtype: Any) -> Array:
    """Return numbers quantised with one scale; `dtype` is that of a zero point left out."""
    offset = jnp.zeros((), dtype) if zero is None else jnp.reshape(zero, ())
    return quantise(y, jnp.reshape(scale, ()), offset)


def on_quantised(operation: Callable[..., Array], operands: int = 1) -> Translation:
    """Return the translation of an operator whose inputs are, for each operand, the array, its
    scale and its zero point, then the scale and the zero point of the result.
    """

    def translate(node: Node, *inputs: Any) -> Array:
        if node.get("channels_last", 0):
            raise node.unsupported("channels_last")
        own = 3 * operands
        numbers = [dequantize_linear(node, *inputs[i : i + 3]) for i in range(0, own, 3)]
        scale, *zero = inputs[own:]
        result = operation(node, *numbers)
        return quantised(result, scale, zero[0] if zero else None, inputs[0].dtype)

    return translate


def qlinear_concat(node: Node, y_scale: Array, y_zero: Array, *inputs: Any) -> Array:
    arrays = [dequantize_linear(node, *inputs[i : i + 3]) for i in range(0, len(inputs), 3)]
    joined = jnp.concatenate(arrays, axis=node.attributes["axis"])
    return quantised(joined, y_scale, y_zero, y_zero.dtype)


def qgemm(
    node: Node,
    a: Array,
    a_scale: Array,
    a_zero: Array,
    b: Array,
    b_scale: Array,
    b_zero: Array,
    c: Array | None = None,
    y_scale: Array | None = None,
    y_zero: Array | None = None,
) -> Array:
    """Return alpha * A' B' + C, where C has the scale of the product; float32 without `y_scale`."""
    columns = 0 if node.get("transB", 0) else 1  # the axis of B with a scale for each element
    left, right = centred(a, a_zero), centred(b, b_zero, columns)
    left = left.T if node.get("transA", 0) else left
    right = right.T if columns == 0 else right
    sums = matmul_arrays(left, right, np.dtype(np.int32))
    sums = sums if c is None else sums + c
    b_scale = jnp.reshape(b_scale, ()) if b_scale.size == 1 else b_scale
    factor = jnp.reshape(a_scale, ()) * b_scale * np.float32(node.get("alpha", 1.0))
    result = lax.convert_element_type(sums, np.float32) * factor
    return result if y_scale is None else quantised(result, y_scale, y_zero, a.dtype)


QUANTISED: dict[str, Translation] = {
    "DequantizeLinear": dequantize_linear,
    "QGemm": qgemm,
    "QLinearAdd": on_quantised(lambda _, a, b: jnp.add(a, b), operands=2),
    "QLinearAveragePool": on_quantised(average_pool),
    "QLinearConcat": qlinear_concat,
    "QLinearGlobalAveragePool": on_quantised(over_image(jnp.mean)),
    "QLinearLeakyRelu": on_quantised(leaky_relu),
    "QLinearMul": on_quantised(lambda _, a, b: jnp.multiply(a, b), operands=2),
    "QLinearSigmoid": on_quantised(lambda _, x: lax.logistic(x)),
    "QuantizeLinear": quantize_linear,
}

TRANSLATIONS = on_device(
    {f"com.microsoft.{name}": translation for name, translation in QUANTISED.items()}
)
