"""Common parts of the transformers: dense layers, layer norm, attention, stacks of equal layers,
and the initialisation of their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.models.base import normal

MASKED = -1e9  # added to the scores of masked positions


def check_heads(name: str, width: int, heads: int) -> None:
    """Raise ValueError unless the width of network `name` splits into equal heads."""
    if heads < 1 or width % heads:
        raise ValueError(f"{name}: {heads} heads do not divide width {width}")


def linear(
    rng: np.random.Generator, fan_in: int, fan_out: int, *, bias: bool = True
) -> dict[str, np.ndarray]:
    """Draw the weights of a dense layer that keeps the variance."""
    layer = {"kernel": normal(rng, (fan_in, fan_out), std=fan_in**-0.5)}
    if bias:
        layer["bias"] = normal(rng, (fan_out,), std=0.05)
    return layer


def norm(rng: np.random.Generator, width: int) -> dict[str, np.ndarray]:
    """Draw the weights of a layer norm over `width` channels."""
    return {
        "scale": rng.uniform(0.8, 1.2, width).astype(np.float32),
        "bias": normal(rng, (width,), std=0.05),
    }


def attention_weights(
    rng: np.random.Generator, width: int, *, bias: bool = True
) -> dict[str, dict[str, np.ndarray]]:
    """Draw the weights of an attention: four dense layers from `width` to `width`."""
    return {
        name: linear(rng, width, width, bias=bias) for name in ("query", "key", "value", "output")
    }


def dense(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Return x @ kernel over the last axis, plus the bias if the layer has one."""
    y = x @ layer["kernel"]
    return y + layer["bias"] if "bias" in layer else y


def layer_norm(layer: dict[str, Any], x: jax.Array, *, epsilon: float) -> jax.Array:
    """Apply layer norm over the last axis."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + epsilon) * layer["scale"] + layer["bias"]


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """Split the last axis into heads: [B, T, D] -> [B, T, H, D / H]."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """Apply softmax attention of queries [B, Q, H, C] to keys and values [B, K, H, C].

    The additive mask broadcasts against the scores [B, H, Q, K]; the result is [B, Q, H * C].
    """
    batch, queries, heads, size = query.shape
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(size)
    if mask is not None:
        scores = scores + mask
    weights = jax.nn.softmax(scores, axis=-1)
    context = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return context.reshape(batch, queries, heads * size)


def attention(
    layer: dict[str, Any],
    x: jax.Array,
    mask: jax.Array | None = None,
    *,
    heads: int,
    source: jax.Array | None = None,
) -> jax.Array:
    """Apply attention of x [B, T, D] to itself, or to `source` [B, S, D]; `mask` as in `attend`."""
    source = x if source is None else source
    query = split_heads(dense(layer["query"], x), heads)
    key = split_heads(dense(layer["key"], source), heads)
    value = split_heads(dense(layer["value"], source), heads)
    return dense(layer["output"], attend(query, key, value, mask))


def stacked(layers: list[Any]) -> Any:
    """Stack the weights of equal layers along a new first axis, for `lax.scan`."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


def run_layers(
    step: Callable[[Any, jax.Array], jax.Array], layers: Any, x: jax.Array, *, scan: bool
) -> jax.Array:
    """Return x after `step(layer, x)` for every layer; with `scan`, `layers` are stacked."""
    if scan:
        return lax.scan(lambda x, layer: (step(layer, x), None), x, layers)[0]
    for layer in layers:
        x = step(layer, x)
    return x
