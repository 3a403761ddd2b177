"""The networks against independent plain NumPy (float64) implementations, at reduced size."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

from experiments import models
from tests.experiments.plain_networks import np_conv, np_pool

SMALL: dict[str, dict[str, Any]] = {
    "squeezenet": {"image_size": 48, "width": 0.25, "classes": 10},
    "resnext50": {
        "image_size": 40,
        "width": 0.125,
        "groups": 4,
        "classes": 10,
        "blocks": (2, 1, 1, 1),
    },
    "bert": {"tokens": 12, "layers": 2, "width": 16, "heads": 4, "vocabulary": 40},
    "inceptionv3": {"image_size": 75, "width": 0.1, "classes": 10},
}


def np_squeezenet(weights: Any, x: np.ndarray) -> np.ndarray:
    def conv(layer: Any, x: np.ndarray, stride: int = 1, pad: int = 0) -> np.ndarray:
        y = np_conv(x, layer["kernel"], stride, pad) + layer["bias"].reshape(1, -1, 1, 1)
        return np.maximum(y, 0)

    x = np_pool(conv(weights["stem"], x, stride=2), 0)
    for number, layer in enumerate(weights["fires"], start=1):
        x = conv(layer["squeeze"], x)
        x = np.concatenate([conv(layer["expand1"], x), conv(layer["expand3"], x, pad=1)], axis=1)
        if number in (2, 4):
            x = np_pool(x, 0)
    return conv(weights["classifier"], x).mean(axis=(2, 3))


def np_resnext50(weights: Any, x: np.ndarray) -> np.ndarray:
    def norm(layer: Any, x: np.ndarray) -> np.ndarray:
        slope = layer["scale"] / np.sqrt(layer["var"] + 1e-5)
        return x * slope.reshape(-1, 1, 1) + (layer["bias"] - slope * layer["mean"]).reshape(
            -1, 1, 1
        )

    stem = weights["stem"]
    x = np_pool(np.maximum(norm(stem["norm"], np_conv(x, stem["conv"], 2, 3)), 0), 1)
    for stage, layers in enumerate(weights["stages"]):
        for index, layer in enumerate(layers):
            stride = 1 + (stage > 0 and index == 0)
            y = np.maximum(norm(layer["norm1"], np_conv(x, layer["conv1"], 1, 0)), 0)
            y = np.maximum(norm(layer["norm2"], np_conv(y, layer["conv2"], stride, 1, groups=4)), 0)
            y = norm(layer["norm3"], np_conv(y, layer["conv3"], 1, 0))
            if index == 0:
                x = norm(layer["shortcut_norm"], np_conv(x, layer["shortcut"], stride, 0))
            x = np.maximum(x + y, 0)
    return x.mean(axis=(2, 3)) @ weights["head"]["kernel"] + weights["head"]["bias"]


def np_bert(
    weights: Any, token_ids: np.ndarray, token_types: np.ndarray, attention_mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    def dense(layer: Any, x: np.ndarray) -> np.ndarray:
        return x @ layer["kernel"] + layer["bias"]

    def norm(layer: Any, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        return centred / x.std(axis=-1, keepdims=True) * layer["scale"] + layer["bias"]

    erf = np.vectorize(math.erf)
    table = weights["embeddings"]
    states, pooled = [], []
    for ids, types, keep in zip(token_ids, token_types, attention_mask, strict=True):
        x = norm(table["norm"], table["token"][ids] + table["position"] + table["type"][types])
        for layer in weights["layers"]:
            context = np.zeros_like(x)
            for head in range(4):
                cols = slice(4 * head, 4 * head + 4)
                query, key, value = (dense(layer[k], x)[:, cols] for k in ("query", "key", "value"))
                scores = np.exp(query @ key.T / 2.0) * (keep == 1)
                context[:, cols] = (scores / scores.sum(axis=1, keepdims=True)) @ value
            x = norm(layer["norm1"], x + dense(layer["output"], context))
            up = dense(layer["up"], x)
            x = norm(
                layer["norm2"], x + dense(layer["down"], up * (1 + erf(up / math.sqrt(2))) / 2)
            )
        states.append(x)
        pooled.append(np.tanh(dense(weights["pooler"], x[0])))
    return np.stack(states), np.stack(pooled)


def np_inception(weights: Any, x: np.ndarray) -> np.ndarray:
    """Compute Inception-v3. Its blocks are those of the paper's figures: stem, 3 x figure 5, figure
    10, 4 x figure 6, the reduction to 8x8, 2 x figure 7.
    """

    def conv(layer: Any, x: np.ndarray, stride: int = 1, same: bool = True) -> np.ndarray:
        kernel = layer["kernel"]
        rows, cols = kernel.shape[2:]
        if same:
            x = np.pad(x, ((0, 0), (0, 0), (rows // 2, rows // 2), (cols // 2, cols // 2)))
        windows = np.lib.stride_tricks.sliding_window_view(x, (rows, cols), axis=(2, 3))
        y = np.einsum("nchwij,ocij->nohw", windows[:, :, ::stride, ::stride], kernel)
        slope = layer["scale"] / np.sqrt(layer["var"] + 1e-3)
        shift = layer["bias"] - slope * layer["mean"]
        return np.maximum(y * slope.reshape(-1, 1, 1) + shift.reshape(-1, 1, 1), 0)

    def chain(layers: Any, x: np.ndarray) -> np.ndarray:
        for layer in layers:
            x = conv(layer, x)
        return x

    def mean_pool(x: np.ndarray) -> np.ndarray:
        x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        return np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3)).mean(axis=(4, 5))

    def block(branches: Any, x: np.ndarray) -> np.ndarray:
        *plain, (_, after_pool) = branches
        return np.concatenate([*(chain(b, x) for b in plain), conv(after_pool, mean_pool(x))], 1)

    def reduction(branches: Any, x: np.ndarray) -> np.ndarray:
        ends = [conv(b[-1], chain(b[:-1], x), stride=2, same=False) for b in branches[:2]]
        return np.concatenate([*ends, np_pool(x, 0)], 1)

    def wide(branches: Any, x: np.ndarray) -> np.ndarray:
        one, two, three, (_, after_pool) = branches
        parts = [chain(one, x)]
        for *head, (across, down) in (two, three):
            y = chain(head, x)
            parts += [chain(across, y), chain(down, y)]
        return np.concatenate([*parts, conv(after_pool, mean_pool(x))], 1)

    layers = weights["layers"]
    x = conv(layers[0], x, stride=2, same=False)
    x = np_pool(conv(layers[2], conv(layers[1], x, same=False)), 0)
    x = np_pool(conv(layers[5], conv(layers[4], x), same=False), 0)
    for kind, layer in zip("aaarccccree", layers[7:], strict=True):
        x = {"a": block, "c": block, "r": reduction, "e": wide}[kind](layer, x)
    return x.mean(axis=(2, 3)) @ weights["head"]["kernel"] + weights["head"]["bias"]


REFERENCES = {
    "squeezenet": np_squeezenet,
    "resnext50": np_resnext50,
    "bert": np_bert,
    "inceptionv3": np_inception,
}


def wide(tree: Any) -> Any:
    """Convert float32 arrays to float64; leave other arrays unchanged."""
    return jax.tree.map(lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, tree)


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_network_agrees_with_plain_numpy(name: str) -> None:
    model = models.get(name, seed=3, **SMALL[name])
    actual = jax.tree.leaves(jax.jit(model.fn)(model.weights, *model.inputs))
    expected = REFERENCES[name](wide(model.weights), *wide(model.inputs))
    for got, want in zip(actual, jax.tree.leaves(expected), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_outputs_are_finite_and_depend_on_the_inputs(name: str) -> None:
    model = models.get(name, seed=3, **SMALL[name])
    other = models.get(name, seed=4, **SMALL[name])
    fn = jax.jit(model.fn)
    first = jax.tree.leaves(fn(model.weights, *model.inputs))
    second = jax.tree.leaves(fn(model.weights, *other.inputs))
    for a, b in zip(first, second, strict=True):
        assert np.isfinite(a).all()
        assert np.std(a) > 0.02
        assert np.std(a - b) > 0.05 * np.std(a)


def test_scanned_bert_equals_the_unrolled_one() -> None:
    unrolled = models.get("bert", seed=3, **SMALL["bert"])
    scanned = models.get("bert", seed=3, scan=True, **SMALL["bert"])
    want = jax.jit(unrolled.fn)(unrolled.weights, *unrolled.inputs)
    got = jax.jit(scanned.fn)(scanned.weights, *scanned.inputs)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_masked_positions_do_not_affect_the_others() -> None:
    model = models.get("bert", seed=3, **SMALL["bert"])
    ids, types, keep = model.inputs
    changed = np.where(keep == 1, ids, (ids + 1) % 40).astype(np.int32)
    assert (changed != ids).any()
    fn = jax.jit(model.fn)
    want, _ = fn(model.weights, ids, types, keep)
    got, _ = fn(model.weights, changed, types, keep)
    np.testing.assert_allclose(got[keep == 1], want[keep == 1], rtol=1e-5, atol=1e-6)


def test_full_sizes_are_the_published_ones() -> None:
    def parameters(name: str) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(models.get(name).weights))

    assert parameters("squeezenet") == 1_235_496
    # 25,028,904 trained parameters, and a stored mean and variance for each normalised channel.
    assert parameters("resnext50") == 25_028_904 + 2 * 34_112
    # 23,834,568 trained parameters without the auxiliary classifier, and 17,216 normalised
    # channels.
    assert parameters("inceptionv3") == 23_834_568 + 2 * 17_216
    # The published 109,482,240 include a table of 512 positions; this one has 128.
    assert parameters("bert") == 109_482_240 - (512 - 128) * 768


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="unknown model 'vgg'; known are bert, bert_bf16, bert_taso"
    ):
        models.get("vgg")


def test_the_suites_are_those_of_the_literature() -> None:
    assert len(models.SEVEN) == 7 and len(models.TWELVE) == 12
    assert all(name.endswith("_taso") for name in models.AS_PUBLISHED)
    groups = models.TWELVE, models.DECODERS, models.BF16, models.AS_PUBLISHED
    assert set(models.MODELS) == {name for group in groups for name in group}
