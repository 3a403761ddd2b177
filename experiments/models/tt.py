"""Transformer transducer (Zhang et al. 2020, arXiv:2002.02562), inference: scores of every label at
every audio frame and every position of the label history.

As in the paper, the residual of a layer starts from the normalised input, the audio has limited
left context, the labels have causal attention, and the joint network has tanh. The sizes follow
X-RLflow's benchmark: 12 audio layers (the paper has 18), 80 frames, and a joint network from 1024
features over 512. The joint network reads the concatenation of both encodings, as common
implementations do; the paper writes the same as the sum of two linear layers. Positions are
absolute sinusoids added to the inputs, while the paper's attention has relative ones.
"""

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

EPSILON = 1e-6


def sinusoids(length: int, width: int) -> np.ndarray:
    """Return the position encodings [length, width] of Vaswani et al. 2017 (arXiv:1706.03762)."""
    column = np.arange(width)
    angle = np.arange(length)[:, None] / 10000.0 ** (column // 2 * 2 / width)
    return np.where(column % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)


def context_mask(length: int, left: int) -> jax.Array:
    """Return an additive mask [length, length]; a position sees itself and `left` before it."""
    back = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    return jnp.where((back >= 0) & (back <= left), 0.0, MASKED)


def encoder_layer(layer: dict[str, Any], x: jax.Array, mask: jax.Array, *, heads: int) -> jax.Array:
    """Apply attention and feed-forward to x [B, T, D], each added to its normalised input."""
    x = layer_norm(layer["norm1"], x, epsilon=EPSILON)
    x = x + attention(layer, x, mask, heads=heads)
    x = layer_norm(layer["norm2"], x, epsilon=EPSILON)
    return x + dense(layer["down"], jax.nn.relu(dense(layer["up"], x)))


def joint(layer: dict[str, Any], audio: jax.Array, labels: jax.Array) -> jax.Array:
    """Return scores [B, T, U, L] of all pairs of an audio frame [B, T, D] and a label [B, U, D]."""
    shape = (*audio.shape[:2], labels.shape[1], audio.shape[2])
    audio = jnp.broadcast_to(audio[:, :, None, :], shape)
    labels = jnp.broadcast_to(labels[:, None, :, :], shape)
    hidden = jnp.tanh(dense(layer["inner"], jnp.concatenate([audio, labels], axis=-1)))
    return dense(layer["output"], hidden)


def tt(
    seed: int = 0,
    *,
    frames: int = 80,
    features: int = 512,
    tokens: int = 10,
    vocabulary: int = 64,
    audio_layers: int = 12,
    label_layers: int = 2,
    width: int = 512,
    hidden: int = 2048,
    heads: int = 8,
    left_context: int = 10,
    scan: bool = False,
) -> Model:
    """Build a transformer transducer with random weights.

    Inputs are audio features [1, frames, features] and the labels so far, int32 [1, tokens];
    the output is the scores [1, frames, tokens, vocabulary]. `left_context` is the number of
    frames before its own that a frame attends to in each layer. With `scan`, the weights of each
    encoder's layers are stacked and the layers run under `lax.scan`.
    """
    check_heads("tt", width, heads)
    if left_context < 0:
        raise ValueError(f"tt: left_context is {left_context}, use at least 0")
    rng = np.random.default_rng(seed)

    def encoder(layers: int) -> Any:
        stack = [
            {
                "norm1": norm(rng, width),
                **attention_weights(rng, width),
                "norm2": norm(rng, width),
                "up": linear(rng, width, hidden),
                "down": linear(rng, hidden, width),
            }
            for _ in range(layers)
        ]
        return stacked(stack) if scan else stack

    def encode(layers: Any, x: jax.Array, left: int) -> jax.Array:
        mask = context_mask(x.shape[1], left)
        x = x + sinusoids(*x.shape[1:])
        return run_layers(
            lambda layer, x: encoder_layer(layer, x, mask, heads=heads), layers, x, scan=scan
        )

    def forward(weights: dict[str, Any], audio: jax.Array, labels: jax.Array) -> jax.Array:
        """Return scores [B, T, U, L] of audio features [B, T, F] and labels [B, U]."""
        x = encode(weights["audio"], dense(weights["project"], audio), left_context)
        y = jnp.take(weights["embedding"], labels, axis=0)
        y = encode(weights["labels"], y, y.shape[1])
        return joint(weights["joint"], x, y)

    weights = {
        "project": linear(rng, features, width),
        "audio": encoder(audio_layers),
        "embedding": normal(rng, (vocabulary, width), std=1.0),
        "labels": encoder(label_layers),
        "joint": {
            "inner": linear(rng, 2 * width, width),
            "output": linear(rng, width, vocabulary),
        },
    }
    audio = normal(rng, (1, frames, features), std=1.0)
    labels = rng.integers(0, vocabulary, (1, tokens)).astype(np.int32)
    return Model("tt", forward, weights, (audio, labels))
