"""VGG-19 (Simonyan & Zisserman 2015, arXiv:1409.1556, configuration E) without batch norm, NCHW."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.models.base import (
    Model,
    conv,
    conv_kernel,
    dense_weights,
    image,
    normal,
    scaled,
)

STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # channels and number of convolutions
HIDDEN = 4096


def max_pool(x: jax.Array) -> jax.Array:
    """Apply a 2x2 max pool with stride 2 and no padding."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def forward(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return class scores [N, classes] of images [N, 3, H, W]."""
    for stage in weights["stages"]:
        for layer in stage:
            x = jax.nn.relu(conv(layer["kernel"], x) + layer["bias"][:, None, None])
        x = max_pool(x)
    x = x.reshape(x.shape[0], -1)
    for layer in weights["hidden"]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ weights["head"]["kernel"] + weights["head"]["bias"]


def vgg19(
    seed: int = 0, *, image_size: int = 224, width: float = 1.0, classes: int = 1000
) -> Model:
    """Build VGG-19 with random weights.

    `image_size` is at least 32; the first dense layer reads all pixels that the five poolings leave
    (7x7 of 224x224). `width` multiplies all channel counts except the image's and the number of
    classes, and the widths of the two hidden dense layers.
    """
    if image_size < 32:
        raise ValueError(f"vgg19: image_size {image_size} is too small, use at least 32")
    rng = np.random.default_rng(seed)
    stages, channels = [], 3
    for published, count in STAGES:
        wide = scaled(published, width)
        stages.append([])
        for _ in range(count):
            stages[-1].append(
                {
                    "kernel": conv_kernel(rng, wide, channels, 3),
                    "bias": normal(rng, (wide,), std=0.05),
                }
            )
            channels = wide
    left = image_size // 2 ** len(STAGES)
    hidden = scaled(HIDDEN, width)
    weights = {
        "stages": stages,
        "hidden": [
            dense_weights(rng, channels * left**2, hidden, gain=2.0),
            dense_weights(rng, hidden, hidden, gain=2.0),
        ],
        "head": dense_weights(rng, hidden, classes),
    }
    return Model("vgg19", forward, weights, (image(rng, image_size),))
