"""NASNet-A (Zoph et al. 2018, arXiv:1707.07012), NCHW, inference with batch norm.

The cells are those of the paper's figure 4. Details that the paper does not state are as in the
authors' release: a relu before each convolution, "SAME" padding with the larger half at the end,
pooling of the pixels inside the image only, the previous hidden state brought to the shape of the
current one by a 1x1 convolution or a factorised reduction, and two reduction cells after the stem.
(Keras has the same layers, but pools zeros around the image in its reduction cells.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

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
)

# Kernel sizes of the separable convolutions of each cell, in the order in which the cells use them.
NORMAL = (5, 3, 5, 3, 3)
REDUCTION = (5, 7, 7, 5, 3)
POOL = (1, 1, 3, 3)


class State(NamedTuple):
    """The shape of a hidden state: its channels, and how often its image has been halved."""

    channels: int
    halvings: int


def norm(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Apply batch norm with the network's epsilon."""
    return batch_norm(layer, x, epsilon=1e-3)


def max_pool(x: jax.Array) -> jax.Array:
    """Apply a 3x3 max pool with stride 2."""
    return lax.reduce_window(x, -jnp.inf, lax.max, POOL, (1, 1, 2, 2), "SAME")


@functools.cache
def window_counts(
    shape: tuple[int, int], stride: int, padding: tuple[tuple[int, int], ...]
) -> np.ndarray:
    """Return how many pixels of an image each 3x3 window covers, float32 [H', W']."""
    rows, cols = (
        np.lib.stride_tricks.sliding_window_view(np.pad(np.ones(n), pad), 3)[::stride].sum(axis=1)
        for n, pad in zip(shape, padding, strict=True)
    )
    return np.outer(rows, cols).astype(np.float32)


def mean_pool(
    x: jax.Array, *, stride: int = 1, padding: Sequence[tuple[int, int]] | None = None
) -> jax.Array:
    """Apply a 3x3 mean pool to [N, C, H, W] over the pixels inside; default padding is "SAME"."""
    shape, strides = x.shape[2:], (stride, stride)
    pads = tuple(padding or lax.padtype_to_pads(shape, (3, 3), strides, "SAME"))
    sums = lax.reduce_window(x, 0.0, lax.add, POOL, (1, 1, *strides), ((0, 0), (0, 0), *pads))
    return sums / window_counts(shape, stride, pads)


def separable(layers: list[Any], x: jax.Array, *, stride: int = 1) -> jax.Array:
    """Apply relu, depthwise and 1x1 convolution and batch norm, twice; only the first strides."""
    for layer in layers:
        x = conv(
            layer["depthwise"],
            jax.nn.relu(x),
            stride=stride,
            groups=x.shape[1],
            padding="SAME",
        )
        x = norm(layer["norm"], conv(layer["pointwise"], x))
        stride = 1
    return x


