"""Non-standard operators that ONNX Runtime's optimiser puts into the models it writes.

The keys of those in the domain com.microsoft include it, as some share a standard operator's name.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from xrl_jax.frontends.onnx_ops.activation import gelu
from xrl_jax.frontends.onnx_ops.base import Array, Node, Translation, like, on_device
from xrl_jax.frontends.onnx_ops.convolution import conv
from xrl_jax.frontends.onnx_ops.linalg import gemm, matmul_arrays
from xrl_jax.frontends.onnx_ops.normalisation import layer_normalization, rms_normalization
from xrl_jax.frontends.onnx_ops.recurrent import activation


def with_attributes(node: Node, **attributes: Any) -> Node:
    """Return the node with attributes added or replaced, for a translation that reads them."""
    return dataclasses.replace(node, attributes={**node.attributes, **attributes})


def add_present(x: Array, *others: Array | None) -> Array:
    """Add all arrays that are not None."""
    for other in others:
        if other is not None:
            x = jnp.add(x, other)
    return x


def fast_gelu(node: Node, x: Array, bias: Array | None = None) -> Array:
    return gelu(with_attributes(node, approximate="tanh"), add_present(x, bias))


def bias_gelu(node: Node, x: Array, bias: Array) -> Array:
    return gelu(node, add_present(x, bias))


def quick_gelu(node: Node, x: Array) -> Array:
    return x * lax.logistic(x * like(x, node.get("alpha", 1.702)))


def activated(node: Node, x: Array) -> Array:
    """Apply the activation that is fused into a convolution or matrix product."""
    name = node.get("activation", "")
    parameters = list(node.get("activation_params", ()))
    if not name:
        return x
    if name == "Clip":
        low, high = [*parameters, -math.inf, math.inf][:2] if parameters else (-math.inf, math.inf)
        return lax.clamp(like(x, low), x, like(x, high))
    alpha, beta = [*parameters, None, None][:2]
    alpha = node.get("activation_alpha", alpha)
    beta = node.get("activation_beta", beta)
    return activation(node, name, alpha, beta)(x)


def fused_conv(
    node: Node, x: Array, kernel: Array, bias: Array | None = None, added: Array | None = None
) -> Array:
    return activated(node, add_present(conv(node, x, kernel, bias), added))


def fused_gemm(node: Node, a: Array, b: Array, c: Array | None = None) -> Array:
    return activated(node, gemm(node, a, b, c))


def fused_matmul(node: Node, a: Array, b: Array) -> Array:
    """Return alpha * A' B' over the last two axes, where ' is an optional transposition."""
    if node.get("transBatchA", 0) or node.get("transBatchB", 0):
        raise node.unsupported("transBatchA or transBatchB")
    if node.get("transA", 0) and a.ndim > 1:
        a = jnp.swapaxes(a, -1, -2)
    if node.get("transB", 0) and b.ndim > 1:
        b = jnp.swapaxes(b, -1, -2)
    result, alpha = matmul_arrays(a, b), node.get("alpha", 1.0)
    return result if alpha == 1 else result * like(result, alpha)


def skip_layer_normalization(
    node: Node,
    x: Array,
    skip: Array,
    scale: Array,
    shift: Array | None = None,
    bias: Array | None = None,
) -> tuple[Array, ...]:
    total = add_present(x, skip, bias)
    node = with_attributes(node, axis=-1, epsilon=node.get("epsilon", 1e-12))
    return (*layer_normalization(node, total, scale, shift), total)


def skip_rms_normalization(
    node: Node, x: Array, skip: Array, scale: Array, bias: Array | None = None
) -> tuple[Array | None, ...]:
    """Normalise x + skip + bias; the second and third result, only for training, are None."""
    total = add_present(x, skip, bias)
    result = rms_normalization(with_attributes(node, axis=-1), total, scale)
    return result, None, None, total


MICROSOFT: dict[str, Translation] = {
    "BiasGelu": bias_gelu,
    "FastGelu": fast_gelu,
    "FusedConv": fused_conv,
    "FusedGemm": fused_gemm,
    "FusedMatMul": fused_matmul,
    "Gelu": gelu,
    "QuickGelu": quick_gelu,
    "SkipLayerNormalization": skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": skip_rms_normalization,
}

TRANSLATIONS = on_device(
    {
        "SimplifiedLayerNormalization": rms_normalization,  # is in the standard domain
        **{f"com.microsoft.{name}": translation for name, translation in MICROSOFT.items()},
    }
)
