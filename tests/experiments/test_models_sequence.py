"""The sequence networks against plain NumPy (float64) implementations, at reduced size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from experiments.models import Model
from experiments.models.dalle import dalle
from experiments.models.nasrnn import nasrnn, nasrnn_taso
from experiments.models.transformers_taso import bert_taso, dalle_taso, tt_taso, vit_taso
from experiments.models.tt import tt
from experiments.models.vit import vit
from tests.experiments import plain_sequence as plain

NETWORKS: dict[str, Callable[..., Model]] = {
    "vit": vit,
    "dalle": dalle,
    "tt": tt,
    "nasrnn": nasrnn,
    "nasrnn_taso": nasrnn_taso,
    "bert_taso": bert_taso,
    "vit_taso": vit_taso,
    "dalle_taso": dalle_taso,
    "tt_taso": tt_taso,
}
SMALL: dict[str, dict[str, Any]] = {
    "vit": {"image_size": 32, "patch": 8, "layers": 2, "width": 16, "heads": 4, "classes": 10},
    "dalle": {
        "tokens": 8,
        "positions": 12,
        "layers": 2,
        "width": 16,
        "heads": 4,
        "hidden": 24,
        "text_vocabulary": 30,
        "image_vocabulary": 20,
    },
    "tt": {
        "frames": 9,
        "features": 12,
        "tokens": 5,
        "vocabulary": 11,
        "audio_layers": 2,
        "label_layers": 2,
        "width": 16,
        "heads": 4,
        "hidden": 24,
        "left_context": 2,
    },
    "nasrnn": {"steps": 3, "hidden": 8},
    "nasrnn_taso": {"steps": 3, "hidden": 8},
    "bert_taso": {"tokens": 4, "layers": 2, "width": 16, "heads": 4},
    "vit_taso": {"tokens": 4, "layers": 2, "width": 16, "heads": 4, "hidden": 24},
    "dalle_taso": {"tokens": 6, "layers": 2, "width": 16, "heads": 4, "hidden": 24},
    "tt_taso": {
        "frames": 7,
        "narrow": 4,
        "labels": 5,
        "audio_layers": 2,
        "label_layers": 2,
        "width": 16,
        "heads": 4,
        "hidden": 24,
    },
}
REFERENCES: dict[str, Callable[..., Any]] = {
    name: getattr(plain, f"np_{name}") for name in NETWORKS
}


def small(name: str, *, seed: int = 3, **options: Any) -> Model:
    return NETWORKS[name](seed, **SMALL[name], **options)


def outputs(model: Model, *inputs: Any) -> list[np.ndarray]:
    """Return the network's outputs for `inputs`, by default its example inputs."""
    out = jax.jit(model.fn)(model.weights, *(inputs or model.inputs))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(out)]


def wide(tree: Any) -> Any:
    """Convert float32 arrays to float64; leave other arrays unchanged."""
    return jax.tree.map(lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, tree)


@pytest.mark.parametrize("name", NETWORKS)
def test_network_agrees_with_plain_numpy(name: str) -> None:
    model = small(name)
    expected = REFERENCES[name](wide(model.weights), *wide(model.inputs))
    for got, want in zip(outputs(model), jax.tree.leaves(expected), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_finite_and_depend_on_the_inputs(name: str) -> None:
    model = small(name)
    for a, b in zip(outputs(model), outputs(model, *small(name, seed=4).inputs), strict=True):
        assert np.isfinite(a).all()
        assert np.std(a) > 0.02
        assert np.std(a - b) > 0.05 * np.std(a)


@pytest.mark.parametrize("name", NETWORKS)
def test_scanned_network_equals_the_unrolled_one(name: str) -> None:
    scanned = small(name, scan=True)
    assert "scan" in str(jax.make_jaxpr(scanned.fn)(scanned.weights, *scanned.inputs))
    for got, want in zip(outputs(scanned), outputs(small(name)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def equations(jaxpr: Jaxpr) -> int:
    """Return the number of equations, including those of inner jaxprs."""
    inner = (sub for e in jaxpr.eqns for sub in jaxprs_in_params(e.params))
    return len(jaxpr.eqns) + sum(equations(sub) for sub in inner)


def dead(model: Model) -> tuple[int, list[str]]:
    """Return how many equations reach no output, and the paths of weights and inputs that reach
    none.
    """
    arguments = (model.weights, *model.inputs)
    jaxpr = jax.make_jaxpr(model.fn)(*arguments).jaxpr
    live, used = dce_jaxpr(jaxpr, used_outputs=True)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(arguments)]
    unused = [path for path, is_used in zip(paths, used, strict=True) if not is_used]
    return equations(jaxpr) - equations(live), unused


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "bert_taso"])
def test_every_value_reaches_an_output(name: str, scan: bool) -> None:
    assert dead(small(name, scan=scan)) == (0, [])


def test_dead_code_is_detected() -> None:
    vit = small("vit")

    def wasteful(weights: Any, x: jax.Array) -> jax.Array:
        jnp.tanh(weights["unused"])
        return vit.fn(weights, x)

    weights = {**vit.weights, "unused": np.ones(3, np.float32)}
    assert dead(Model("wasteful", wasteful, weights, vit.inputs)) == (1, ["[0]['unused']"])


