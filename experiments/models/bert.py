"""BERT-base (Devlin et al. 2019, arXiv:1810.04805), inference: embeddings, layers, pooler."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.base import Model, normal
from experiments.models.transformer import (
    MASKED,
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

EPSILON = 1e-12


def encoder_layer(layer: dict[str, Any], x: jax.Array, mask: jax.Array, *, heads: int) -> jax.Array:
    """Apply attention and feed-forward to x [B, T, D], each followed by residual and layer norm."""
    x = x + attention(layer, x, mask, heads=heads)
    x = layer_norm(layer["norm1"], x, epsilon=EPSILON)
    hidden = jax.nn.gelu(dense(layer["up"], x), approximate=False)
    return layer_norm(layer["norm2"], x + dense(layer["down"], hidden), epsilon=EPSILON)


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
    """Build BERT with random weights; the feed-forward width is four times `width`.

    Inputs are token ids, token types and the attention mask (1 keeps a position), all int32
    [batch, tokens]; the last eighth of the example's positions is padding. Outputs are the hidden
    states [batch, tokens, width] and the pooled first token [batch, width]. With `scan`, the
    weights of the layers are stacked and the layers run under `lax.scan`.
    """
    check_heads("bert", width, heads)
    rng = np.random.default_rng(seed)
    embeddings = {
        "token": normal(rng, (vocabulary, width), std=1.0),
        "position": normal(rng, (tokens, width), std=0.5),
        "type": normal(rng, (2, width), std=0.5),
        "norm": norm(rng, width),
    }
    stack: Any = [
        {
            **attention_weights(rng, width),
            "norm1": norm(rng, width),
            "up": linear(rng, width, 4 * width),
            "down": linear(rng, 4 * width, width),
            "norm2": norm(rng, width),
        }
        for _ in range(layers)
    ]
    if scan:
        stack = stacked(stack)
    pooler = linear(rng, width, width)

    def forward(
        weights: dict[str, Any],
        token_ids: jax.Array,
        token_types: jax.Array,
        attention_mask: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Return hidden states [B, T, D] and pooled output [B, D]."""
        table = weights["embeddings"]
        x = (
            jnp.take(table["token"], token_ids, axis=0)
            + table["position"][None, : token_ids.shape[1]]
        )
        x = x + jnp.take(table["type"], token_types, axis=0)
        x = layer_norm(table["norm"], x, epsilon=EPSILON)
        mask = (1.0 - attention_mask.astype(x.dtype))[:, None, None, :] * MASKED
        x = run_layers(
            lambda layer, x: encoder_layer(layer, x, mask, heads=heads),
            weights["layers"],
            x,
            scan=scan,
        )
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
