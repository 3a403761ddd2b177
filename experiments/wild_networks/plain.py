"""Four of these networks as plain functions of their packages' own weights: another spelling of the
same function, which should gain as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.wild_networks import keras_applications, transformers_flax


def gpt2(weights: Any, tokens: jax.Array) -> jax.Array:
    """Return the last hidden states [B, T, D] of tokens [B, T]."""
    n = tokens.shape[1]
    x = weights["wte"]["embedding"][tokens] + weights["wpe"]["embedding"][:n]
    ahead = jnp.where(jnp.tril(jnp.ones((n, n), bool)), 0.0, -1e9)
    for i in range(len(weights["h"])):
        layer = weights["h"][str(i)]
        mixed, y = layer["attn"], _norm(layer["ln_1"], x, 1e-5)
        q, k, v = jnp.split(_transposed(mixed["c_attn"], y), 3, axis=-1)
        x = x + _transposed(mixed["c_proj"], _attention(q, k, v, heads=12, addend=ahead))
        y = _transposed(layer["mlp"]["c_fc"], _norm(layer["ln_2"], x, 1e-5))
        x = x + _transposed(layer["mlp"]["c_proj"], jax.nn.gelu(y, approximate=True))
    return _norm(weights["ln_f"], x, 1e-5)


def bert(weights: Any, tokens: jax.Array) -> jax.Array:
    """Return the last hidden states [B, T, D] of tokens [B, T], all of one type and none masked."""
    table = weights["embeddings"]
    x = table["word_embeddings"]["embedding"][tokens]
    x = x + table["position_embeddings"]["embedding"][: tokens.shape[1]]
    x = x + table["token_type_embeddings"]["embedding"][0]
    x = _norm(table["LayerNorm"], x, 1e-12)
    layers = weights["encoder"]["layer"]
    for i in range(len(layers)):
        layer, heads = layers[str(i)], layers[str(i)]["attention"]
        q, k, v = (_dense(heads["self"][name], x) for name in ("query", "key", "value"))
        y = _dense(heads["output"]["dense"], _attention(q, k, v, heads=12))
        x = _norm(heads["output"]["LayerNorm"], x + y, 1e-12)
        y = jax.nn.gelu(_dense(layer["intermediate"]["dense"], x), approximate=False)
        x = _norm(layer["output"]["LayerNorm"], x + _dense(layer["output"]["dense"], y), 1e-12)
    return x


def vit(weights: Any, image: jax.Array) -> jax.Array:
    """Return the last hidden states [B, 197, D] of images [B, 3, 224, 224]."""
    embed = weights["embeddings"]
    patches = _conv(embed["patch_embeddings"]["projection"], image.transpose(0, 2, 3, 1), 16)
    x = patches.reshape(image.shape[0], -1, patches.shape[-1])
    first = jnp.broadcast_to(embed["cls_token"], (image.shape[0], 1, x.shape[-1]))
    x = jnp.concatenate([first, x], axis=1) + embed["position_embeddings"]
    layers = weights["encoder"]["layer"]
    for i in range(len(layers)):
        layer, heads = layers[str(i)], layers[str(i)]["attention"]
        y = _norm(layer["layernorm_before"], x, 1e-12)
        q, k, v = (_dense(heads["attention"][name], y) for name in ("query", "key", "value"))
        x = x + _dense(heads["output"]["dense"], _attention(q, k, v, heads=12))
        y = _dense(layer["intermediate"]["dense"], _norm(layer["layernorm_after"], x, 1e-12))
        x = x + _dense(layer["output"]["dense"], jax.nn.gelu(y, approximate=False))
    return _norm(weights["layernorm"], x, 1e-12)


def convnext_tiny(weights: Any, image: jax.Array) -> jax.Array:
    """Return class probabilities [B, 1000] of images [B, 224, 224, 3] with values 0 to 255."""
    left = iter(weights[0])

    def layer(one: str, other: str) -> dict[str, jax.Array]:
        return {one: next(left), other: next(left)}

    mean, spread = jnp.array([0.485, 0.456, 0.406]), jnp.array([0.229, 0.224, 0.225])
    x = _conv(layer("kernel", "bias"), (image / 255 - mean) / spread, 4)
    x = _norm(layer("scale", "bias"), x, 1e-6)
    for stage, blocks in enumerate((3, 3, 9, 3)):
        if stage:
            x = _norm(layer("scale", "bias"), x, 1e-6)
            x = _conv(layer("kernel", "bias"), x, 2)
        for _ in range(blocks):
            y = _conv(layer("kernel", "bias"), x, 1)
            y = _norm(layer("scale", "bias"), y, 1e-6)
            y = jax.nn.gelu(_dense(layer("kernel", "bias"), y), approximate=False)
            y = _dense(layer("kernel", "bias"), y)
            x = x + y * next(left)
    x = _norm(layer("scale", "bias"), x.mean((1, 2)), 1e-6)
    return jax.nn.softmax(_dense(layer("kernel", "bias"), x))


def _norm(weights: Mapping[str, Any], x: jax.Array, epsilon: float) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + epsilon) * weights["scale"] + weights["bias"]


def _dense(weights: Mapping[str, Any], x: jax.Array) -> jax.Array:
    return x @ weights["kernel"] + weights["bias"]


def _transposed(weights: Mapping[str, Any], x: jax.Array) -> jax.Array:
    """Apply a dense layer whose kernel is [features, inputs]."""
    return x @ weights["kernel"].T + weights["bias"]


def _conv(weights: Mapping[str, Any], x: jax.Array, stride: int) -> jax.Array:
    """Convolve images with features last; depthwise if the kernel has one input feature."""
    kernel = weights["kernel"]
    y = lax.conv_general_dilated(
        *(x, kernel, (stride, stride), "SAME"),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1] // kernel.shape[2],
    )
    return y + weights["bias"]


def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, heads: int, addend: jax.Array | float = 0.0
) -> jax.Array:
    """Return attention [B, T, D], with concatenated heads; `addend` is added to the scores."""
    b, t, d = q.shape
    q, k, v = (x.reshape(b, t, heads, d // heads) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(d / heads) + addend
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(b, t, d)


def _with_weights(plain: Callable[..., Any], make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that makes an example of `plain` with the package's weights and inputs."""

    def example() -> Any:
        _, args, weights = make()
        return plain, args, weights

    return example


# Functions that make the plain networks, by the name of the package's network.
TWINS: Mapping[str, Callable[[], Any]] = {
    "gpt2": _with_weights(gpt2, transformers_flax.gpt2),
    "bert": _with_weights(bert, transformers_flax.bert),
    "vit": _with_weights(vit, transformers_flax.vit),
    "convnext_tiny": _with_weights(convnext_tiny, keras_applications.convnext_tiny),
}
