"""ResNeXt-50 32x4d (Xie et al. 2017, arXiv:1611.05431), NCHW, inference with batch norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.models.base import Model, conv_kernel, image, normal, scaled

BLOCKS = (3, 4, 6, 3)
EPSILON = 1e-5


def conv(kernel: jax.Array, x: jax.Array, *, stride: int = 1, groups: int = 1) -> jax.Array:
    """Convolution of [N, C, H, W] with an OIHW kernel of odd size, padded by half of it."""
    pad = kernel.shape[2] // 2
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        [(pad, pad)] * 2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        feature_group_count=groups,
    )


def batch_norm(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Batch norm with stored statistics over [N, C, H, W]."""
    mean, var = layer["mean"][:, None, None], layer["var"][:, None, None]
    scale, bias = layer["scale"][:, None, None], layer["bias"][:, None, None]
    return (x - mean) * lax.rsqrt(var + EPSILON) * scale + bias


def bottleneck(layer: dict[str, Any], x: jax.Array, *, stride: int, groups: int) -> jax.Array:
    """1x1, grouped 3x3, 1x1, each with batch norm, and the shortcut."""
    y = jax.nn.relu(batch_norm(layer["norm1"], conv(layer["conv1"], x)))
    y = conv(layer["conv2"], y, stride=stride, groups=groups)
    y = jax.nn.relu(batch_norm(layer["norm2"], y))
    y = batch_norm(layer["norm3"], conv(layer["conv3"], y))
    if "shortcut" in layer:
        x = batch_norm(layer["shortcut_norm"], conv(layer["shortcut"], x, stride=stride))
    return jax.nn.relu(x + y)


def max_pool(x: jax.Array) -> jax.Array:
    """3x3 max pool with stride 2 and padding 1."""
    padding = ((0, 0), (0, 0), (1, 1), (1, 1))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), padding)


def resnext50(
    seed: int = 0,
    *,
    image_size: int = 224,
    width: float = 1.0,
    groups: int = 32,
    classes: int = 1000,
    blocks: tuple[int, ...] = BLOCKS,
) -> Model:
    """ResNeXt-50 with random weights and plausible batch-norm statistics.

    `width` multiplies all channel counts but the image's and the classes; `groups` must divide
    `128 * width`. `blocks` gives the blocks of each stage; `image_size` is at least 32.
    """
    if image_size < 32:
        raise ValueError(f"resnext50: image_size {image_size} is too small, use at least 32")
    if scaled(128, width) % groups:
        raise ValueError(
            f"resnext50: {groups} groups do not divide {scaled(128, width)} channels, "
            "change groups or width"
        )
    rng = np.random.default_rng(seed)

    def norm(channels: int, scale: float = 1.0) -> dict[str, np.ndarray]:
        return {
            "scale": (scale * rng.uniform(0.8, 1.2, channels)).astype(np.float32),
            "bias": normal(rng, (channels,), std=0.1),
            "mean": normal(rng, (channels,), std=0.1),
            "var": rng.uniform(0.7, 1.4, channels).astype(np.float32),
        }

    channels = scaled(64, width)
    stem = {"conv": conv_kernel(rng, channels, 3, 7), "norm": norm(channels)}
    stages = []
    for stage, count in enumerate(blocks):
        inner, outer = scaled(128, width) * 2**stage, scaled(256, width) * 2**stage
        stages.append([])
        for index in range(count):
            layer = {
                "conv1": conv_kernel(rng, inner, channels, 1),
                "norm1": norm(inner),
                "conv2": conv_kernel(rng, inner, inner // groups, 3),
                "norm2": norm(inner),
                "conv3": conv_kernel(rng, outer, inner, 1, gain=1.0),
                # A small last scale keeps the sum over sixteen blocks from growing.
                "norm3": norm(outer, scale=0.4),
            }
            if index == 0:
                layer["shortcut"] = conv_kernel(rng, outer, channels, 1, gain=1.0)
                layer["shortcut_norm"] = norm(outer)
            stages[-1].append(layer)
            channels = outer
    head = {
        "kernel": normal(rng, (channels, classes), std=channels**-0.5),
        "bias": normal(rng, (classes,), std=0.05),
    }

    def forward(weights: dict[str, Any], x: jax.Array) -> jax.Array:
        """Class scores [N, classes] of images [N, 3, H, W]."""
        stem = weights["stem"]
        x = max_pool(jax.nn.relu(batch_norm(stem["norm"], conv(stem["conv"], x, stride=2))))
        for stage, layers in enumerate(weights["stages"]):
            for index, layer in enumerate(layers):
                stride = 2 if stage > 0 and index == 0 else 1
                x = bottleneck(layer, x, stride=stride, groups=groups)
        x = jnp.mean(x, axis=(2, 3))
        return x @ weights["head"]["kernel"] + weights["head"]["bias"]

    weights = {"stem": stem, "stages": stages, "head": head}
    return Model("resnext50", forward, weights, (image(rng, image_size),))
