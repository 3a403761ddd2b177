"""Quantised operators of ONNX: integer arithmetic around zero points and scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import Node, Translation, Value, device
from xrl_jax.frontends.onnx_ops.convolution import add_bias, convolve
from xrl_jax.frontends.onnx_ops.linalg import matmul_arrays


def conv_integer(
    node: Node,
    x: Value,
    kernel: Value,
    x_zero: Value | None = None,
    kernel_zero: Value | None = None,
) -> jax.Array:
    return convolve(node, centred(x, x_zero), centred(kernel, kernel_zero, 0), np.dtype(np.int32))


def centred(x: Value, zero: Value | None, axis: int | None = None) -> jax.Array:
    """x - zero point as int32; a zero point per channel lies along `axis`."""
    result = lax.convert_element_type(device(x), np.int32)
    if zero is None:
        return result
    offset = lax.convert_element_type(device(zero), np.int32)
    if offset.ndim == 1 and axis is not None and offset.size > 1:
        offset = jnp.reshape(offset, [-1 if i == axis else 1 for i in range(result.ndim)])
    elif offset.size == 1:
        offset = jnp.reshape(offset, ())
    return result - offset


def matmul_integer(
    node: Node, a: Value, b: Value, a_zero: Value | None = None, b_zero: Value | None = None
) -> jax.Array:
    left, right = centred(a, a_zero, a.ndim - 2), centred(b, b_zero, b.ndim - 1)
    return matmul_arrays(left, right, np.dtype(np.int32))


def quantise(x: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
    """round(x / scale) + zero point, saturated."""
    info = jnp.iinfo(zero.dtype)
    rounded = lax.round(x / scale, lax.RoundingMethod.TO_NEAREST_EVEN)
    shifted = rounded + lax.convert_element_type(zero, rounded.dtype)
    limited = lax.clamp(rounded.dtype.type(info.min), shifted, rounded.dtype.type(info.max))
    return lax.convert_element_type(limited, zero.dtype)


def qlinear_conv(
    node: Node,
    x: Value,
    x_scale: Value,
    x_zero: Value,
    w: Value,
    w_scale: Value,
    w_zero: Value,
    y_scale: Value,
    y_zero: Value,
    bias: Value | None = None,
) -> jax.Array:
    result = convolve(node, centred(x, x_zero), centred(w, w_zero, 0), np.dtype(np.int32))
    result = lax.convert_element_type(add_bias(result, bias), np.float32)
    w_scale = device(w_scale)
    per_channel = jnp.reshape(w_scale, (-1,) + (1,) * (result.ndim - 2))
    factor = jnp.reshape(device(x_scale), ()) * per_channel
    return quantise(
        result * factor, jnp.reshape(device(y_scale), ()), jnp.reshape(device(y_zero), ())
    )


def qlinear_matmul(
    node: Node,
    a: Value,
    a_scale: Value,
    a_zero: Value,
    b: Value,
    b_scale: Value,
    b_zero: Value,
    y_scale: Value,
    y_zero: Value,
) -> jax.Array:
    result = matmul_integer(node, a, b, a_zero, b_zero)
    left, right = device(a_scale), device(b_scale)
    if left.size > 1 and left.ndim == 1:
        left = lax.expand_dims(left, (1,))
    factor = lax.convert_element_type(left, np.float32) * lax.convert_element_type(
        right, np.float32
    )
    factor = jnp.reshape(factor, ()) if factor.size == 1 else factor
    scale = lax.convert_element_type(device(y_scale), np.float32)
    zero = device(y_zero)
    if scale.size == 1:
        scale, zero = jnp.reshape(scale, ()), jnp.reshape(zero, ())
    return quantise(lax.convert_element_type(result, np.float32) * factor, scale, zero)


def along(scale: Value, x: Value, axis: int, block: int) -> jax.Array:
    """Shape a scale or zero point so that it meets x: one, one per axis entry, or per block."""
    scale = device(scale)
    if scale.size == 1 and scale.ndim <= 1:
        return jnp.reshape(scale, ())
    axis = axis + x.ndim if axis < 0 else axis
    if block:
        length = scale.shape[axis] * block
        repeated = jnp.repeat(scale, block, axis=axis, total_repeat_length=length)
        return lax.slice_in_dim(repeated, 0, x.shape[axis], axis=axis)
    return jnp.reshape(scale, [-1 if i == axis else 1 for i in range(x.ndim)])


def quantize_linear(node: Node, x: Value, scale: Value, zero: Value | None = None) -> jax.Array:
    from onnx import helper

    x = device(x)
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    if zero is None:
        kind = node.get("output_dtype", 0)
        zero = np.zeros(scale.shape, helper.tensor_dtype_to_np_dtype(kind) if kind else np.uint8)
    if node.get("precision", 0):
        precision = helper.tensor_dtype_to_np_dtype(node.attributes["precision"])
    else:
        precision = np.promote_types(np.float32, scale.dtype)
    divisor = lax.convert_element_type(along(scale, x, axis, block), precision)
    offset = along(zero, x, axis, block)
    return quantise(lax.convert_element_type(x, precision), divisor, offset)


def dequantize_linear(node: Node, x: Value, scale: Value, zero: Value | None = None) -> jax.Array:
    """(x - zero point) * scale, in the dtype of the scale (or output_dtype)."""
    from onnx import helper

    axis, block = node.get("axis", 1), node.get("block_size", 0)
    kind = node.get("output_dtype", 0)
    dtype = helper.tensor_dtype_to_np_dtype(kind) if kind else scale.dtype
    wide = lax.convert_element_type(device(x), np.int32)
    if zero is not None:
        wide = wide - lax.convert_element_type(along(zero, x, axis, block), np.int32)
    factor = along(scale, x, axis, block)
    result = lax.convert_element_type(wide, np.float32) * lax.convert_element_type(
        factor, np.float32
    )
    return lax.convert_element_type(result, dtype)


def dynamic_quantize_linear(node: Node, x: Value) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantise to uint8 over the range of x, 0 included."""
    x = device(x)
    zero, top = np.float32(0), np.float32(255)
    low, high = lax.min(jnp.min(x), zero), lax.max(jnp.max(x), zero)
    scale = (high - low) / top
    scale = lax.select(scale == zero, np.float32(1) + zero * scale, scale)
    point = lax.round(-low / scale, lax.RoundingMethod.TO_NEAREST_EVEN)
    point = lax.convert_element_type(lax.clamp(zero, point, top), np.uint8)
    return quantise(x, scale, point), scale, point


TRANSLATIONS: dict[str, Translation] = {
    "ConvInteger": conv_integer,
    "DequantizeLinear": dequantize_linear,
    "DynamicQuantizeLinear": dynamic_quantize_linear,
    "MatMulInteger": matmul_integer,
    "QLinearConv": qlinear_conv,
    "QLinearMatMul": qlinear_matmul,
    "QuantizeLinear": quantize_linear,
}
