"""GPT-2 small (Radford et al. 2019), inference: tokens to logits, with a cache of earlier keys and
values.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.base import Model, normal
from experiments.models.decoder import example_inputs, masked, run_cached_layers, with_past
from experiments.models.transformer import check_heads, dense, layer_norm, linear, norm

EPSILON = 1e-5


def causal_attention(
    layer: dict[str, Any], x: jax.Array, cache: jax.Array | None, *, heads: int
) -> tuple[jax.Array, jax.Array]:
    """Apply attention of x [B, T, D] to the past positions, to itself and to those before it.

    Returns:
      Its output [B, T, D], and the new keys and values [2, B, H, T, C].
    """
    batch, tokens, width = x.shape
    query, key, value = (
        part.reshape(batch, tokens, heads, width // heads).transpose(0, 2, 1, 3)
        for part in jnp.split(dense(layer["attn"], x), 3, axis=-1)
    )
    keys, values = with_past(key, value, cache)
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, keys) / math.sqrt(width // heads)
    context = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(masked(scores), axis=-1), values)
    context = context.transpose(0, 2, 1, 3).reshape(batch, tokens, width)
    return dense(layer["output"], context), jnp.stack([key, value])


def decoder_layer(
    layer: dict[str, Any], x: jax.Array, cache: jax.Array | None, *, heads: int
) -> tuple[jax.Array, jax.Array]:
    """Apply attention and feed-forward, each after layer norm and with residual, to x [B, T, D].

    Returns:
      The new x, and the new keys and values as from `causal_attention`.
    """
    y = layer_norm(layer["norm1"], x, epsilon=EPSILON)
    y, new = causal_attention(layer, y, cache, heads=heads)
    x = x + y
    hidden = dense(layer["up"], layer_norm(layer["norm2"], x, epsilon=EPSILON))
    return x + dense(layer["down"], jax.nn.gelu(hidden, approximate=True)), new


def gpt2(
    seed: int = 0,
    *,
    tokens: int = 128,
    past: int = 0,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50257,
    batch: int = 1,
) -> Model:
    """Build GPT-2 with random weights and as many positions as `past` and `tokens` together.

    Inputs are token ids int32 [batch, tokens] and, if `past` is not 0, the keys and values of the
    past positions [layers, 2, batch, heads, past, width / heads]. Outputs are the logits [batch,
    tokens, vocabulary] and the new keys and values [layers, 2, batch, heads, tokens, width /
    heads], which the caller appends to its cache. The feed-forward width is four times `width`.
    """
    check_heads("gpt2", width, heads)
    rng = np.random.default_rng(seed)
    weights = {
        # Small, because its transpose gives the logits.
        "token": normal(rng, (vocabulary, width), std=0.1),
        "position": normal(rng, (past + tokens, width), std=0.05),
        "layers": [
            {
                "norm1": norm(rng, width),
                "attn": linear(rng, width, 3 * width),
                "output": linear(rng, width, width),
                "norm2": norm(rng, width),
                "up": linear(rng, width, 4 * width),
                "down": linear(rng, 4 * width, width),
            }
            for _ in range(layers)
        ],
        "norm": norm(rng, width),
    }

    def forward(
        weights: dict[str, Any], token_ids: jax.Array, cache: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return logits [B, T, V] and the new keys and values [L, 2, B, H, T, C]."""
        start = 0 if cache is None else cache.shape[4]
        x = jnp.take(weights["token"], token_ids, axis=0)
        x = x + weights["position"][start : start + token_ids.shape[1]]
        x, new = run_cached_layers(
            lambda layer, x, own: decoder_layer(layer, x, own, heads=heads),
            weights["layers"],
            x,
            cache,
        )
        return layer_norm(weights["norm"], x, epsilon=EPSILON) @ weights["token"].T, new

    cache = (layers, 2, batch, heads, past, width // heads)
    return Model("gpt2", forward, weights, example_inputs(rng, vocabulary, (batch, tokens), cache))
