"""Activation functions and the softmax family of ONNX."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import (
    Array,
    Node,
    Translation,
    Value,
    align,
    axis_of,
    device,
    like,
    on_device,
)
from xrl_jax.frontends.onnx_ops.elementwise import unary

# SELU's constants to the digits that the ONNX specification gives.
SELU_ALPHA, SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


def relu(x: Array) -> Array:
    return lax.max(x, like(x, 0))


def leaky_relu(node: Node, x: Array) -> Array:
    return lax.select(x >= like(x, 0), x, x * like(x, node.get("alpha", 0.01)))


def prelu(node: Node, x: Value, slope: Value) -> Array:
    x = device(x)
    _, slope = align(x, slope)
    return lax.select(x >= like(x, 0), x, jnp.broadcast_to(x * slope, x.shape))


def exponential(x: Array, alpha: float) -> Array:
    """Return alpha * (exp(x) - 1) for x < 0, else 0; always finite, so that gradients are too."""
    return lax.expm1(lax.min(x, like(x, 0))) * like(x, alpha)


def elu(node: Node, x: Array) -> Array:
    return lax.select(x > like(x, 0), x, exponential(x, node.get("alpha", 1.0)))


def celu(node: Node, x: Array) -> Array:
    alpha = node.get("alpha", 1.0)
    return relu(x) + exponential(x / like(x, alpha), alpha)


def selu(node: Node, x: Array) -> Array:
    alpha, gamma = node.get("alpha", SELU_ALPHA), node.get("gamma", SELU_GAMMA)
    return lax.select(x > like(x, 0), x, exponential(x, alpha)) * like(x, gamma)


def hard_sigmoid(node: Node, x: Array) -> Array:
    line = x * like(x, node.get("alpha", 0.2)) + like(x, node.get("beta", 0.5))
    return lax.min(relu(line), like(x, 1))


def softplus(x: Array) -> Array:
    """Compute log(1 + exp(x)) as max(x, 0) + log1p(exp(-|x|)), which does not overflow."""
    return relu(x) + lax.log1p(lax.exp(-lax.abs(x)))


def softsign(x: Array) -> Array:
    return x / (lax.abs(x) + like(x, 1))


def swish(node: Node, x: Array) -> Array:
    alpha = node.get("alpha", 1.0)
    return x * lax.logistic(x if alpha == 1 else x * like(x, alpha))


def thresholded_relu(node: Node, x: Array) -> Array:
    return lax.select(x > like(x, node.get("alpha", 1.0)), x, lax.full_like(x, 0))


def shrink(node: Node, x: Array) -> Array:
    bias, limit = like(x, node.get("bias", 0.0)), like(x, node.get("lambd", 0.5))
    low = lax.select(x < -limit, x + bias, lax.full_like(x, 0))
    return lax.select(x > limit, x - bias, low)


def gelu(node: Node, x: Array) -> Array:
    if node.get("approximate", "none") == "tanh":
        inner = like(x, math.sqrt(2 / math.pi)) * (x + like(x, 0.044715) * lax.integer_pow(x, 3))
        return like(x, 0.5) * x * (like(x, 1) + lax.tanh(inner))
    return like(x, 0.5) * x * (like(x, 1) + lax.erf(x * like(x, math.sqrt(0.5))))


def shifted_exponential(x: Array, axis: int) -> tuple[Array, Array, Array]:
    """Return x - max(x), its exponential, and the sum of the exponential, along an axis."""
    shifted = x - lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True))
    powers = lax.exp(shifted)
    return shifted, powers, jnp.sum(powers, axis=axis, keepdims=True)


def softmax_along(x: Array, axis: int) -> Array:
    _, powers, total = shifted_exponential(x, axis)
    return powers / total


def log_softmax_along(x: Array, axis: int) -> Array:
    shifted, _, total = shifted_exponential(x, axis)
    return shifted - lax.log(total)


def hardmax_along(x: Array, axis: int) -> Array:
    """Return 1 at the first maximum along an axis and 0 elsewhere."""
    best = lax.expand_dims(lax.argmax(x, axis, np.int32), (axis,))
    index = lax.broadcasted_iota(np.int32, x.shape, axis)
    return lax.convert_element_type(jnp.equal(index, best), x.dtype)


def along_axis(function) -> Translation:
    """Apply along `axis`; before opset 13, over all axes from `axis` (default 1) on, flattened."""

    def translate(node: Node, x: Array) -> Array:
        if node.opset >= 13:
            return function(x, axis_of(node.get("axis", -1), x.ndim))
        axis = axis_of(node.get("axis", 1), x.ndim) if x.ndim > 1 else 0
        if axis == x.ndim - 1:
            return function(x, axis)
        shape = (*x.shape[:axis], math.prod(x.shape[axis:]))
        return jnp.reshape(function(jnp.reshape(x, shape), axis), x.shape)

    return translate


TRANSLATIONS: dict[str, Translation] = {
    **on_device(
        {
            "Celu": celu,
            "Elu": elu,
            "Gelu": gelu,
            "HardSigmoid": hard_sigmoid,
            "Hardmax": along_axis(hardmax_along),
            "LeakyRelu": leaky_relu,
            "LogSoftmax": along_axis(log_softmax_along),
            "Relu": unary(relu),
            "Selu": selu,
            "Shrink": shrink,
            "Sigmoid": unary(lax.logistic),
            "Softmax": along_axis(softmax_along),
            "Softplus": unary(softplus),
            "Softsign": unary(softsign),
            "Swish": swish,
            "Tanh": unary(lax.tanh),
            "ThresholdedRelu": thresholded_relu,
        }
    ),
    "PRelu": prelu,
}