def test_the_attention_of_tasos_bert_is_dead_code() -> None:
    count, unused = dead(small("bert_taso"))
    assert count > 0
    names = ("key", "query", "value")
    assert unused == [f"[0]['layers'][{i}]['{name}']" for i in range(2) for name in names]


def test_later_image_tokens_do_not_affect_earlier_ones() -> None:
    model = small("dalle")
    *start, position, keys, values = model.inputs
    junk = np.where(np.arange(12)[:, None, None] > position, 7.0, 0.0).astype(np.float32)
    scores, new_keys, new_values = outputs(model)
    got, *_ = outputs(model, *start, position, keys + junk, values + junk)
    np.testing.assert_allclose(got, scores, rtol=1e-5, atol=1e-6)
    # The step writes only this position.
    for old, new in ((keys, new_keys), (values, new_values)):
        changed = np.any(old != new, axis=(0, 1, 3, 4))
        np.testing.assert_array_equal(np.flatnonzero(changed), [position])


def test_padding_of_the_text_does_not_affect_the_image() -> None:
    model = small("dalle")
    text, *rest = model.inputs
    assert (text[0, 6:] == 1).all() and (text[0, :6] != 1).all()
    # The embedding of padding is arbitrary: nothing attends to it.
    encoder = model.weights["encoder"]
    token = encoder["token"].copy()
    token[1] *= -1.0
    weights = {**model.weights, "encoder": {**encoder, "token": token}}
    changed = Model("dalle", model.fn, weights, (text, *rest))
    for got, want in zip(outputs(changed), outputs(model), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_frame_affects_only_frames_with_it_in_their_left_context() -> None:
    model = small("tt")
    audio, labels = model.inputs
    changed = audio.copy()
    changed[:, 3] += 1.0
    differs = np.any(outputs(model)[0] != outputs(model, changed, labels)[0], axis=(0, 2, 3))
    # Each of two layers carries frame 3 on by its left context of two frames, and never back.
    np.testing.assert_array_equal(np.flatnonzero(differs), [3, 4, 5, 6, 7])


def test_a_label_does_not_affect_earlier_ones() -> None:
    model = small("tt")
    audio, labels = model.inputs
    changed = labels.copy()
    changed[:, 2] = (labels[:, 2] + 1) % 11
    differs = np.any(outputs(model)[0] != outputs(model, audio, changed)[0], axis=(0, 1, 3))
    np.testing.assert_array_equal(np.flatnonzero(differs), [2, 3, 4])


def test_full_sizes() -> None:
    def parameters(name: str) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(NETWORKS[name]().weights))

    assert parameters("vit") == 86_567_656  # the published count, head of 1000 classes included
    # No counts are published for the others; these are sums over the papers' and graphs' matrices.
    assert parameters("nasrnn") == 16 * 512**2
    assert parameters("nasrnn_taso") == 5 * 16 * 512**2 + 512
    assert parameters("bert_taso") == 8 * 4 * 1024**2
    assert parameters("vit_taso") == 12 * (4 * 768**2 + 2 * 768 * 3072)
    assert parameters("dalle_taso") == 8 * (4 * 768**2 + 3 * 768 * 2048 + 12 * 16**2)
    joint = 1024 * 512 + 512 * 10
    assert parameters("tt_taso") == 2 * 512 * 16 + 14 * (4 * 512**2 + 2 * 512 * 2048) + joint
    layer = 4 * (512**2 + 512) + (512 * 2048 + 2048) + (2048 * 512 + 512) + 2 * 2 * 512
    ends = (512**2 + 512) + 64 * 512 + (1024 * 512 + 512) + (512 * 64 + 64)
    assert parameters("tt") == 14 * layer + ends
    attention, gated = 4 * 768**2 + 2 * 2 * 768, 3 * 768 * 2048 + 2 * (768 + 2048)
    tables = (50_264 + 16 + 16_385 + 256) * 768 + 4 * 2 * 768 + 768 * 16_385
    assert parameters("dalle") == 8 * (3 * attention + 2 * gated) + tables


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vit", {"heads": 5}, "vit: 5 heads do not divide width 768"),
        ("vit", {"image_size": 30}, "vit: patches of 16 do not divide image_size 30"),
        ("dalle", {"heads": 7}, "dalle: 7 heads do not divide width 768"),
        ("tt", {"heads": 0}, "tt: 0 heads do not divide width 512"),
        ("tt", {"left_context": -1}, "tt: left_context is -1, use at least 0"),
        ("nasrnn", {"steps": 0}, "nasrnn: steps is 0, use at least 1"),
        ("nasrnn_taso", {"hidden": 0}, "nasrnn_taso: hidden is 0, use at least 1"),
        ("bert_taso", {"tokens": 32}, r"tokens \(32\) must be width / heads \(64\)"),
        ("vit_taso", {"heads": 6}, r"tokens \(64\) must be width / heads \(128\)"),
        ("dalle_taso", {"heads": 7}, "dalle_taso: 7 heads do not divide width 768"),
        ("tt_taso", {"heads": 7}, "tt_taso: 7 heads do not divide width 512"),
    ],
)
def test_inconsistent_sizes_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NETWORKS[name](**options)
