"""MobileNetV2 (Sandler et al. 2018, arXiv:1801.04381), NCHW, inference with batch norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.base import (
    Model,
    batch_norm,
    conv,
    conv_kernel,
    dense_weights,
    image,
    norm_weights,
    scaled,
)

# Table 2 of the paper: expansion, output channels, repetitions, stride of the first block.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STRIDES = tuple(
    stride if index == 0 else 1 for _, _, count, stride in STAGES for index in range(count)
)


def conv_relu6(
    layer: dict[str, Any], x: jax.Array, *, stride: int = 1, groups: int = 1
) -> jax.Array:
    """Apply convolution, batch norm and relu6: [N, C, H, W] -> [N, O, H', W']."""
    y = conv(layer["kernel"], x, stride=stride, groups=groups)
    return jax.nn.relu6(batch_norm(layer["norm"], y))


def inverted_residual(layer: dict[str, Any], x: jax.Array, *, stride: int) -> jax.Array:
    """Expand by 1x1, filter each channel by 3x3, project by 1x1 without activation, and add the
    input if the shapes agree.
    """
    y = conv_relu6(layer["expand"], x) if "expand" in layer else x
    y = conv_relu6(layer["depthwise"], y, stride=stride, groups=y.shape[1])
    y = batch_norm(layer["project"]["norm"], conv(layer["project"]["kernel"], y))
    return x + y if x.shape == y.shape else y


def forward(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return class scores [N, classes] of images [N, 3, H, W]."""
    x = conv_relu6(weights["stem"], x, stride=2)
    for layer, stride in zip(weights["blocks"], STRIDES, strict=True):
        x = inverted_residual(layer, x, stride=stride)
    x = jnp.mean(conv_relu6(weights["last"], x), axis=(2, 3))
    return x @ weights["head"]["kernel"] + weights["head"]["bias"]


def mobilenetv2(
    seed: int = 0, *, image_size: int = 224, width: float = 1.0, classes: int = 1000
) -> Model:
    """Build MobileNetV2 with random weights and plausible batch-norm statistics.

    `width` multiplies all channel counts except the image's and the number of classes (the paper's
    multiplier, without its rounding to multiples of eight); `image_size` is at least 32.
    """
    if image_size < 32:
        raise ValueError(f"mobilenetv2: image_size {image_size} is too small, use at least 32")
    rng = np.random.default_rng(seed)

    def layer(
        out_channels: int, in_channels: int, size: int, *, gain: float = 2.0, scale: float = 1.0
    ) -> dict[str, Any]:
        return {
            "kernel": conv_kernel(rng, out_channels, in_channels, size, gain=gain),
            "norm": norm_weights(rng, out_channels, scale=scale),
        }

    channels = scaled(32, width)
    stem = layer(channels, 3, 3)
    blocks = []
    for expansion, published, count, _ in STAGES:
        narrow = scaled(published, width)
        for index in range(count):
            wide = channels * expansion
            block = {"expand": layer(wide, channels, 1)} if expansion > 1 else {}
            block["depthwise"] = layer(wide, 1, 3)
            # A small scale of the last norm keeps the sum over a stage's blocks from growing.
            block["project"] = layer(narrow, wide, 1, scale=1.0 if index == 0 else 0.5)
            blocks.append(block)
            channels = narrow
    weights = {
        "stem": stem,
        "blocks": blocks,
        "last": layer(scaled(1280, width), channels, 1),
        "head": dense_weights(rng, scaled(1280, width), classes),
    }
    return Model("mobilenetv2", forward, weights, (image(rng, image_size),))
