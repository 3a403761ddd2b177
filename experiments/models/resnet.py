"""ResNet-50 (He et al. 2016, arXiv:1512.03385; version 1.5, with the stride on the 3x3) and
ResNeXt-50 32x4d (Xie et al. 2017, arXiv:1611.05431), NCHW, inference with batch norm.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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

BLOCKS = (3, 4, 6, 3)


def bottleneck(layer: dict[str, Any], x: jax.Array, *, stride: int, groups: int) -> jax.Array:
    """Apply 1x1, grouped 3x3 and 1x1 convolutions, each with batch norm, and add the shortcut."""
    y = jax.nn.relu(batch_norm(layer["norm1"], conv(layer["conv1"], x)))
    y = conv(layer["conv2"], y, stride=stride, groups=groups)
    y = jax.nn.relu(batch_norm(layer["norm2"], y))
    y = batch_norm(layer["norm3"], conv(layer["conv3"], y))
    if "shortcut" in layer:
        x = batch_norm(layer["shortcut_norm"], conv(layer["shortcut"], x, stride=stride))
    return jax.nn.relu(x + y)


def max_pool(x: jax.Array) -> jax.Array:
    """Apply a 3x3 max pool with stride 2 and padding 1."""
    padding = ((0, 0), (0, 0), (1, 1), (1, 1))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), padding)


def residual_network(
    name: str,
    seed: int,
    *,
    inner: int,
    groups: int,
    image_size: int,
    width: float,
    classes: int,
    blocks: tuple[int, ...],
) -> Model:
    """Build stages of bottleneck blocks whose 3x3 has `inner` channels in the first stage."""
    if image_size < 32:
        raise ValueError(f"{name}: image_size {image_size} is too small, use at least 32")
    if scaled(inner, width) % groups:
        raise ValueError(
            f"{name}: {groups} groups do not divide {scaled(inner, width)} channels, "
            "change groups or width"
        )
    rng = np.random.default_rng(seed)
    channels = scaled(64, width)
    stem = {"conv": conv_kernel(rng, channels, 3, 7), "norm": norm_weights(rng, channels)}
    stages = []
    for stage, count in enumerate(blocks):
        narrow, wide = scaled(inner, width) * 2**stage, scaled(256, width) * 2**stage
        stages.append([])
        for index in range(count):
            layer = {
                "conv1": conv_kernel(rng, narrow, channels, 1),
                "norm1": norm_weights(rng, narrow),
                "conv2": conv_kernel(rng, narrow, narrow // groups, 3),
                "norm2": norm_weights(rng, narrow),
                "conv3": conv_kernel(rng, wide, narrow, 1, gain=1.0),
                # A small scale of the last norm keeps the sum over sixteen blocks from growing.
                "norm3": norm_weights(rng, wide, scale=0.4),
            }
            if index == 0:
                layer["shortcut"] = conv_kernel(rng, wide, channels, 1, gain=1.0)
                layer["shortcut_norm"] = norm_weights(rng, wide)
            stages[-1].append(layer)
            channels = wide
    head = dense_weights(rng, channels, classes)

    def forward(weights: dict[str, Any], x: jax.Array) -> jax.Array:
        """Return class scores [N, classes] of images [N, 3, H, W]."""
        stem = weights["stem"]
        x = max_pool(jax.nn.relu(batch_norm(stem["norm"], conv(stem["conv"], x, stride=2))))
        for stage, layers in enumerate(weights["stages"]):
            for index, layer in enumerate(layers):
                stride = 2 if stage > 0 and index == 0 else 1
                x = bottleneck(layer, x, stride=stride, groups=groups)
        x = jnp.mean(x, axis=(2, 3))
        return x @ weights["head"]["kernel"] + weights["head"]["bias"]

    weights = {"stem": stem, "stages": stages, "head": head}
    return Model(name, forward, weights, (image(rng, image_size),))


def resnet50(
    seed: int = 0,
    *,
    image_size: int = 224,
    width: float = 1.0,
    classes: int = 1000,
    blocks: tuple[int, ...] = BLOCKS,
) -> Model:
    """Build ResNet-50 with random weights and plausible batch-norm statistics.

    `width` multiplies all channel counts except the image's and the number of classes. `blocks`
    gives the number of blocks of each stage; `image_size` is at least 32.
    """
    return residual_network(
        "resnet50",
        seed,
        inner=64,
        groups=1,
        image_size=image_size,
        width=width,
        classes=classes,
        blocks=blocks,
    )


def resnext50(
    seed: int = 0,
    *,
    image_size: int = 224,
    width: float = 1.0,
    groups: int = 32,
    classes: int = 1000,
    blocks: tuple[int, ...] = BLOCKS,
) -> Model:
    """Build ResNeXt-50 with random weights and plausible batch-norm statistics.

    `width` multiplies all channel counts except the image's and the number of classes; `groups`
    must divide `128 * width`. `blocks` gives the number of blocks of each stage; `image_size` is at
    least 32.
    """
    return residual_network(
        "resnext50",
        seed,
        inner=128,
        groups=groups,
        image_size=image_size,
        width=width,
        classes=classes,
        blocks=blocks,
    )
