"""Inception-v3 (Szegedy et al. 2016, arXiv:1512.00567) without the auxiliary classifier, NCHW,
inference with batch norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.models.base import (
    Model,
    batch_norm,
    dense_weights,
    image,
    norm_weights,
    normal,
    scaled,
)

EPSILON = 1e-3


@dataclass(frozen=True)
class Conv:
    """Convolution, batch norm, relu."""

    channels: int
    height: int = 1
    width: int = 1
    stride: int = 1
    padding: str = "SAME"


@dataclass(frozen=True)
class Pool:
    """3x3 pooling: "max" has stride 2 and no padding, "mean" stride 1 and counts the padding."""

    kind: str


@dataclass(frozen=True)
class Split:
    """Parallel chains whose results are concatenated along the channels."""

    branches: tuple[tuple[Step, ...], ...]


Step = Conv | Pool | Split


def _a(pool: int) -> Split:
    return Split(
        (
            (Conv(64),),
            (Conv(48), Conv(64, 5, 5)),
            (Conv(64), Conv(96, 3, 3), Conv(96, 3, 3)),
            (Pool("mean"), Conv(pool)),
        )
    )


def _c(inner: int) -> Split:
    return Split(
        (
            (Conv(192),),
            (Conv(inner), Conv(inner, 1, 7), Conv(192, 7, 1)),
            (Conv(inner), Conv(inner, 7, 1), Conv(inner, 1, 7), Conv(inner, 7, 1), Conv(192, 1, 7)),
            (Pool("mean"), Conv(192)),
        )
    )


def _e() -> Split:
    wide = Split(((Conv(384, 1, 3),), (Conv(384, 3, 1),)))
    return Split(
        (
            (Conv(320),),
            (Conv(384), wide),
            (Conv(448), Conv(384, 3, 3), wide),
            (Pool("mean"), Conv(192)),
        )
    )


_REDUCE_1 = Split(
    (
        (Conv(384, 3, 3, 2, "VALID"),),
        (Conv(64), Conv(96, 3, 3), Conv(96, 3, 3, 2, "VALID")),
        (Pool("max"),),
    )
)
_REDUCE_2 = Split(
    (
        (Conv(192), Conv(320, 3, 3, 2, "VALID")),
        (Conv(192), Conv(192, 1, 7), Conv(192, 7, 1), Conv(192, 3, 3, 2, "VALID")),
        (Pool("max"),),
    )
)
NETWORK: tuple[Step, ...] = (
    Conv(32, 3, 3, 2, "VALID"),
    Conv(32, 3, 3, 1, "VALID"),
    Conv(64, 3, 3),
    Pool("max"),
    Conv(80),
    Conv(192, 3, 3, 1, "VALID"),
    Pool("max"),
    *(_a(pool) for pool in (32, 64, 64)),
    _REDUCE_1,
    *(_c(inner) for inner in (128, 160, 160, 192)),
    _REDUCE_2,
    _e(),
    _e(),
)


def conv(step: Conv, layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Apply convolution without bias, batch norm with stored statistics, and relu.

    [N, C, H, W] -> [N, O, H', W'].
    """
    y = lax.conv_general_dilated(
        x,
        layer["kernel"],
        (step.stride, step.stride),
        step.padding,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )
    return jax.nn.relu(batch_norm(layer, y, epsilon=EPSILON))


def pool(step: Pool, x: jax.Array) -> jax.Array:
    """Pool [N, C, H, W], see `Pool`."""
    if step.kind == "max":
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "VALID")
    return lax.reduce_window(x, 0.0, lax.add, (1, 1, 3, 3), (1, 1, 1, 1), "SAME") / 9.0


def run(steps: tuple[Step, ...], layers: list[Any], x: jax.Array) -> jax.Array:
    """Run a chain of steps with the weights of each."""
    for step, layer in zip(steps, layers, strict=True):
        if isinstance(step, Conv):
            x = conv(step, layer, x)
        elif isinstance(step, Pool):
            x = pool(step, x)
        else:
            parts = [run(b, w, x) for b, w in zip(step.branches, layer, strict=True)]
            x = jnp.concatenate(parts, axis=1)
    return x


def forward(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return class scores [N, classes] of images [N, 3, H, W]."""
    x = jnp.mean(run(NETWORK, weights["layers"], x), axis=(2, 3))
    return x @ weights["head"]["kernel"] + weights["head"]["bias"]


def inceptionv3(
    seed: int = 0, *, image_size: int = 299, width: float = 1.0, classes: int = 1000
) -> Model:
    """Build Inception-v3 with random weights and plausible batch-norm statistics.

    `width` multiplies all channel counts except the image's and the number of classes;
    `image_size` is at least 75.
    """
    if image_size < 75:
        raise ValueError(f"inceptionv3: image_size {image_size} is too small, use at least 75")
    rng = np.random.default_rng(seed)

    def layer(step: Conv, inputs: int) -> dict[str, np.ndarray]:
        channels = scaled(step.channels, width)
        std = math.sqrt(2.0 / (inputs * step.height * step.width))
        return {
            "kernel": normal(rng, (channels, inputs, step.height, step.width), std=std),
            **norm_weights(rng, channels),
        }

    def chain(steps: tuple[Step, ...], channels: int) -> tuple[list[Any], int]:
        """Draw the weights of a chain; return them and the channels of its result."""
        layers: list[Any] = []
        for step in steps:
            if isinstance(step, Conv):
                layers.append(layer(step, channels))
                channels = scaled(step.channels, width)
            elif isinstance(step, Pool):
                layers.append({})
            else:
                parts = [chain(branch, channels) for branch in step.branches]
                layers.append([weights for weights, _ in parts])
                channels = sum(n for _, n in parts)
        return layers, channels

    layers, channels = chain(NETWORK, 3)
    head = dense_weights(rng, channels, classes)
    return Model(
        "inceptionv3", forward, {"layers": layers, "head": head}, (image(rng, image_size),)
    )
