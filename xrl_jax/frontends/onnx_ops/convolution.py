"""Convolutions of ONNX, in its layout: NC... inputs, OI... kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import (
    Array,
    Node,
    OnnxError,
    Translation,
    Value,
    device,
    on_device,
)

Pads = list[tuple[int, int]]


def same_pads(
    auto: str, size: Sequence[int], window: Sequence[int], strides: Sequence[int]
) -> Pads:
    """Return pads for outputs of ceil(size / stride); `auto` says where an odd element goes."""
    pads = []
    for n, k, s in zip(size, window, strides, strict=True):
        total = max((-(-n // s) - 1) * s + k - n, 0)
        half = total // 2
        pads.append((half, total - half) if auto == "SAME_UPPER" else (total - half, half))
    return pads


def window_pads(
    node: Node, size: Sequence[int], window: Sequence[int], strides: Sequence[int]
) -> Pads:
    """Return the pads given by auto_pad and pads; `window` is the dilated window size."""
    auto = node.get("auto_pad", "NOTSET") or "NOTSET"
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return same_pads(auto, size, window, strides)
    flat = node.get("pads", (0,) * (2 * len(size))) if auto == "NOTSET" else (0,) * (2 * len(size))
    return list(zip(flat[: len(size)], flat[len(size) :], strict=True))


def dilated(kernel: Sequence[int], dilations: Sequence[int]) -> list[int]:
    return [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]


def layout(rank: int) -> lax.ConvDimensionNumbers:
    plain = tuple(range(rank))
    return lax.ConvDimensionNumbers(plain, plain, plain)


def per_channel(x: Array, value: Array) -> Array:
    """Reshape [C] so that it broadcasts against x along axis 1."""
    return jnp.reshape(value, (1, -1) + (1,) * (x.ndim - 2))


def add_bias(x: Array, bias: Array | None) -> Array:
    """Add one value per channel (axis 1)."""
    return x if bias is None else x + per_channel(x, bias)


def steps(node: Node, spatial: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the strides and dilations, 1 by default."""
    ones = (1,) * spatial
    return node.get("strides", ones), node.get("dilations", ones)


def convolve(node: Node, x: Array, kernel: Array, out: np.dtype | None = None) -> Array:
    spatial = x.ndim - 2
    if kernel.ndim != x.ndim:
        raise OnnxError(f"a kernel of rank {kernel.ndim} does not fit an input of rank {x.ndim}")
    strides, dilations = steps(node, spatial)
    window = dilated(kernel.shape[2:], dilations)
    return lax.conv_general_dilated(
        x,
        kernel,
        window_strides=strides,
        padding=window_pads(node, x.shape[2:], window, strides),
        rhs_dilation=dilations,
        dimension_numbers=layout(x.ndim),
        feature_group_count=node.get("group", 1),
        preferred_element_type=out,
    )


def conv(node: Node, x: Array, kernel: Array, bias: Array | None = None) -> Array:
    return add_bias(convolve(node, x, kernel), bias)


def causal_conv(
    node: Node, x: Array, kernel: Array, bias: Array | None = None, past: Array | None = None
) -> tuple[Array, Array]:
    """Convolve x [B, C, L] depthwise over time, after its k - 1 past steps (zeros by default)."""
    steps_before = kernel.shape[2] - 1
    before = jnp.zeros((*x.shape[:2], steps_before), x.dtype) if past is None else past
    whole = lax.concatenate([before, x], 2)
    result = lax.conv_general_dilated(
        whole,
        kernel,
        (1,),
        "VALID",
        dimension_numbers=layout(3),
        feature_group_count=x.shape[1],
    )
    result = add_bias(result, bias)
    activation = node.get("activation", "none")
    if activation in ("silu", "swish"):
        result = result * lax.logistic(result)
    elif activation != "none":
        raise node.unsupported(f"activation={activation!r}")
    return result, lax.slice_in_dim(whole, whole.shape[2] - steps_before, whole.shape[2], axis=2)


