"""DALL-E mini's transformer (Dayma et al. 2021, a release without a paper) as in min-dalle,
Kuprel's port, inference: the text encoder and one step of the image decoder.

Taken from min-dalle: no biases except in the layer norms, layer norm before and after every
attention, feed-forward by a gated linear unit with exact GELU and a layer norm of its own, id 1 for
padding, a start token after the image vocabulary, whose score is cut off, and a decoder step that
writes its keys and values into a cache for all image positions and recomputes those of the text.
The second, empty text that min-dalle runs beside the first to strengthen it is left out.

Sized after X-RLflow's benchmark: 8 layers of width 768 with 12 heads and 2048 gated units, and 16
text tokens; min-dalle's "mini" has 12 layers of width 1024 with 16 heads and 2730 units, and 64
tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.models.base import Model, normal
from experiments.models.transformer import (
    MASKED,
    attend,
    attention,
    attention_weights,
    check_heads,
    dense,
    layer_norm,
    linear,
    norm,
    run_layers,
    split_heads,
    stacked,
)

EPSILON = 1e-5
PADDING = 1  # the text token that fills up the end


def normed(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Apply layer norm over the last axis."""
    return layer_norm(layer, x, epsilon=EPSILON)


def gated(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Apply layer norm, then a gated linear unit with layer norm of its hidden units: [B, T, D]."""
    x = normed(layer["norm1"], x)
    hidden = jax.nn.gelu(dense(layer["gate"], x), approximate=False) * dense(layer["up"], x)
    return dense(layer["down"], normed(layer["norm2"], hidden))


def encoder_layer(layer: dict[str, Any], x: jax.Array, mask: jax.Array, *, heads: int) -> jax.Array:
    """Apply attention and gated linear unit, each with residual, to x [B, T, D]."""
    own = layer["self"]
    y = attention(own["attention"], normed(own["before"], x), mask, heads=heads)
    x = x + normed(own["after"], y)
    return x + gated(layer["gated"], x)


def cached_attention(
    layer: dict[str, Any],
    x: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    *,
    heads: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Apply attention of the token x [B, 1, D] at `position` to itself and those before it.

    Returns:
      Its output [B, 1, D] and the caches [B, P, H, C] with its key and value written in.
    """
    zero = jnp.zeros_like(position)  # indices are of one type, under x64 as well
    start = (zero, position, zero, zero)
    keys = lax.dynamic_update_slice(keys, split_heads(dense(layer["key"], x), heads), start)
    values = lax.dynamic_update_slice(values, split_heads(dense(layer["value"], x), heads), start)
    mask = jnp.where(jnp.arange(keys.shape[1]) <= position, 0.0, MASKED)
    query = split_heads(dense(layer["query"], x), heads)
    return dense(layer["output"], attend(query, keys, values, mask)), keys, values


def decoder_layer(
    layer: dict[str, Any],
    x: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    text: jax.Array,
    mask: jax.Array,
    *,
    heads: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Apply attention to the image so far and to the text [B, S, D], and gated linear unit.

    Returns:
      The new x [B, 1, D] and the caches as from `cached_attention`.
    """
    own, other = layer["self"], layer["text"]
    y, keys, values = cached_attention(
        own["attention"], normed(own["before"], x), keys, values, position, heads=heads
    )
    x = x + normed(own["after"], y)
    y = attention(other["attention"], normed(other["before"], x), mask, heads=heads, source=text)
    x = x + normed(other["after"], y)
    return x + gated(layer["gated"], x), keys, values


def dalle(
    seed: int = 0,
    *,
    tokens: int = 16,
    positions: int = 256,
    layers: int = 8,
    width: int = 768,
    heads: int = 12,
    hidden: int = 2048,
    text_vocabulary: int = 50264,
    image_vocabulary: int = 16384,
    scan: bool = False,
) -> Model:
    """Build DALL-E mini's transformer with random weights, `layers` in encoder and decoder each.

    Inputs are the text int32 [1, tokens], the previous image token int32 [1], the position of this
    one int32 [], and the caches of keys and values [layers, 1, positions, heads, width / heads].
    Outputs are the scores [1, image_vocabulary] and the new caches. The example's position is the
    middle of the image, and the last quarter of its text is padding. With `scan`, the weights of
    the layers are stacked and the layers run under `lax.scan`.
    """
    check_heads("dalle", width, heads)
    rng = np.random.default_rng(seed)

    def layer(*attentions: str) -> dict[str, Any]:
        """Draw the weights of a layer with the named attentions."""
        weights: dict[str, Any] = {}
        for name in attentions:
            weights[name] = {
                "before": norm(rng, width),
                "attention": attention_weights(rng, width, bias=False),
                "after": norm(rng, width),
            }
        weights["gated"] = {
            "norm1": norm(rng, width),
            "gate": linear(rng, width, hidden, bias=False),
            "up": linear(rng, width, hidden, bias=False),
            "norm2": norm(rng, hidden),
            "down": linear(rng, hidden, width, bias=False),
        }
        return weights

    def part(vocabulary: int, length: int, *attentions: str) -> dict[str, Any]:
        """Draw the weights of the encoder or the decoder."""
        stack = [layer(*attentions) for _ in range(layers)]
        return {
            "token": normal(rng, (vocabulary, width), std=1.0),
            "position": normal(rng, (length, width), std=0.5),
            "norm1": norm(rng, width),
            "layers": stacked(stack) if scan else stack,
            "norm2": norm(rng, width),
        }

    def encode(weights: dict[str, Any], text: jax.Array, mask: jax.Array) -> jax.Array:
        x = jnp.take(weights["token"], text, axis=0) + weights["position"]
        x = run_layers(
            lambda layer, x: encoder_layer(layer, x, mask, heads=heads),
            weights["layers"],
            normed(weights["norm1"], x),
            scan=scan,
        )
        return normed(weights["norm2"], x)

    def forward(
        weights: dict[str, Any],
        text: jax.Array,
        previous: jax.Array,
        position: jax.Array,
        keys: jax.Array,
        values: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return scores [B, V] and the caches of keys and values [L, B, P, H, C]."""
        mask = jnp.where(text == PADDING, MASKED, 0.0)[:, None, None, :]
        encoded = encode(weights["encoder"], text, mask)
        decoder = weights["decoder"]
        x = jnp.take(decoder["token"], previous, axis=0)
        x = x + jnp.take(decoder["position"], position, axis=0)
        x = normed(decoder["norm1"], x)[:, None, :]

        def step(x: jax.Array, each: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            layer, own_keys, own_values = each
            x, own_keys, own_values = decoder_layer(
                layer, x, own_keys, own_values, position, encoded, mask, heads=heads
            )
            return x, (own_keys, own_values)

        if scan:
            x, (keys, values) = lax.scan(step, x, (decoder["layers"], keys, values))
        else:
            caches = []
            parts = (decoder["layers"], jnp.unstack(keys), jnp.unstack(values))
            for each in zip(*parts, strict=True):
                x, cache = step(x, each)
                caches.append(cache)
            keys, values = (jnp.stack(each) for each in zip(*caches, strict=True))
        scores = dense(weights["head"], normed(decoder["norm2"], x))
        return scores[:, -1, :image_vocabulary], keys, values

    weights = {
        "encoder": part(text_vocabulary, tokens, "self"),
        "decoder": part(image_vocabulary + 1, positions, "self", "text"),
        "head": linear(rng, width, image_vocabulary + 1, bias=False),
    }
    text = rng.integers(PADDING + 1, text_vocabulary, (1, tokens)).astype(np.int32)
    text[:, tokens - tokens // 4 :] = PADDING
    previous = rng.integers(0, image_vocabulary, 1).astype(np.int32)
    position = np.array(positions // 2, np.int32)
    caches = normal(rng, (2, layers, 1, positions, heads, width // heads), std=1.0)
    caches[:, :, :, positions // 2 :] = 0.0
    return Model("dalle", forward, weights, (text, previous, position, caches[0], caches[1]))
