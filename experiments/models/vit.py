"""ViT-B/16 (Dosovitskiy et al. 2021, arXiv:2010.11929), inference: images to class scores, NCHW."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.models.base import Model, conv_kernel, image, normal
from experiments.models.transformer import (
    attention,
    attention_weights,
    check_heads,
    dense,
    layer_norm,
    linear,
    norm,
    run_layers,
    stacked,
)

EPSILON = 1e-6


def embed_patches(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Map images [N, 3, H, W] to tokens [N, T, D] by a convolution whose stride is its size."""
    size = layer["kernel"].shape[2]
    y = lax.conv_general_dilated(
        x, layer["kernel"], (size, size), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW")
    )
    y = y + layer["bias"][None, :, None, None]
    return y.reshape(*y.shape[:2], -1).transpose(0, 2, 1)


def encoder_layer(layer: dict[str, Any], x: jax.Array, *, heads: int) -> jax.Array:
    """Apply attention and feed-forward, each after layer norm and with residual, to x [N, T, D]."""
    x = x + attention(layer, layer_norm(layer["norm1"], x, epsilon=EPSILON), heads=heads)
    hidden = dense(layer["up"], layer_norm(layer["norm2"], x, epsilon=EPSILON))
    return x + dense(layer["down"], jax.nn.gelu(hidden, approximate=False))


def vit(
    seed: int = 0,
    *,
    image_size: int = 224,
    patch: int = 16,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    classes: int = 1000,
    scan: bool = False,
) -> Model:
    """Build ViT with random weights; the feed-forward width is four times `width`.

    `patch` must divide `image_size`, and `heads` must divide `width`. With `scan`, the weights of
    the layers are stacked and the layers run under `lax.scan`.
    """
    check_heads("vit", width, heads)
    if image_size % patch:
        raise ValueError(f"vit: patches of {patch} do not divide image_size {image_size}")
    rng = np.random.default_rng(seed)
    tokens = (image_size // patch) ** 2 + 1
    embeddings = {
        "patch": {
            "kernel": conv_kernel(rng, width, 3, patch, gain=1.0),
            "bias": normal(rng, (width,), std=0.05),
        },
        "class": normal(rng, (1, 1, width), std=0.5),
        "position": normal(rng, (1, tokens, width), std=0.5),
    }
    stack: Any = [
        {
            "norm1": norm(rng, width),
            **attention_weights(rng, width),
            "norm2": norm(rng, width),
            "up": linear(rng, width, 4 * width),
            "down": linear(rng, 4 * width, width),
        }
        for _ in range(layers)
    ]
    if scan:
        stack = stacked(stack)

    def forward(weights: dict[str, Any], x: jax.Array) -> jax.Array:
        """Return class scores [N, classes] of images [N, 3, H, W]."""
        table = weights["embeddings"]
        x = embed_patches(table["patch"], x)
        first = jnp.broadcast_to(table["class"], (x.shape[0], 1, x.shape[2]))
        x = jnp.concatenate([first, x], axis=1) + table["position"]
        x = run_layers(
            lambda layer, x: encoder_layer(layer, x, heads=heads), weights["layers"], x, scan=scan
        )
        x = layer_norm(weights["norm"], x, epsilon=EPSILON)
        return dense(weights["head"], x[:, 0])

    weights = {
        "embeddings": embeddings,
        "layers": stack,
        "norm": norm(rng, width),
        "head": linear(rng, width, classes),
    }
    return Model("vit", forward, weights, (image(rng, image_size),))
