"""SqueezeNet 1.1 (Iandola et al. 2016, arXiv:1602.07360; the authors' release 1.1), NCHW."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.models.base import Model, conv_kernel, image, normal, scaled

# Squeeze and expand widths of the eight fire modules; each expand branch has the second width.
FIRES = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
POOL_AFTER = (1, 3)  # fire modules that are followed by a max pool


def conv(layer: dict[str, Any], x: jax.Array, *, stride: int = 1, padding: int = 0) -> jax.Array:
    """Apply a convolution with bias: [N, C, H, W] -> [N, O, H', W']."""
    y = lax.conv_general_dilated(
        x,
        layer["kernel"],
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )
    return y + layer["bias"][None, :, None, None]


def max_pool(x: jax.Array) -> jax.Array:
    """Apply a 3x3 max pool with stride 2 and no padding."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "VALID")


def fire(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Squeeze by 1x1, then expand by 1x1 and by 3x3, and concatenate both results."""
    x = jax.nn.relu(conv(layer["squeeze"], x))
    left = jax.nn.relu(conv(layer["expand1"], x))
    right = jax.nn.relu(conv(layer["expand3"], x, padding=1))
    return jnp.concatenate([left, right], axis=1)


def forward(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return class scores [N, classes] of images [N, 3, H, W]."""
    x = max_pool(jax.nn.relu(conv(weights["stem"], x, stride=2)))
    for index, layer in enumerate(weights["fires"]):
        x = fire(layer, x)
        if index in POOL_AFTER:
            x = max_pool(x)
    x = jax.nn.relu(conv(weights["classifier"], x))
    return jnp.mean(x, axis=(2, 3))


def squeezenet(
    seed: int = 0, *, image_size: int = 224, width: float = 1.0, classes: int = 1000
) -> Model:
    """Build SqueezeNet 1.1 with random weights.

    `image_size` is at least 32; `width` multiplies all channel counts except the image's and the
    number of classes.
    """
    if image_size < 32:
        raise ValueError(f"squeezenet: image_size {image_size} is too small, use at least 32")
    rng = np.random.default_rng(seed)

    def layer(out_channels: int, in_channels: int, size: int) -> dict[str, np.ndarray]:
        return {
            "kernel": conv_kernel(rng, out_channels, in_channels, size),
            "bias": normal(rng, (out_channels,), std=0.05),
        }

    channels = scaled(64, width)
    stem = layer(channels, 3, 3)
    fires = []
    for squeeze, expand in FIRES:
        narrow, wide = scaled(squeeze, width), scaled(expand, width)
        fires.append(
            {
                "squeeze": layer(narrow, channels, 1),
                "expand1": layer(wide, narrow, 1),
                "expand3": layer(wide, narrow, 3),
            }
        )
        channels = 2 * wide
    weights = {"stem": stem, "fires": fires, "classifier": layer(classes, channels, 1)}
    return Model("squeezenet", forward, weights, (image(rng, image_size),))
