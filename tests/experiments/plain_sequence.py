"""Plain NumPy (float64) implementations of the sequence networks, for one example and four heads.

They are written independently of the networks: heads, tokens and steps are computed one after the
other, masked positions are left out, and the kernels of several gates are concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

HEADS = 4
erf = np.vectorize(math.erf, otypes=[float])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + erf(x / math.sqrt(2))) / 2


def dense(layer: Any, x: np.ndarray) -> np.ndarray:
    return x @ layer["kernel"] + layer.get("bias", 0)


def norm(layer: Any, x: np.ndarray, epsilon: float) -> np.ndarray:
    """Apply layer norm row by row, with the variance from the second moment."""
    rows = []
    for row in x:
        mean = row.mean()
        deviation = math.sqrt((row**2).mean() - mean**2 + epsilon)
        rows.append((row - mean) / deviation * layer["scale"] + layer["bias"])
    return np.stack(rows)


Weigh = Callable[[int, np.ndarray, np.ndarray], np.ndarray]  # head, query, key -> weights [Q, K]


def by_heads(query: np.ndarray, key: np.ndarray, value: np.ndarray, weigh: Weigh) -> np.ndarray:
    """Return the values [K, D] as weighted by each head, concatenated: [Q, D]."""
    size = query.shape[1] // HEADS
    parts = []
    for head in range(HEADS):
        own = slice(head * size, (head + 1) * size)
        parts.append(weigh(head, query[:, own], key[:, own]) @ value[:, own])
    return np.concatenate(parts, axis=1)


def attend(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, seen: np.ndarray | bool = True
) -> np.ndarray:
    """Apply softmax attention to the positions that are `seen`, broadcast to [Q, K]."""

    def weigh(head: int, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        scores = np.exp(query @ key.T / math.sqrt(query.shape[1])) * seen
        return scores / scores.sum(axis=1, keepdims=True)

    return by_heads(query, key, value, weigh)


def attention(
    layer: Any, x: np.ndarray, seen: np.ndarray | bool = True, source: np.ndarray | None = None
) -> np.ndarray:
    source = x if source is None else source
    key, value = dense(layer["key"], source), dense(layer["value"], source)
    return dense(layer["output"], attend(dense(layer["query"], x), key, value, seen))


def np_vit(weights: Any, images: np.ndarray) -> np.ndarray:
    table = weights["embeddings"]
    kernel = table["patch"]["kernel"]
    size = kernel.shape[2]
    tokens = [table["class"][0, 0]]
    for i in range(0, images.shape[2], size):
        for j in range(0, images.shape[3], size):
            patch = images[0, :, i : i + size, j : j + size].ravel()
            tokens.append(kernel.reshape(len(kernel), -1) @ patch + table["patch"]["bias"])
    x = np.stack(tokens) + table["position"][0]
    for layer in weights["layers"]:
        x = x + attention(layer, norm(layer["norm1"], x, 1e-6))
        hidden = gelu(dense(layer["up"], norm(layer["norm2"], x, 1e-6)))
        x = x + dense(layer["down"], hidden)
    return dense(weights["head"], norm(weights["norm"], x[:1], 1e-6))


def np_dalle(
    weights: Any,
    text: np.ndarray,
    previous: np.ndarray,
    position: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    def normed(layer: Any, x: np.ndarray) -> np.ndarray:
        return norm(layer, x, 1e-5)

    def gated(layer: Any, x: np.ndarray) -> np.ndarray:
        x = normed(layer["norm1"], x)
        hidden = gelu(dense(layer["gate"], x)) * dense(layer["up"], x)
        return dense(layer["down"], normed(layer["norm2"], hidden))

    def around(layer: Any, x: np.ndarray, *rest: Any) -> np.ndarray:
        return x + normed(
            layer["after"], attention(layer["attention"], normed(layer["before"], x), *rest)
        )

    written = text[0] != 1
    encoder, decoder = weights["encoder"], weights["decoder"]
    x = normed(encoder["norm1"], encoder["token"][text[0]] + encoder["position"])
    for layer in encoder["layers"]:
        x = around(layer["self"], x, written)
        x = x + gated(layer["gated"], x)
    encoded = normed(encoder["norm2"], x)

    now = int(position)
    keys, values = keys.copy(), values.copy()
    x = normed(decoder["norm1"], decoder["token"][previous] + decoder["position"][[now]])
    for index, layer in enumerate(decoder["layers"]):
        own = layer["self"]["attention"]
        before = normed(layer["self"]["before"], x)
        keys[index, 0, now] = dense(own["key"], before).reshape(HEADS, -1)
        values[index, 0, now] = dense(own["value"], before).reshape(HEADS, -1)
        past = (c[index, 0, : now + 1].reshape(now + 1, -1) for c in (keys, values))
        y = dense(own["output"], attend(dense(own["query"], before), *past))
        x = x + normed(layer["self"]["after"], y)
        x = around(layer["text"], x, written, encoded)
        x = x + gated(layer["gated"], x)
    scores = dense(weights["head"], normed(decoder["norm2"], x))
    return scores[:, :-1], keys, values


def np_tt(weights: Any, audio: np.ndarray, labels: np.ndarray) -> np.ndarray:
    def encode(layers: Any, x: np.ndarray, left: int) -> np.ndarray:
        length, width = x.shape
        for t in range(length):
            for c in range(0, width, 2):
                angle = t / 10000 ** (c / width)
                x[t, c : c + 2] += (math.sin(angle), math.cos(angle))
        seen = np.tri(length) - np.tri(length, k=-left - 1)
        for layer in layers:
            x = norm(layer["norm1"], x, 1e-6)
            x = x + attention(layer, x, seen)
            x = norm(layer["norm2"], x, 1e-6)
            x = x + dense(layer["down"], relu(dense(layer["up"], x)))
        return x

    x = encode(weights["audio"], dense(weights["project"], audio[0]), left=2)
    y = encode(weights["labels"], weights["embedding"][labels[0]], left=labels.size)
    inner = weights["joint"]["inner"]
    of_audio, of_labels = np.split(inner["kernel"], 2)
    scores = np.zeros((1, len(x), len(y), weights["embedding"].shape[0]))
    for t, frame in enumerate(x):
        for u, label in enumerate(y):
            hidden = np.tanh(frame @ of_audio + label @ of_labels + inner["bias"])
            scores[0, t, u] = dense(weights["joint"]["output"], hidden)
    return scores


def gates(weights: Any, x: np.ndarray, hidden: np.ndarray) -> tuple[list[Any], list[Any]]:
    """Return two lists of eight products, with the input and with the hidden state, each computed
    as one product.
    """
    return tuple(  # type: ignore[return-value]
        np.split(side @ np.concatenate(weights[name], axis=1), 8, axis=1)
        for name, side in (("input", x), ("hidden", hidden))
    )


def np_nasrnn(
    weights: Any, xs: np.ndarray, hidden: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    states = []
    for x in xs:
        a, b = gates(weights, x, hidden)
        s = [left + right for left, right in zip(a, b, strict=True)]
        candidate = np.tanh(np.tanh(sigmoid(s[0]) * relu(s[1])) + state)
        state = candidate * np.tanh(sigmoid(s[2]) + relu(a[3] * b[3]))
        outer = np.tanh(np.tanh(s[4]) * sigmoid(s[5])) + sigmoid(np.tanh(s[6]) + sigmoid(s[7]))
        hidden = np.tanh(state * np.tanh(outer))
        states.append(hidden)
    return np.stack(states), state


def np_nasrnn_taso(weights: Any, *xs: np.ndarray) -> np.ndarray:
    state = weights["state"]
    for cell, x in zip(weights["cells"], xs, strict=True):
        s = np.add(*gates(cell, x, state))
        outer = sigmoid(sigmoid(s[1]) + np.tanh(s[2])) + np.tanh(sigmoid(s[4]) * np.tanh(s[5]))
        inner = np.tanh(relu(s[0]) + sigmoid(s[3])) * np.tanh(sigmoid(s[6]) * relu(s[7]))
        state = np.tanh(np.tanh(outer) * np.tanh(inner))
    return state


def linear_attention(layer: Any, x: np.ndarray, transposed: bool) -> np.ndarray:
    """Return x plus its attention without softmax."""

    def weigh(head: int, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        scores = query @ (key.T if transposed else key)
        return scores + layer["mask"][head] if "mask" in layer else scores

    return (
        x
        + by_heads(x @ layer["query"], x @ layer["key"], x @ layer["value"], weigh)
        @ layer["output"]
    )


def np_bert_taso(weights: Any, x: np.ndarray) -> np.ndarray:
    for layer in weights["layers"]:
        x = x @ layer["output"]
    return x


def np_vit_taso(weights: Any, x: np.ndarray) -> np.ndarray:
    x = relu(x)
    for layer in weights["layers"]:
        x = linear_attention(layer, x, transposed=False)
        x = x + x @ (layer["up"] @ layer["down"])
    return x


def np_dalle_taso(weights: Any, x: np.ndarray) -> np.ndarray:
    x = relu(x)
    for layer in weights["layers"]:
        x = linear_attention(layer, x, transposed=True)
        x = x + (relu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]
    return x


def np_tt_taso(weights: Any, x: np.ndarray) -> np.ndarray:
    def encode(layers: Any, x: np.ndarray) -> np.ndarray:
        for layer in layers:
            x = linear_attention(layer, x, transposed=True)
            x = x + relu(x @ layer["up"]) @ layer["down"]
        return x

    of_audio, of_labels = np.split(weights["inner"], 2)
    audio = encode(weights["audio"], x @ (weights["narrow"] @ weights["widen"]))
    hidden = audio @ of_audio + encode(weights["labels"], x) @ of_labels
    return relu(hidden) @ weights["output"]
