"""The decoders against plain NumPy (float64) implementations, at reduced size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params

from experiments.models import DECODERS, Model, get
from experiments.targets import from_model
from tests.experiments.plain_decoders import np_gpt2, np_llama

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 2, "width": 16, "heads": 4, "vocabulary": 30},
    "llama": {"layers": 2, "width": 16, "heads": 4, "groups": 2, "hidden": 24, "vocabulary": 30},
}
REFERENCES: dict[str, Callable[..., Any]] = {"gpt2": np_gpt2, "llama": np_llama}


def small(name: str, *, seed: int = 3, tokens: int = 6, past: int = 0) -> Model:
    return DECODERS[name](seed, tokens=tokens, past=past, batch=2, **SMALL[name])


def outputs(model: Model, *inputs: Any) -> list[np.ndarray]:
    """Return logits and new keys and values for `inputs`, by default the example inputs."""
    return [np.asarray(a) for a in jax.jit(model.fn)(model.weights, *(inputs or model.inputs))]


def converted(tree: Any, dtype: Any) -> Any:
    """Convert float32 arrays to `dtype`; leave other arrays unchanged."""
    return jax.tree.map(lambda a: a.astype(dtype) if a.dtype == np.float32 else a, tree)


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the equations, including those of inner jaxprs."""
    for e in jaxpr.eqns:
        yield e
        for sub in jaxprs_in_params(e.params):
            yield from equations(sub)


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("name", REFERENCES)
def test_network_agrees_with_plain_numpy(name: str, past: int) -> None:
    model = small(name, past=past)
    assert len(model.inputs) == (2 if past else 1)
    expected = REFERENCES[name](*converted((model.weights, *model.inputs), np.float64))
    for got, want in zip(outputs(model), expected, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", REFERENCES)
def test_a_prompt_in_two_pieces_gives_the_logits_of_one_piece(name: str) -> None:
    model = small(name, tokens=12)
    (token_ids,) = model.inputs
    want, _ = outputs(model)
    first, cache = outputs(model, token_ids[:, :7])
    second, _ = outputs(model, token_ids[:, 7:], cache)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REFERENCES)
def test_outputs_are_finite_and_depend_on_the_inputs(name: str) -> None:
    model = small(name)
    for a, b in zip(outputs(model), outputs(model, *small(name, seed=4).inputs), strict=True):
        assert np.isfinite(a).all()
        assert np.std(a) > 0.02
        assert np.std(a - b) > 0.05 * np.std(a)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.1), ("float16", 0.01)])
@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("name", REFERENCES)
def test_outputs_have_the_dtype_of_the_weights(
    name: str, past: int, dtype: str, error: float
) -> None:
    model = small(name, past=past)
    narrow = jax.jit(model.fn)(*converted((model.weights, *model.inputs), jnp.dtype(dtype)))
    for got, want in zip(narrow, outputs(model), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(np.float32), want, atol=error * np.abs(want).max())


@pytest.mark.parametrize("name", REFERENCES)
def test_no_product_of_bfloat16_weights_is_of_float32(name: str) -> None:
    model = small(name, past=5)
    arguments = converted((model.weights, *model.inputs), jnp.bfloat16)
    found = list(equations(jax.make_jaxpr(model.fn)(*arguments).jaxpr))
    dots = [e for e in found if e.primitive.name == "dot_general"]
    assert len(dots) == {"gpt2": 2 * 6 + 1, "llama": 2 * 9 + 1}[name]
    assert {v.aval.dtype.name for e in dots for v in (*e.invars, *e.outvars)} == {"bfloat16"}


def test_past_is_an_option_of_the_experiments() -> None:
    _, token_ids, cache = from_model("llama", tokens=1, past=9, layers=1, width=24).args
    assert (token_ids.shape, cache.shape) == ((1, 1), (1, 2, 1, 4, 9, 2))


def test_full_sizes() -> None:
    def parameters(name: str) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(DECODERS[name]().weights))

    # The published 124,439,808 include a table of 1024 positions; this one has 128.
    assert parameters("gpt2") == 124_439_808 - (1024 - 128) * 768
    # No count is published for this size; this is the sum over its matrices and norms.
    layer = 2 * 768**2 + 2 * 768 * 256 + 3 * 768 * 2048 + 2 * 768
    assert parameters("llama") == 16 * layer + 768 + 2 * 32_000 * 768


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2", {"heads": 5}, "gpt2: 5 heads do not divide width 768"),
        ("llama", {"heads": 5}, "llama: 5 heads do not divide width 768"),
        ("llama", {"groups": 5}, "llama: 5 groups do not divide 12 heads"),
        ("llama", {"groups": 0}, "llama: 0 groups do not divide 12 heads"),
        ("llama", {"width": 36}, "llama: the heads' size 3 is odd"),
    ],
)
def test_inconsistent_sizes_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DECODERS[name](**options)


def test_variants_in_bfloat16_have_the_options_of_the_network() -> None:
    model = get("gpt2_token_bf16", **SMALL["gpt2"], past=3)
    assert model.name == "gpt2_token_bf16"
    assert {str(w.dtype) for w in jax.tree.leaves(model.weights)} == {"bfloat16"}
    token_ids, cache = model.inputs
    assert (token_ids.shape, str(token_ids.dtype)) == ((1, 1), "int32")
    assert (cache.shape, str(cache.dtype)) == ((2, 2, 1, 4, 3, 4), "bfloat16")
