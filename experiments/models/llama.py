"""Llama (Touvron et al. 2023, arXiv:2302.13971) with grouped queries (Ainslie et al. 2023,
arXiv:2305.13245), inference: tokens to logits, with a cache of earlier keys and values.

As in the published code, norms, rotary angles and softmax are computed in float32, whatever the
dtype of the weights. Sized to about 150 million weights; the smallest published one has 7 billion.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.models.base import Model, normal
from experiments.models.decoder import example_inputs, masked, run_cached_layers, with_past
from experiments.models.transformer import check_heads, dense, linear

EPSILON = 1e-5
BASE = 10000.0  # of the rotary angles


def scales(rng: np.random.Generator, width: int) -> np.ndarray:
    """Draw the weights of an RMS norm over `width` channels."""
    return rng.uniform(0.8, 1.2, width).astype(np.float32)


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Divide x by its root mean square over the last axis, in float32, and scale it."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + EPSILON)
    return y.astype(x.dtype) * scale


def rotary(start: int, tokens: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine [T, C] of the angles of positions from `start` on, in float32."""
    frequencies = BASE ** (jnp.arange(0, size, 2, dtype=jnp.float32) / -size)
    positions = jnp.arange(start, start + tokens, dtype=jnp.float32)
    angles = jnp.tile(positions[:, None] * frequencies, 2)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotate the pairs of channel i and channel C / 2 + i of x [B, H, T, C] by their angles."""
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return x * cosine.astype(x.dtype) + turned * sine.astype(x.dtype)


def grouped_attention(
    layer: dict[str, Any],
    x: jax.Array,
    cache: jax.Array | None,
    turn: tuple[jax.Array, jax.Array],
    *,
    heads: int,
    groups: int,
) -> tuple[jax.Array, jax.Array]:
    """Apply attention of x [B, T, D] to the past positions, to itself and to those before it.

    The heads of each of G groups share keys and values; `turn` is from `rotary`.

    Returns:
      Its output [B, T, D], and the new rotated keys and values [2, B, G, T, C].
    """
    batch, tokens, width = x.shape

    def project(name: str, count: int) -> jax.Array:
        y = dense(layer[name], x).reshape(batch, tokens, count, width // heads)
        return y.transpose(0, 2, 1, 3)

    query = rotate(project("query", heads), *turn)
    key, value = rotate(project("key", groups), *turn), project("value", groups)
    keys, values = (
        jnp.repeat(each, heads // groups, axis=1) for each in with_past(key, value, cache)
    )
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, keys) / math.sqrt(width // heads)
    shares = jax.nn.softmax(masked(scores.astype(jnp.float32)), axis=-1).astype(x.dtype)
    context = jnp.einsum("bhqk,bhkd->bhqd", shares, values)
    context = context.transpose(0, 2, 1, 3).reshape(batch, tokens, width)
    return dense(layer["output"], context), jnp.stack([key, value])


def decoder_layer(
    layer: dict[str, Any],
    x: jax.Array,
    cache: jax.Array | None,
    turn: tuple[jax.Array, jax.Array],
    *,
    heads: int,
    groups: int,
) -> tuple[jax.Array, jax.Array]:
    """Apply attention and gated feed-forward, each after RMS norm and with residual, to x.

    Returns:
      The new x [B, T, D], and the new keys and values as from `grouped_attention`.
    """
    y = rms_norm(layer["norm1"], x)
    y, new = grouped_attention(layer, y, cache, turn, heads=heads, groups=groups)
    x = x + y
    y = rms_norm(layer["norm2"], x)
    hidden = jax.nn.silu(dense(layer["gate"], y)) * dense(layer["up"], y)
    return x + dense(layer["down"], hidden), new


def llama(
    seed: int = 0,
    *,
    tokens: int = 64,
    past: int = 0,
    layers: int = 16,
    width: int = 768,
    heads: int = 12,
    groups: int = 4,
    hidden: int = 2048,
    vocabulary: int = 32000,
    batch: int = 1,
) -> Model:
    """Build Llama with random weights; `groups` is the number of key and value heads.

    Inputs are token ids int32 [batch, tokens] and, if `past` is not 0, the rotated keys and the
    values of the past positions [layers, 2, batch, groups, past, width / heads]. Outputs are the
    logits [batch, tokens, vocabulary] and the new keys and values [layers, 2, batch, groups,
    tokens, width / heads], which the caller appends to its cache.
    """
    check_heads("llama", width, heads)
    size = width // heads
    if groups < 1 or heads % groups:
        raise ValueError(f"llama: {groups} groups do not divide {heads} heads")
    if size % 2:
        raise ValueError(f"llama: the heads' size {size} is odd, and channels rotate in pairs")
    rng = np.random.default_rng(seed)
    weights = {
        "token": normal(rng, (vocabulary, width), std=1.0),
        "layers": [
            {
                "norm1": scales(rng, width),
                "query": linear(rng, width, width, bias=False),
                "key": linear(rng, width, groups * size, bias=False),
                "value": linear(rng, width, groups * size, bias=False),
                "output": linear(rng, width, width, bias=False),
                "norm2": scales(rng, width),
                "gate": linear(rng, width, hidden, bias=False),
                "up": linear(rng, width, hidden, bias=False),
                "down": linear(rng, hidden, width, bias=False),
            }
            for _ in range(layers)
        ],
        "norm": scales(rng, width),
        "head": linear(rng, width, vocabulary, bias=False),
    }

    def forward(
        weights: dict[str, Any], token_ids: jax.Array, cache: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return logits [B, T, V] and the new keys and values [L, 2, B, G, T, C]."""
        start = 0 if cache is None else cache.shape[4]
        turn = rotary(start, token_ids.shape[1], size)
        x, new = run_cached_layers(
            lambda layer, x, own: decoder_layer(layer, x, own, turn, heads=heads, groups=groups),
            weights["layers"],
            jnp.take(weights["token"], token_ids, axis=0),
            cache,
        )
        return dense(weights["head"], rms_norm(weights["norm"], x)), new

    cache = (layers, 2, batch, groups, past, size)
    return Model("llama", forward, weights, example_inputs(rng, vocabulary, (batch, tokens), cache))
