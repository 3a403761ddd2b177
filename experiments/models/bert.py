"""BERT-base (Devlin et al. 2019, arXiv:1810.04805), inference: embeddings, layers, pooler."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.models.base import Model, normal

EPSILON = 1e-12
MASKED = -1e9  # added to the scores of masked positions


def dense(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """x @ kernel + bias over the last axis."""
    return x @ layer["kernel"] + layer["bias"]


def layer_norm(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Layer norm over the last axis."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + EPSILON) * layer["scale"] + layer["bias"]


def attention(layer: dict[str, Any], x: jax.Array, mask: jax.Array, *, heads: int) -> jax.Array:
    """Self-attention of x [B, T, D] with an additive mask [B, 1, 1, T]."""
    batch, tokens, width = x.shape
    split = (batch, tokens, heads, width // heads)
    query = dense(layer["query"], x).reshape(split)
    key = dense(layer["key"], x).reshape(split)
    value = dense(layer["value"], x).reshape(split)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.float32(np.sqrt(width // heads))
    weights = jax.nn.softmax(scores + mask, axis=-1)
    context = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, tokens, width)
    return dense(layer["output"], context)


def encoder_layer(layer: dict[str, Any], x: jax.Array, mask: jax.Array, *, heads: int) -> jax.Array:
    """Attention and feed-forward, each with residual and layer norm after it; x is [B, T, D]."""
    x = layer_norm(layer["norm1"], x + attention(layer, x, mask, heads=heads))
    hidden = jax.nn.gelu(dense(layer["up"], x), approximate=False)
    return layer_norm(layer["norm2"], x + dense(layer["down"], hidden))


def bert(
    seed: int = 0,
    *,
    tokens: int = 128,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 30522,
    batch: int = 1,
    scan: bool = False,
) -> Model:
    """BERT with random weights; the feed-forward width is four times `width`.

    Inputs are token ids, token types and the attention mask (1 keeps a position), all int32
    [batch, tokens]; the last eighth of the example's positions is padding. Outputs are the hidden
    states [batch, tokens, width] and the pooled first token [batch, width]. With `scan`, the
    weights of the layers are stacked and the layers run under `lax.scan`.
    """
    if width % heads:
        raise ValueError(f"bert: {heads} heads do not divide width {width}")
    rng = np.random.default_rng(seed)

    def linear(fan_in: int, fan_out: int) -> dict[str, np.ndarray]:
        return {
            "kernel": normal(rng, (fan_in, fan_out), std=fan_in**-0.5),
            "bias": normal(rng, (fan_out,), std=0.05),
        }

    def norm() -> dict[str, np.ndarray]:
        return {
            "scale": rng.uniform(0.8, 1.2, width).astype(np.float32),
            "bias": normal(rng, (width,), std=0.05),
        }

    embeddings = {
        "token": normal(rng, (vocabulary, width), std=1.0),
        "position": normal(rng, (tokens, width), std=0.5),
        "type": normal(rng, (2, width), std=0.5),
        "norm": norm(),
    }
    stack: Any = [
        {
            "query": linear(width, width),
            "key": linear(width, width),
            "value": linear(width, width),
            "output": linear(width, width),
            "norm1": norm(),
            "up": linear(width, 4 * width),
            "down": linear(4 * width, width),
            "norm2": norm(),
        }
        for _ in range(layers)
    ]
    if scan:
        stack = jax.tree.map(lambda *leaves: np.stack(leaves), *stack)
    pooler = linear(width, width)

    def forward(
        weights: dict[str, Any],
        token_ids: jax.Array,
        token_types: jax.Array,
        attention_mask: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Hidden states [B, T, D] and pooled output [B, D]."""
        table = weights["embeddings"]
        x = (
            jnp.take(table["token"], token_ids, axis=0)
            + table["position"][None, : token_ids.shape[1]]
        )
        x = layer_norm(table["norm"], x + jnp.take(table["type"], token_types, axis=0))
        mask = (1.0 - attention_mask.astype(x.dtype))[:, None, None, :] * MASKED
        if scan:
            x, _ = lax.scan(
                lambda x, layer: (encoder_layer(layer, x, mask, heads=heads), None),
                x,
                weights["layers"],
            )
        else:
            for layer in weights["layers"]:
                x = encoder_layer(layer, x, mask, heads=heads)
        return x, jnp.tanh(dense(weights["pooler"], x[:, 0]))

    token_ids = rng.integers(0, vocabulary, (batch, tokens)).astype(np.int32)
    token_types = np.broadcast_to(np.arange(tokens) >= tokens // 2, (batch, tokens)).astype(
        np.int32
    )
    attention_mask = np.broadcast_to(
        np.arange(tokens) < tokens - tokens // 8, (batch, tokens)
    ).astype(np.int32)
    weights = {"embeddings": embeddings, "layers": stack, "pooler": pooler}
    return Model("bert", forward, weights, (token_ids, token_types, attention_mask))
