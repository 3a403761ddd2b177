"""The transformer graphs of published superoptimisers, as incomplete as in those evaluations.

`bert_taso` is the graph of TASO's `examples/bert.py` (Jia et al. 2019, SOSP); `vit_taso`,
`dalle_taso` and `tt_taso` are those of X-RLflow (He et al. 2023, arXiv:2304.14698). None of them
computes what its name says: there is no softmax and no layer norm, the keys of the first two are
not transposed, and the attention of the first is dead code. Speed-ups on them are for comparison
with published figures only. The networks they are named after are `bert`, `vit`, `dalle` and `tt`.

Without softmax and layer norm the values of a layer grow with the cube of those before it, so the
residual branches have small weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.base import Model, normal
from experiments.models.transformer import check_heads, run_layers, stacked

# Gains of the last kernels of the residual branches.
ATTENTION_GAIN = 0.05
FEED_FORWARD_GAIN = 0.2
Layer = dict[str, Any]  # kernels by name


def attention(layer: Layer, x: jax.Array, *, heads: int, transposed: bool) -> jax.Array:
    """Apply attention of x [T, D] to itself without softmax and without the output layer.

    Unless the keys are `transposed`, the product with them needs T == D / heads. The layer's
    "mask" [heads, T, T], if it has one, is added to the scores.
    """
    tokens, width = x.shape
    split = (tokens, heads, width // heads)
    query = (x @ layer["query"]).reshape(split).transpose(1, 0, 2)
    key = (x @ layer["key"]).reshape(split).transpose((1, 2, 0) if transposed else (1, 0, 2))
    value = (x @ layer["value"]).reshape(split).transpose(1, 0, 2)
    scores = query @ key
    if "mask" in layer:
        scores = scores + layer["mask"]
    return (scores @ value).transpose(1, 0, 2).reshape(tokens, width)


def attended(layer: Layer, x: jax.Array, *, heads: int, transposed: bool) -> jax.Array:
    """Return x [T, D] plus its attention through the output layer."""
    return x + attention(layer, x, heads=heads, transposed=transposed) @ layer["output"]


def bert_layer(layer: Layer, x: jax.Array, *, heads: int) -> jax.Array:
    """Apply the output layer to the input [T, D]; the attention is computed, but not used."""
    attention(layer, x, heads=heads, transposed=False)
    return x @ layer["output"]


def vit_layer(layer: Layer, x: jax.Array, *, heads: int) -> jax.Array:
    """Apply attention and two dense layers without activation, each with residual, to x [T, D]."""
    x = attended(layer, x, heads=heads, transposed=False)
    return x + x @ layer["up"] @ layer["down"]


def dalle_layer(layer: Layer, x: jax.Array, *, heads: int) -> jax.Array:
    """Apply attention with mask and gated linear unit, each with residual, to x [T, D]."""
    x = attended(layer, x, heads=heads, transposed=True)
    return x + (jax.nn.relu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def tt_layer(layer: Layer, x: jax.Array, *, heads: int) -> jax.Array:
    """Apply attention and feed-forward with relu, each with residual, to x [T, D]."""
    x = attended(layer, x, heads=heads, transposed=True)
    return x + jax.nn.relu(x @ layer["up"]) @ layer["down"]


def kernel(rng: np.random.Generator, rows: int, columns: int, *, gain: float = 1.0) -> np.ndarray:
    """Draw weights [rows, columns] that multiply the standard deviation by `gain`."""
    return normal(rng, (rows, columns), std=gain * rows**-0.5)


def attention_weights(rng: np.random.Generator, tokens: int, width: int, heads: int) -> Layer:
    """Draw weights of an attention whose sums over keys and tokens keep the standard deviation."""
    scores = (tokens * width // heads) ** -0.25
    return {
        "query": kernel(rng, width, width, gain=scores),
        "key": kernel(rng, width, width, gain=scores),
        "value": kernel(rng, width, width),
        "output": kernel(rng, width, width, gain=ATTENTION_GAIN),
    }


def check_square(name: str, tokens: int, width: int, heads: int) -> None:
    """Raise ValueError unless the product with untransposed keys has matching sizes."""
    check_heads(name, width, heads)
    if width // heads != tokens:
        raise ValueError(
            f"{name}: keys are not transposed, so tokens ({tokens}) must be width / heads "
            f"({width // heads})"
        )


def bert_taso(
    seed: int = 0,
    *,
    tokens: int = 64,
    layers: int = 8,
    width: int = 1024,
    heads: int = 16,
    scan: bool = False,
) -> Model:
    """Build TASO's BERT with random weights: [tokens, width] to [tokens, width].

    `tokens` is `width / heads`. With `scan`, here and below, the weights of equal layers are
    stacked and the layers run under `lax.scan`.
    """
    check_square("bert_taso", tokens, width, heads)
    rng = np.random.default_rng(seed)
    stack: Any = [
        {**attention_weights(rng, tokens, width, heads), "output": kernel(rng, width, width)}
        for _ in range(layers)
    ]

    def forward(weights: dict[str, Any], x: jax.Array) -> jax.Array:
        return run_layers(partial(bert_layer, heads=heads), weights["layers"], x, scan=scan)

    weights = {"layers": stacked(stack) if scan else stack}
    return Model("bert_taso", forward, weights, (normal(rng, (tokens, width), std=1.0),))


def vit_taso(
    seed: int = 0,
    *,
    tokens: int = 64,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    hidden: int = 3072,
    scan: bool = False,
) -> Model:
    """Build X-RLflow's ViT with random weights: [tokens, width] to [tokens, width].

    `tokens` is `width / heads`.
    """
    check_square("vit_taso", tokens, width, heads)
    rng = np.random.default_rng(seed)
    stack: Any = [
        {
            **attention_weights(rng, tokens, width, heads),
            "up": kernel(rng, width, hidden),
            "down": kernel(rng, hidden, width, gain=FEED_FORWARD_GAIN),
        }
        for _ in range(layers)
    ]

    def forward(weights: dict[str, Any], x: jax.Array) -> jax.Array:
        step = partial(vit_layer, heads=heads)
        return run_layers(step, weights["layers"], jax.nn.relu(x), scan=scan)

    weights = {"layers": stacked(stack) if scan else stack}
    return Model("vit_taso", forward, weights, (normal(rng, (tokens, width), std=1.0),))


def dalle_taso(
    seed: int = 0,
    *,
    tokens: int = 16,
    layers: int = 8,
    width: int = 768,
    heads: int = 12,
    hidden: int = 2048,
    scan: bool = False,
) -> Model:
    """Build X-RLflow's DALL-E with random weights: [tokens, width] to [tokens, width].

    The masks are among the weights.
    """
    check_heads("dalle_taso", width, heads)
    rng = np.random.default_rng(seed)
    stack: Any = [
        {
            **attention_weights(rng, tokens, width, heads),
            "mask": normal(rng, (heads, tokens, tokens), std=tokens**-0.5),
            "gate": kernel(rng, width, hidden),
            "up": kernel(rng, width, hidden),
            "down": kernel(rng, hidden, width, gain=FEED_FORWARD_GAIN),
        }
        for _ in range(layers)
    ]

    def forward(weights: dict[str, Any], x: jax.Array) -> jax.Array:
        step = partial(dalle_layer, heads=heads)
        return run_layers(step, weights["layers"], jax.nn.relu(x), scan=scan)

    weights = {"layers": stacked(stack) if scan else stack}
    return Model("dalle_taso", forward, weights, (normal(rng, (tokens, width), std=1.0),))


def tt_taso(
    seed: int = 0,
    *,
    frames: int = 80,
    narrow: int = 16,
    labels: int = 10,
    audio_layers: int = 12,
    label_layers: int = 2,
    width: int = 512,
    heads: int = 8,
    hidden: int = 2048,
    scan: bool = False,
) -> Model:
    """Build X-RLflow's transformer transducer: [frames, width] to [frames, labels].

    Its weights are random. Both encoders read the same input, the audio encoder after a projection
    to `narrow` features and back; frame t is joined with position t of the labels.
    """
    check_heads("tt_taso", width, heads)
    rng = np.random.default_rng(seed)

    def encoder(layers: int) -> Any:
        stack = [
            {
                **attention_weights(rng, frames, width, heads),
                "up": kernel(rng, width, hidden),
                "down": kernel(rng, hidden, width, gain=FEED_FORWARD_GAIN),
            }
            for _ in range(layers)
        ]
        return stacked(stack) if scan else stack

    def forward(weights: dict[str, Any], x: jax.Array) -> jax.Array:
        step = partial(tt_layer, heads=heads)
        audio = x @ weights["narrow"] @ weights["widen"]
        audio = run_layers(step, weights["audio"], audio, scan=scan)
        label = run_layers(step, weights["labels"], x, scan=scan)
        joined = jnp.concatenate([audio, label], axis=1)
        return jax.nn.relu(joined @ weights["inner"]) @ weights["output"]

    weights = {
        "narrow": kernel(rng, width, narrow),
        "widen": kernel(rng, narrow, width),
        "audio": encoder(audio_layers),
        "labels": encoder(label_layers),
        "inner": kernel(rng, 2 * width, width),
        "output": kernel(rng, width, labels),
    }
    return Model("tt_taso", forward, weights, (normal(rng, (frames, width), std=1.0),))
