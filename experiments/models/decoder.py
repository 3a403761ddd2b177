"""Common parts of the decoders: the causal mask, and the cache of earlier keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.base import normal


def masked(scores: jax.Array) -> jax.Array:
    """Set the scores [..., Q, K] of the keys after each query to the dtype's lowest number.

    The queries are at the last Q of the K positions.
    """
    queries, keys = scores.shape[-2:]
    seen = jnp.tri(queries, keys, keys - queries, dtype=bool)
    return jnp.where(seen, scores, jnp.finfo(scores.dtype).min)


def with_past(
    key: jax.Array, value: jax.Array, cache: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Put the cache [2, B, H, P, C] of a layer before its keys and values [B, H, T, C]."""
    if cache is None:
        return key, value
    past_key, past_value = jnp.unstack(cache)
    return (
        jnp.concatenate([past_key, key], axis=2),
        jnp.concatenate([past_value, value], axis=2),
    )


def run_cached_layers(
    step: Callable[[Any, jax.Array, jax.Array | None], tuple[jax.Array, jax.Array]],
    layers: list[Any],
    x: jax.Array,
    cache: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Run `step(layer, x, cache of the layer)` for every layer.

    Returns:
      The last x, and the new keys and values of all layers [L, 2, B, H, T, C].
    """
    caches = [None] * len(layers) if cache is None else jnp.unstack(cache)
    new = []
    for layer, own in zip(layers, caches, strict=True):
        x, keys_and_values = step(layer, x, own)
        new.append(keys_and_values)
    return x, jnp.stack(new)


def example_inputs(
    rng: np.random.Generator, vocabulary: int, tokens: tuple[int, int], cache: tuple[int, ...]
) -> tuple[np.ndarray, ...]:
    """Draw token ids of shape `tokens`, and a cache [L, 2, B, H, P, C] unless P is 0."""
    token_ids = rng.integers(0, vocabulary, tokens).astype(np.int32)
    return (token_ids, normal(rng, cache, std=1.0)) if cache[4] else (token_ids,)
