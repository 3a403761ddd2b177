"""Attention and rotary embedding of ONNX (from opset 23)."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.activation import softmax_along
from xrl_jax.frontends.onnx_ops.base import (
    Array,
    Node,
    OnnxError,
    Translation,
    Value,
    device,
    like,
    on_device,
    select,
)


def split_heads(x: Array, heads: int) -> Array:
    """Reshape [B, S, H * D] to [B, H, S, D]."""
    batch, length, width = x.shape
    return lax.transpose(jnp.reshape(x, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def merge_heads(x: Array) -> Array:
    """Reshape [B, H, S, D] to [B, S, H * D]."""
    batch, heads, length, width = x.shape
    return jnp.reshape(lax.transpose(x, (0, 2, 1, 3)), (batch, length, heads * width))


def repeat_heads(x: Array, times: int) -> Array:
    """Repeat each key or value head for `times` consecutive query heads."""
    if times == 1:
        return x
    batch, heads, length, width = x.shape
    x = lax.broadcast_in_dim(x, (batch, heads, times, length, width), (0, 1, 3, 4))
    return jnp.reshape(x, (batch, heads * times, length, width))


def allowed_keys(
    node: Node, queries: int, keys: int, offset: np.ndarray | Array
) -> np.ndarray | Array | None:
    """Return which keys each query may attend to by position, or None if it may to all.

    The result is [Q, K] or [B, 1, Q, K]. `offset`, a scalar or [B, 1, 1, 1], is the number of keys
    before the first query.
    """
    left, right = node.get("left_window_size", -1), node.get("right_window_size", -1)
    causal = node.get("is_causal", 0)
    if not causal and left < 0 and right < 0:
        return None
    query = np.arange(queries, dtype=np.int32)[:, None] + offset
    distance = query - np.arange(keys, dtype=np.int32)
    allowed: np.ndarray | Array = np.ones(distance.shape, np.bool_)
    if causal:
        allowed = distance >= 0
    if left >= 0:
        allowed = allowed & (distance <= left)
    if right >= 0:
        allowed = allowed & (distance >= -right)
    return allowed


def attention_bias(
    node: Node, q: Array, keys: int, mask: Array | None, past: int, lengths: Array | None
) -> Array | None:
    """Return the bias of the scores: the mask, and -inf for keys not allowed; None if no bias."""
    queries, dtype = q.shape[2], q.dtype
    offset: np.ndarray | Array = np.asarray(past, np.int32)
    allowed: list[np.ndarray | Array] = []
    if lengths is not None:
        count = jnp.reshape(lax.convert_element_type(lengths, np.int32), (-1, 1, 1, 1))
        offset = count - np.int32(queries)
        allowed.append(np.arange(keys, dtype=np.int32) < count)
    visible = allowed_keys(node, queries, keys, offset)
    if visible is not None:
        allowed.append(visible)
    bias = None
    if mask is not None:
        short = keys - mask.shape[-1]
        if short > 0:
            fill = np.False_ if mask.dtype == np.bool_ else like(mask, -np.inf)
            mask = lax.pad(mask, fill, [(0, 0, 0)] * (mask.ndim - 1) + [(0, short, 0)])
        if mask.dtype == np.bool_:
            allowed.append(mask)
        else:
            bias = lax.convert_element_type(mask, dtype)
    if not allowed:
        return bias
    permitted = allowed[0]
    for one in allowed[1:]:
        permitted = permitted & one
    none, start = np.asarray(-np.inf, dtype), np.asarray(0, dtype)
    return select(permitted, start if bias is None else bias, none)


def attention(
    node: Node,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    lengths: Array | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Return softmax(scale * Q K' + bias) V, the keys, the values and the scores."""
    flat = q.ndim == 3
    if flat:
        heads, kv_heads = node.get("q_num_heads", None), node.get("kv_num_heads", None)
        if not heads or not kv_heads:
            raise OnnxError("q_num_heads and kv_num_heads are required for inputs of rank 3")
        q, k, v = split_heads(q, heads), split_heads(k, kv_heads), split_heads(v, kv_heads)
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        k = lax.concatenate([past_key, k], 2)
        v = lax.concatenate([past_value, v], 2)
    present = (k, v)
    times = q.shape[1] // k.shape[1]
    k, v = repeat_heads(k, times), repeat_heads(v, times)

    root = math.sqrt(node.get("scale", 1 / math.sqrt(q.shape[-1])))
    batched = (((3,), (3,)), ((0, 1), (0, 1)))
    scores = lax.dot_general(q * like(q, root), k * like(k, root), batched)
    reported_scores = scores
    mode = node.get("qk_matmul_output_mode", 0)
    cap = node.get("softcap", 0.0)
    if cap:
        scores = lax.tanh(scores / like(scores, cap)) * like(scores, cap)
    reported_scores = scores if mode == 1 else reported_scores
    bias = attention_bias(node, q, k.shape[2], mask, past, lengths)
    if bias is not None:
        scores = scores + jnp.reshape(bias, (1,) * (4 - bias.ndim) + bias.shape)
    reported_scores = scores if mode == 2 else reported_scores
    weights = probabilities(node, scores, bias)
    reported_scores = lax.convert_element_type(weights, q.dtype) if mode == 3 else reported_scores
    weights = lax.convert_element_type(weights, q.dtype)
    result = lax.dot_general(weights, v, (((3,), (2,)), ((0, 1), (0, 1))))
    return (merge_heads(result) if flat else result, *present, reported_scores)