def adjust(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return the previous hidden state in the shape of the current one.

    The factorised reduction takes every other pixel, and those one further down and right.
    """
    if "shifted" in layer:
        x = jax.nn.relu(x)
        shifted = jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 1)))[:, :, 1:, 1:]
        halves = [conv(layer["conv"], x, stride=2), conv(layer["shifted"], shifted, stride=2)]
        return norm(layer["norm"], jnp.concatenate(halves, axis=1))
    if "conv" in layer:
        return norm(layer["norm"], conv(layer["conv"], jax.nn.relu(x)))
    return x


def squeeze(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return the current hidden state with the cell's number of channels."""
    return norm(layer["norm"], conv(layer["conv"], jax.nn.relu(x)))


def normal_cell(layer: dict[str, Any], current: jax.Array, previous: jax.Array) -> jax.Array:
    """Return the next hidden state, of the same size: [N, 6F, H, W] for F filters."""
    h, p = squeeze(layer["squeeze"], current), adjust(layer["adjust"], previous)
    first, second, third, fourth, fifth = layer["separable"]
    parts = [
        p,
        separable(first, h) + separable(second, p),
        separable(third, p) + separable(fourth, p),
        mean_pool(h) + p,
        mean_pool(p) + mean_pool(p),
        separable(fifth, h) + h,
    ]
    return jnp.concatenate(parts, axis=1)


def reduction_cell(layer: dict[str, Any], current: jax.Array, previous: jax.Array) -> jax.Array:
    """Return the next hidden state, of half the size: [N, 4F, H / 2, W / 2] for F filters."""
    h, p = squeeze(layer["squeeze"], current), adjust(layer["adjust"], previous)
    first, second, third, fourth, fifth = layer["separable"]
    one = separable(first, h, stride=2) + separable(second, p, stride=2)
    two = max_pool(h) + separable(third, p, stride=2)
    three = mean_pool(h, stride=2) + separable(fourth, p, stride=2)
    four = mean_pool(one) + two
    five = separable(fifth, one) + max_pool(h)
    return jnp.concatenate([two, three, four, five], axis=1)


def nasneta(
    seed: int = 0,
    *,
    image_size: int = 224,
    cells: int = 4,
    filters: int = 1056,
    stem: int = 32,
    classes: int = 1000,
) -> Model:
    """Build NASNet-A (`cells` @ `filters`) with random weights, plausible batch-norm statistics.

    `cells` is the number of normal cells in each of the three stages; `filters` the channels of the
    last cell's result, a multiple of 96; `stem` those of the first convolution. The defaults are
    the paper's network for mobile devices. `image_size` is at least 32.
    """
    if image_size < 32:
        raise ValueError(f"nasneta: image_size {image_size} is too small, use at least 32")
    if cells < 1:
        raise ValueError(f"nasneta: cells is {cells}, use at least 1")
    if filters < 96 or filters % 96:
        raise ValueError(f"nasneta: filters {filters} is not a positive multiple of 96")
    rng = np.random.default_rng(seed)

    # The scales below 1 keep the sums in a cell from growing over the cells.
    def projection(out_channels: int, in_channels: int) -> dict[str, Any]:
        return {
            "conv": conv_kernel(rng, out_channels, in_channels, 1),
            "norm": norm_weights(rng, out_channels, scale=0.85),
        }

    def pair(size: int, in_channels: int, width: int) -> list[dict[str, Any]]:
        """Draw the weights of `separable`."""
        layers = []
        for channels, scale in ((in_channels, 1.0), (width, 0.7)):
            layers.append(
                {
                    "depthwise": conv_kernel(rng, channels, 1, size),
                    "pointwise": conv_kernel(rng, width, channels, 1, gain=1.0),
                    "norm": norm_weights(rng, width, scale=scale),
                }
            )
        return layers

    def cell(reduces: bool, width: int, current: State, previous: State) -> dict[str, Any]:
        """Draw the weights of a cell with `width` filters."""
        layer: dict[str, Any] = {"squeeze": projection(width, current.channels), "adjust": {}}
        if previous is current:  # the first cell, which has no previous state
            inputs = previous.channels
        else:
            inputs = width
            layer["adjust"] = projection(width, previous.channels)
            if previous.halvings != current.halvings:
                kernel = layer["adjust"]["conv"]
                layer["adjust"]["conv"], layer["adjust"]["shifted"] = np.split(kernel, 2)
        # The first takes the current state, the middle three the previous one, the last either
        # the current state or a sum in the cell.
        layer["separable"] = [
            pair(size, inputs if index in (1, 2, 3) else width, width)
            for index, size in enumerate(REDUCTION if reduces else NORMAL)
        ]
        return layer

    narrow = filters // 24
    # For each cell, whether it reduces, and its number of filters.
    plan = [(True, narrow // 4), (True, narrow // 2), *[(False, narrow)] * cells]
    for factor in (2, 4):
        plan += [(True, factor * narrow), *[(False, factor * narrow)] * cells]

    first = {"conv": conv_kernel(rng, stem, 3, 3), "norm": norm_weights(rng, stem)}
    previous = current = State(stem, 0)
    layers = []
    for reduces, width in plan:
        layers.append(cell(reduces, width, current, previous))
        after = State((4 if reduces else 6) * width, current.halvings + reduces)
        previous, current = current, after
    head = dense_weights(rng, filters, classes)

    def forward(weights: dict[str, Any], x: jax.Array) -> jax.Array:
        """Return class scores [N, classes] of images [N, 3, H, W]."""
        x = norm(
            weights["stem"]["norm"], conv(weights["stem"]["conv"], x, stride=2, padding="VALID")
        )
        previous = x
        for (reduces, _), layer in zip(plan, weights["cells"], strict=True):
            following = (reduction_cell if reduces else normal_cell)(layer, x, previous)
            previous, x = x, following
        x = jnp.mean(jax.nn.relu(x), axis=(2, 3))
        return x @ weights["head"]["kernel"] + weights["head"]["bias"]

    weights = {"stem": first, "cells": layers, "head": head}
    return Model("nasneta", forward, weights, (image(rng, image_size),))
