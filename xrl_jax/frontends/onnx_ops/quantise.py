"""Quantised operators of ONNX: integer arithmetic with zero points and scales."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import Array, Node, on_device
from xrl_jax.frontends.onnx_ops.convolution import add_bias, convolve, per_channel
from xrl_jax.frontends.onnx_ops.linalg import matmul_arrays


def conv_integer(
    node: Node,
    x: Array,
    kernel: Array,
    x_zero: Array | None = None,
    kernel_zero: Array | None = None,
) -> Array:
    return convolve(node, centred(x, x_zero), centred(kernel, kernel_zero, 0), np.dtype(np.int32))


def centred(x: Array, zero: Array | None, axis: int | None = None) -> Array:
    """Return x - zero point as int32; zero points per channel lie along `axis`."""
    result = lax.convert_element_type(x, np.int32)
    if zero is None:
        return result
    offset = lax.convert_element_type(zero, np.int32)
    if offset.ndim == 1 and axis is not None and offset.size > 1:
        offset = jnp.reshape(offset, [-1 if i == axis else 1 for i in range(result.ndim)])
    elif offset.size == 1:
        offset = jnp.reshape(offset, ())
    return result - offset


def matmul_integer(
    node: Node, a: Array, b: Array, a_zero: Array | None = None, b_zero: Array | None = None
) -> Array:
    left, right = centred(a, a_zero, a.ndim - 2), centred(b, b_zero, b.ndim - 1)
    return matmul_arrays(left, right, np.dtype(np.int32))


def quantise(x: Array, scale: Array, zero: Array) -> Array:
    """Return round(x / scale) + zero point, saturated."""
    info = jnp.iinfo(zero.dtype)
    rounded = lax.round(x / scale, lax.RoundingMethod.TO_NEAREST_EVEN)
    shifted = rounded + lax.convert_element_type(zero, rounded.dtype)
    limited = lax.clamp(rounded.dtype.type(info.min), shifted, rounded.dtype.type(info.max))
    return lax.convert_element_type(limited, zero.dtype)


def qlinear_conv(
    node: Node,
    x: Array,
    x_scale: Array,
    x_zero: Array,
    w: Array,
    w_scale: Array,
    w_zero: Array,
    y_scale: Array,
    y_zero: Array,
    bias: Array | None = None,
) -> Array:
    result = conv_integer(node, x, w, x_zero, w_zero)
    result = lax.convert_element_type(add_bias(result, bias), np.float32)
    factor = jnp.reshape(x_scale, ()) * per_channel(result, w_scale)
    return quantise(result * factor, jnp.reshape(y_scale, ()), jnp.reshape(y_zero, ()))


def qlinear_matmul(
    node: Node,
    a: Array,
    a_scale: Array,
    a_zero: Array,
    b: Array,
    b_scale: Array,
    b_zero: Array,
    y_scale: Array,
    y_zero: Array,
) -> Array:
    result = matmul_integer(node, a, b, a_zero, b_zero)
    left, right = a_scale, b_scale
    if left.size > 1 and left.ndim == 1:
        left = lax.expand_dims(left, (1,))
    factor = lax.convert_element_type(left, np.float32) * lax.convert_element_type(
        right, np.float32
    )
    factor = jnp.reshape(factor, ()) if factor.size == 1 else factor
    scale = lax.convert_element_type(y_scale, np.float32)
    zero = y_zero
    if scale.size == 1:
        scale, zero = jnp.reshape(scale, ()), jnp.reshape(zero, ())
    return quantise(lax.convert_element_type(result, np.float32) * factor, scale, zero)


def along(scale: Array, x: Array, axis: int, block: int) -> Array:
    """Make a scale or zero point (a scalar, one per axis entry or per block) broadcastable to x."""
    if scale.size == 1 and scale.ndim <= 1:
        return jnp.reshape(scale, ())
    axis = axis + x.ndim if axis < 0 else axis
    if block:
        length = scale.shape[axis] * block
        repeated = jnp.repeat(scale, block, axis=axis, total_repeat_length=length)
        return lax.slice_in_dim(repeated, 0, x.shape[axis], axis=axis)
    return jnp.reshape(scale, [-1 if i == axis else 1 for i in range(x.ndim)])


def quantize_linear(node: Node, x: Array, scale: Array, zero: Array | None = None) -> Array:
    from onnx import helper

    axis, block = node.get("axis", 1), node.get("block_size", 0)
    if zero is None:
        kind = node.get("output_dtype", 0)
        zero = jnp.zeros(scale.shape, helper.tensor_dtype_to_np_dtype(kind) if kind else np.uint8)
    if node.get("precision", 0):
        precision = helper.tensor_dtype_to_np_dtype(node.attributes["precision"])
    else:
        precision = np.promote_types(np.float32, scale.dtype)
    divisor = lax.convert_element_type(along(scale, x, axis, block), precision)
    offset = along(zero, x, axis, block)
    return quantise(lax.convert_element_type(x, precision), divisor, offset)


def dequantize_linear(node: Node, x: Array, scale: Array, zero: Array | None = None) -> Array:
    """Return (x - zero point) * scale, in the dtype of the scale (or output_dtype)."""
    from onnx import helper

    axis, block = node.get("axis", 1), node.get("block_size", 0)
    kind = node.get("output_dtype", 0)
    dtype = helper.tensor_dtype_to_np_dtype(kind) if kind else scale.dtype
    wide = lax.convert_element_type(x, np.int32)
    if zero is not None:
        wide = wide - lax.convert_element_type(along(zero, x, axis, block), np.int32)
    factor = along(scale, x, axis, block)
    result = lax.convert_element_type(wide, np.float32) * lax.convert_element_type(
        factor, np.float32
    )
    return lax.convert_element_type(result, dtype)


TRANSLATIONS = on_device(
    {
        "ConvInteger": conv_integer,
        "DequantizeLinear": dequantize_linear,
        "MatMulInteger": matmul_integer,
        "QLinearConv": qlinear_conv,
        "QLinearMatMul": qlinear_matmul,
        "QuantizeLinear": quantize_linear,
    }
)
