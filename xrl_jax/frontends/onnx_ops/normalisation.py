"""Normalisations of ONNX: batch, instance, layer, group, RMS, local response, Lp."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import Array, Node, axis_of, like, on_device
from xrl_jax.frontends.onnx_ops.convolution import per_channel


def batch_normalization(
    node: Node, x: Array, scale: Array, bias: Array, mean: Array, variance: Array
) -> Array | tuple[Array, ...]:
    """Return (x - mean) / sqrt(variance + epsilon) * scale + bias, per channel."""
    if node.opset < 9 and not node.get("spatial", 1):
        raise node.unsupported("spatial=0")
    epsilon = node.get("epsilon", 1e-5)
    trained = None
    if node.opset >= 14:
        training = bool(node.get("training_mode", 0))
    else:
        training = len([name for name in node.outputs if name]) > 1
    if training:
        axes = (0, *range(2, x.ndim))
        momentum = node.get("momentum", 0.9)
        own_mean = jnp.mean(x, axis=axes)
        own_variance = jnp.mean(lax.square(x - per_channel(x, own_mean)), axis=axes)
        keep, add = like(own_mean, momentum), like(own_mean, 1 - momentum)
        trained = (
            mean * keep + own_mean * add,
            variance * keep + own_variance * add,
        )
        if node.opset < 14:
            trained += (own_mean, own_variance)
        mean, variance = own_mean, own_variance
    spread = lax.rsqrt(variance + like(variance, epsilon))
    result = (x - per_channel(x, mean)) * per_channel(x, spread * scale)
    result = lax.convert_element_type(result + per_channel(x, bias), x.dtype)
    return result if trained is None else (result, *trained)


def standardise(x: Array, axes: tuple[int, ...], epsilon: float) -> tuple[Array, Array, Array]:
    """Return (x - mean) / sqrt(variance + epsilon), the mean and 1 / sqrt(variance + epsilon)."""
    mean = jnp.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    variance = jnp.mean(lax.square(centred), axis=axes, keepdims=True)
    inverse = lax.rsqrt(variance + like(x, epsilon))
    return centred * inverse, mean, inverse


def instance_normalization(node: Node, x: Array, scale: Array, bias: Array) -> Array:
    result, _, _ = standardise(x, tuple(range(2, x.ndim)), node.get("epsilon", 1e-5))
    return result * per_channel(x, scale) + per_channel(x, bias)


def stash(node: Node, x: Array) -> Array:
    """Return x in the precision of the statistics (stash_type, by default at least float32)."""
    kind = node.get("stash_type", 1)
    if kind == 1 and x.dtype.itemsize < 4:
        return lax.convert_element_type(x, np.float32)
    return x


def layer_normalization(
    node: Node, x: Array, scale: Array, bias: Array | None = None
) -> tuple[Array, Array, Array]:
    dtype = x.dtype
    wide = stash(node, x)
    axis = axis_of(node.get("axis", -1), wide.ndim)
    axes = tuple(range(axis, wide.ndim))
    result, mean, inverse = standardise(wide, axes, node.get("epsilon", 1e-5))
    result = lax.convert_element_type(result, dtype) * scale
    if bias is not None:
        result = result + bias
    return result, mean, inverse


def rms_normalization(node: Node, x: Array, scale: Array) -> Array:
    dtype = x.dtype
    wide = stash(node, x)
    axis = axis_of(node.get("axis", -1), wide.ndim)
    mean = jnp.mean(lax.square(wide), axis=tuple(range(axis, wide.ndim)), keepdims=True)
    result = wide * lax.rsqrt(mean + like(wide, node.get("epsilon", 1e-5)))
    return lax.convert_element_type(result, dtype) * scale


def group_normalization(node: Node, x: Array, scale: Array, bias: Array) -> Array:
    """Normalise each group of channels; scale and bias are per group before opset 21."""
    groups = node.attributes["num_groups"]
    wide = stash(node, x)
    grouped = jnp.reshape(wide, (x.shape[0], groups, -1))
    result, _, _ = standardise(grouped, (2,), node.get("epsilon", 1e-5))
    result = lax.convert_element_type(jnp.reshape(result, x.shape), x.dtype)
    if node.opset < 21:
        each = x.shape[1] // groups
        scale, bias = (
            jnp.reshape(jnp.broadcast_to(lax.expand_dims(v, (1,)), (groups, each)), (-1,))
            for v in (scale, bias)
        )
    return result * per_channel(result, scale) + per_channel(result, bias)


def local_response(node: Node, x: Array) -> Array:
    """Return x / (bias + alpha / size * sum of squares over neighbouring channels) ** beta."""
    size = node.attributes["size"]
    low = (size - 1) // 2
    squares = lax.reduce_window(
        lax.square(x),
        like(x, 0),
        lax.add,
        (1, size) + (1,) * (x.ndim - 2),
        (1,) * x.ndim,
        [(0, 0), (low, size - 1 - low)] + [(0, 0)] * (x.ndim - 2),
    )
    base = squares * like(x, node.get("alpha", 1e-4) / size) + like(x, node.get("bias", 1.0))
    return x / lax.pow(base, like(x, node.get("beta", 0.75)))


def lp_normalization(node: Node, x: Array) -> Array:
    """Return x / norm along an axis; 0 where the norm is 0."""
    axis = axis_of(node.get("axis", -1), x.ndim)
    if node.get("p", 2) == 1:
        norm = jnp.sum(lax.abs(x), axis=axis, keepdims=True)
    else:
        norm = lax.sqrt(jnp.sum(lax.square(x), axis=axis, keepdims=True))
    empty = jnp.equal(norm, like(x, 0))
    safe = lax.select(empty, lax.full_like(norm, 1), norm)
    return x / safe


TRANSLATIONS = on_device(
    {
        "BatchNormalization": batch_normalization,
        "GroupNormalization": group_normalization,
        "InstanceNormalization": instance_normalization,
        "LRN": local_response,
        "LayerNormalization": layer_normalization,
        "LpNormalization": lp_normalization,
        "RMSNormalization": rms_normalization,
    }
)