def transposed_pads(
    node: Node, size: Sequence[int], window: Sequence[int], strides: Sequence[int]
) -> tuple[Pads, Sequence[int]]:
    """Return the pads and output padding of a transposed convolution."""
    spatial = len(size)
    extra = node.get("output_padding", (0,) * spatial)
    auto = node.get("auto_pad", "NOTSET") or "NOTSET"
    shape = node.get("output_shape", None)
    if shape is None and auto in ("SAME_UPPER", "SAME_LOWER"):
        shape = tuple(n * s for n, s in zip(size, strides, strict=True))
    if shape is None:
        return window_pads(node, size, window, strides), extra
    pads = []
    for n, k, s, e, wanted in zip(size, window, strides, extra, shape[-spatial:], strict=True):
        total = s * (n - 1) + e + k - wanted
        half = total // 2
        # A negative total makes the output larger than all contributions; the rest is zeros.
        pads.append((half, total - half) if auto == "SAME_UPPER" else (total - half, half))
    return pads, extra


def conv_transpose(node: Node, x: Array, kernel: Array, bias: Array | None = None) -> Array:
    """Apply a transposed convolution with a kernel [C, M/group, ...]."""
    spatial, groups = x.ndim - 2, node.get("group", 1)
    strides, dilations = steps(node, spatial)
    window = dilated(kernel.shape[2:], dilations)
    pads, extra = transposed_pads(node, x.shape[2:], window, strides)
    channels, per_group = kernel.shape[:2]
    # [C, M/g, ...] to [M, C/g, ...], taps reversed: the kernel of the equivalent plain convolution.
    if groups > 1:
        kernel = jnp.reshape(kernel, (groups, channels // groups, *kernel.shape[1:]))
        kernel = jnp.swapaxes(kernel, 1, 2)
        kernel = jnp.reshape(kernel, (groups * per_group, channels // groups, *kernel.shape[3:]))
    else:
        kernel = jnp.swapaxes(kernel, 0, 1)
    kernel = lax.rev(kernel, tuple(range(2, x.ndim)))
    padding = [
        (k - 1 - low, k - 1 - high + more)
        for k, (low, high), more in zip(window, pads, extra, strict=True)
    ]
    result = lax.conv_general_dilated(
        x,
        kernel,
        window_strides=(1,) * spatial,
        padding=padding,
        lhs_dilation=strides,
        rhs_dilation=dilations,
        dimension_numbers=layout(x.ndim),
        feature_group_count=groups,
    )
    return add_bias(result, bias)


def col2im(node: Node, x: Value, image: Value, block: Value) -> Array:
    """Sum columns [N, C * block, L] back into images [N, C, ...]."""
    x = device(x)
    size, kernel = node.ints(image, "image_shape"), node.ints(block, "block_shape")
    spatial = len(size)
    strides, dilations = steps(node, spatial)
    pads = window_pads(node, size, dilated(kernel, dilations), strides)
    counts = [
        (n + sum(p) - (k - 1) * d - 1) // s + 1
        for n, k, d, s, p in zip(size, kernel, dilations, strides, pads, strict=True)
    ]
    batch, taps = x.shape[0], math.prod(kernel)
    x = jnp.reshape(x, (batch, -1, taps, *counts))
    padded = [n + sum(p) for n, p in zip(size, pads, strict=True)]
    total = jnp.zeros((batch, x.shape[1], *padded), x.dtype)
    for tap, place in enumerate(np.ndindex(*kernel)):
        amounts = [(0, 0, 0), (0, 0, 0)]
        for i, offset in enumerate(place):
            low = offset * dilations[i]
            high = padded[i] - low - ((counts[i] - 1) * strides[i] + 1)
            amounts.append((low, high, strides[i] - 1))
        total = total + lax.pad(x[:, :, tap], x.dtype.type(0), amounts)
    crops = tuple(slice(low, low + n) for n, (low, _) in zip(size, pads, strict=True))
    return total[(slice(None), slice(None), *crops)]


TRANSLATIONS: dict[str, Translation] = {
    **on_device(
        {
            "CausalConvWithState": causal_conv,
            "Conv": conv,
            "ConvTranspose": conv_transpose,
        }
    ),
    "Col2Im": col2im,
}
