"""Plain NumPy (float64) implementations of the decoders, for four heads and two groups.

They are written independently of the networks: examples, positions and heads are computed one after
the other, later positions are left out, and rotations are products of complex numbers.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.experiments.plain_sequence import HEADS, dense, norm, sigmoid

GROUPS = 2


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rms_norm(scale: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.stack([row / math.sqrt((row @ row) / row.size + 1e-5) * scale for row in x])


def rotated(x: np.ndarray, start: int) -> np.ndarray:
    """Rotate the heads [T, H, C] at positions from `start` on."""
    half = x.shape[2] // 2
    y = np.empty_like(x)
    for t in range(len(x)):
        for i in range(half):
            turn = cmath.exp(1j * (start + t) / 10000 ** (i / half))
            pairs = (x[t, :, i] + 1j * x[t, :, half + i]) * turn
            y[t, :, i], y[t, :, half + i] = pairs.real, pairs.imag
    return y


def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the contexts [T, H * C] of queries [T, H, C] at the last of the positions of keys and
    values [G, K, C].
    """
    tokens, heads, size = query.shape
    past = keys.shape[1] - tokens
    contexts = np.empty_like(query)
    for t in range(tokens):
        for head in range(heads):
            group = head * len(keys) // heads
            scores = keys[group, : past + t + 1] @ query[t, head] / math.sqrt(size)
            shares = np.exp(scores) / np.exp(scores).sum()
            contexts[t, head] = shares @ values[group, : past + t + 1]
    return contexts.reshape(tokens, -1)


def extended(cache: np.ndarray | None, new: np.ndarray) -> np.ndarray:
    """Append new keys and values [2, G, T, C] to those of the cache [2, G, P, C]."""
    return new if cache is None else np.concatenate([cache, new], axis=2)


Decode = Callable[[np.ndarray, Any, int], tuple[np.ndarray, np.ndarray]]


def by_example(
    decode: Decode, token_ids: np.ndarray, cache: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits and new keys and values from `decode(ids, caches of the layers, start)` of each
    example.
    """
    logits, news = [], []
    for b, ids in enumerate(token_ids):
        caches, start = (cache[:, :, b], cache.shape[4]) if cache is not None else (None, 0)
        of_example, new = decode(ids, caches, start)
        logits.append(of_example)
        news.append(new)
    return np.stack(logits), np.stack(news, axis=2)


def np_gpt2(
    weights: Any, token_ids: np.ndarray, cache: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    def decode(ids: np.ndarray, caches: Any, start: int) -> tuple[np.ndarray, np.ndarray]:
        x = weights["token"][ids] + weights["position"][start : start + len(ids)]
        news = []
        for index, layer in enumerate(weights["layers"]):
            qkv = dense(layer["attn"], norm(layer["norm1"], x, 1e-5))
            query, key, value = qkv.reshape(len(x), 3, HEADS, -1).transpose(1, 0, 2, 3)
            new = np.stack([key, value]).transpose(0, 2, 1, 3)
            news.append(new)
            context = attend(query, *extended(None if caches is None else caches[index], new))
            x = x + dense(layer["output"], context)
            x = x + dense(layer["down"], gelu(dense(layer["up"], norm(layer["norm2"], x, 1e-5))))
        return norm(weights["norm"], x, 1e-5) @ weights["token"].T, np.stack(news)

    return by_example(decode, token_ids, cache)


def np_llama(
    weights: Any, token_ids: np.ndarray, cache: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    def decode(ids: np.ndarray, caches: Any, start: int) -> tuple[np.ndarray, np.ndarray]:
        x = weights["token"][ids]
        news = []
        for index, layer in enumerate(weights["layers"]):
            y = rms_norm(layer["norm1"], x)
            query = rotated(dense(layer["query"], y).reshape(len(y), HEADS, -1), start)
            key = rotated(dense(layer["key"], y).reshape(len(y), GROUPS, -1), start)
            value = dense(layer["value"], y).reshape(len(y), GROUPS, -1)
            new = np.stack([key, value]).transpose(0, 2, 1, 3)
            news.append(new)
            context = attend(query, *extended(None if caches is None else caches[index], new))
            x = x + dense(layer["output"], context)
            y = rms_norm(layer["norm2"], x)
            gate = dense(layer["gate"], y)
            x = x + dense(layer["down"], gate * sigmoid(gate) * dense(layer["up"], y))
        return dense(weights["head"], rms_norm(weights["norm"], x)), np.stack(news)

    return by_example(decode, token_ids, cache)