def probabilities(node: Node, scores: Array, bias: Array | None) -> Array:
    """Apply softmax over the keys; queries that may attend to no key get zeros."""
    from onnx import helper

    precision = node.get("softmax_precision", 0)
    if precision:
        dtype = helper.tensor_dtype_to_np_dtype(precision)
        scores = lax.convert_element_type(scores, dtype)
    if bias is None:
        return softmax_along(scores, 3)
    # Where all scores are -inf their maximum is -inf too, and the differences would be NaN.
    blind = jnp.equal(jnp.max(bias, axis=-1, keepdims=True), like(bias, -np.inf))
    safe = select(blind, np.asarray(0, scores.dtype), scores)
    return select(blind, np.asarray(0, scores.dtype), softmax_along(safe, 3))


def rotary_embedding(
    node: Node, x: Value, cosine: Value, sine: Value, positions: Value | None = None
) -> Array:
    """Rotate pairs of features by angles that grow with the position in the sequence."""
    from xrl_jax.frontends.onnx_ops.indexing import wrap
    from xrl_jax.frontends.onnx_ops.shape import gather_axis

    x = device(x)
    flat = x.ndim == 3
    # Use [B, S, H, D], so that the tables [B, S, D/2] broadcast against x after one new axis.
    if flat:
        heads = node.attributes["num_heads"]
        x = jnp.reshape(x, (*x.shape[:2], heads, x.shape[2] // heads))
    else:
        x = lax.transpose(x, (0, 2, 1, 3))
    cosine, sine = device(cosine), device(sine)
    if positions is not None:
        index = wrap(positions, cosine.shape[0])
        cosine, sine = gather_axis(cosine, index, 0), gather_axis(sine, index, 0)
    width = node.get("rotary_embedding_dim", 0) or x.shape[-1]
    half = width // 2
    cosine, sine = (lax.expand_dims(t[..., :half], (2,)) for t in (cosine, sine))
    rotated, kept = x[..., :width], x[..., width:]
    if node.get("interleaved", 0):
        one, two = rotated[..., 0::2], rotated[..., 1::2]
    else:
        one, two = rotated[..., :half], rotated[..., half:]
    real, imaginary = cosine * one - sine * two, sine * one + cosine * two
    if node.get("interleaved", 0):
        pairs = jnp.stack([real, imaginary], axis=-1)
        rotated = jnp.reshape(pairs, rotated.shape)
    else:
        rotated = lax.concatenate([real, imaginary], 3)
    result = lax.concatenate([rotated, kept], 3) if kept.shape[-1] else rotated
    if flat:
        return jnp.reshape(result, (*result.shape[:2], -1))
    return lax.transpose(result, (0, 2, 1, 3))


TRANSLATIONS: dict[str, Translation] = {
    **on_device({"Attention": attention}),
    "RotaryEmbedding": rotary_embedding,
}
