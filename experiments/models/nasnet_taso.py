"""NASNet-A as TASO's example builds it (Jia et al. 2019, TASO, examples/nasnet_a.py), NCHW.

This is not the network of arXiv:1707.07012 (see nasnet.py): it has no batch norm and no classifier,
separable convolutions run once and without relu, all of the normal cell's are 3x3, both of a cell's
inputs pass through a 1x1 convolution with relu, and the normal cell does not concatenate the
previous hidden state. It serves to compare with figures published for that graph. As in TASO,
"SAME" padding is the same on both sides, and means are over the pixels inside the image.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.base import Model, conv, conv_kernel, image
from experiments.models.nasnet import mean_pool
from experiments.models.resnet import max_pool

# Kernel sizes of the separable convolutions of each cell, in the order in which the cells use them.
NORMAL = (3, 3, 3, 3, 3)
REDUCTION = (7, 5, 7, 5, 3)
PADDING = ((1, 1), (1, 1))


def squeeze(kernel: jax.Array, x: jax.Array) -> jax.Array:
    """Apply a 1x1 convolution and relu."""
    return jax.nn.relu(conv(kernel, x))


def separable(layer: dict[str, Any], x: jax.Array, *, stride: int = 1) -> jax.Array:
    """Apply a depthwise and a 1x1 convolution."""
    x = conv(layer["depthwise"], x, stride=stride, groups=x.shape[1])
    return conv(layer["pointwise"], x)


def normal_cell(layer: dict[str, Any], previous: jax.Array, current: jax.Array) -> jax.Array:
    """Return the next hidden state, of the same size: [N, 5F, H, W] for F filters."""
    h, p = squeeze(layer["current"], current), squeeze(layer["previous"], previous)
    first, second, third, fourth, fifth = layer["separable"]
    parts = [
        separable(first, h) + h,
        separable(second, p) + separable(third, h),
        mean_pool(h) + p,
        mean_pool(p) + mean_pool(p),
        separable(fourth, p) + separable(fifth, p),
    ]
    return jnp.concatenate(parts, axis=1)


def reduction_cell(layer: dict[str, Any], previous: jax.Array, current: jax.Array) -> jax.Array:
    """Return the next hidden state, of half the size: [N, 5F, H / 2, W / 2] for F filters."""
    h, p = squeeze(layer["current"], current), squeeze(layer["previous"], previous)
    first, second, third, fourth, fifth = layer["separable"]
    one = separable(first, p, stride=2) + separable(second, h, stride=2)
    two = max_pool(h) + separable(third, p, stride=2)
    three = mean_pool(h, stride=2, padding=PADDING) + separable(fourth, p, stride=2)
    four = max_pool(h) + separable(fifth, one)
    five = mean_pool(one) + two
    return jnp.concatenate([one, two, three, four, five], axis=1)


def forward(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return the last cell's hidden state [N, C, H', W'] of images [N, 3, H, W]."""
    x = max_pool(jax.nn.relu(conv(weights["stem"], x, stride=2)))
    for *normal, reduction in weights["stages"]:
        previous = x
        for layer in normal:
            previous, x = x, normal_cell(layer, previous, x)
        x = reduction_cell(reduction, previous, x)
    return x


def nasneta_taso(
    seed: int = 0,
    *,
    image_size: int = 224,
    cells: int = 5,
    stages: int = 3,
    filters: int = 128,
    stem: int = 64,
) -> Model:
    """Build TASO's NASNet-A with random weights.

    Each of the `stages` has `cells` normal cells and a reduction cell, with `filters` filters in
    the normal cells of the first stage and twice as many in its reduction cell and the next stage.
    `stem` is the number of channels of the first convolution; `image_size` is at least 32.
    """
    if image_size < 32:
        raise ValueError(f"nasneta_taso: image_size {image_size} is too small, use at least 32")
    for option, value in (("cells", cells), ("stages", stages)):
        if value < 1:
            raise ValueError(f"nasneta_taso: {option} is {value}, use at least 1")
    rng = np.random.default_rng(seed)

    def cell(sizes: tuple[int, ...], width: int, current: int, previous: int) -> dict[str, Any]:
        """Draw the weights of a cell with `width` filters whose inputs have the given channels."""
        return {
            "current": conv_kernel(rng, width, current, 1, gain=1.0),
            "previous": conv_kernel(rng, width, previous, 1, gain=1.0),
            "separable": [
                {
                    "depthwise": conv_kernel(rng, width, 1, size, gain=1.0),
                    "pointwise": conv_kernel(rng, width, width, 1, gain=1.0),
                }
                for size in sizes
            ],
        }

    first = conv_kernel(rng, stem, 3, 7)
    channels = stem
    layers = []
    for stage in range(stages):
        width = filters * 2**stage
        previous = channels
        layers.append([])
        for _ in range(cells):
            layers[-1].append(cell(NORMAL, width, channels, previous))
            previous, channels = channels, 5 * width
        layers[-1].append(cell(REDUCTION, 2 * width, channels, previous))
        channels = 10 * width
    weights = {"stem": first, "stages": layers}
    return Model("nasneta_taso", forward, weights, (image(rng, image_size),))
