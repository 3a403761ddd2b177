"""`in_library` hands all kernels of a program to the library at once."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import nodes_of
from xrl_jax.language.rule_files import select_rules, standard_rules
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.registry import calling
from xrl_jax.lower.table import LOWERINGS
from xrl_jax.program.program import Program
from xrl_jax.search.in_library import in_library

RULES = standard_rules()
K = jax.random.normal(jax.random.key(0), (3, 3, 1, 1))
V, U = (jax.random.normal(jax.random.key(i), (3, 3)) for i in (1, 2))
X = jax.random.normal(jax.random.key(3), (1, 3, 4, 4))


def network(k: jax.Array, v: jax.Array, u: jax.Array, x: jax.Array) -> jax.Array:
    """Compute a convolution, a product with a product of weights, and one of activations only."""
    names = ("NCHW", "OIHW", "NCHW")
    y = lax.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=names)
    y = jnp.tanh(y).reshape(3, 16).T @ (v @ u)
    return y @ y.T


PROGRAM = from_jax(network, K, V, U, X, weights=(0, 1, 2))


def kernels(program: Program) -> Counter[tuple[str, str]]:
    """Count the convolutions and products by their lowerings."""
    nodes = [n for n in nodes_of(program.graph)[0] if n.op in ("conv", "dot")]
    return Counter((n.op, LOWERINGS[n.op][n.lowering].name) for n in nodes)


@pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
def test_all_kernels_except_weight_only_ones_get_the_librarys_lowering() -> None:
    made, steps = in_library(PROGRAM, RULES, calling("cpu"))
    lowerings = {("conv", "onednn"): 1, ("dot", "onednn"): 2, ("dot", "plain"): 1}
    assert kernels(made) == lowerings
    assert Counter(s.rule for s in steps) == {"conv-as-onednn": 1, "dot-as-onednn": 2}
    expected = network(K, V, U, X)
    np.testing.assert_allclose(made(K, V, U, X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
def test_a_lowering_without_a_rule_is_not_chosen() -> None:
    made, steps = in_library(
        PROGRAM, select_rules(RULES, ("-dot-as-onednn", "-lowering_conv")), calling("cpu")
    )
    assert kernels(made) == {("conv", "plain"): 1, ("dot", "plain"): 3} and steps == ()


@pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
def test_convolutions_of_large_images_use_winograd() -> None:
    """Results of 20 x 20 have 25 tiles of 4 x 4; those of 10 x 10 have 25 of 2 x 2 (9 of 4 x 4)."""

    def both(k: jax.Array, x: jax.Array) -> list[jax.Array]:
        names = ("NHWC", "OIHW", "NHWC")
        images = x, x[:, :10, :10], x[:, :8, :8]
        return [
            lax.conv_general_dilated(i, k, (1, 1), "SAME", dimension_numbers=names) for i in images
        ]

    k, x = jnp.ones((32, 32, 3, 3)), jax.random.normal(jax.random.key(4), (1, 20, 20, 32))
    made, _ = in_library(from_jax(both, k, x, weights=(0,)), RULES, calling("cpu"))
    lowerings = {("conv", "winograd4"): 1, ("conv", "winograd2"): 1, ("conv", "onednn"): 1}
    assert kernels(made) == lowerings
    for found, expected in zip(made(k, x), both(k, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
@pytest.mark.parametrize(
    ("image", "features", "lowering"),
    [
        ((20, 20), (3, 32), "onednn"),
        ((20, 20), (32, 32), "winograd4"),
        ((300, 300), (32, 32), "onednn"),
        ((300, 300), (64, 64), "winograd4"),
    ],
)
def test_winograd_needs_more_features_for_larger_images(
    image: tuple[int, int], features: tuple[int, int], lowering: str
) -> None:
    taken, made = features
    names = ("NHWC", "HWIO", "NHWC")
    args = jnp.ones((3, 3, taken, made)), jnp.ones((1, *image, taken))
    program = from_jax(
        lambda k, x: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=names),
        *args,
        weights=(0,),
    )
    assert kernels(in_library(program, RULES, calling("cpu"))[0]) == {("conv", lowering): 1}


def test_without_the_library_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xrl_jax.libraries.onednn.library.library", lambda: None)
    assert in_library(PROGRAM, RULES, calling("cpu")) == (PROGRAM, ())


@pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
def test_kernels_already_in_the_library_stay() -> None:
    made, _ = in_library(PROGRAM, RULES, calling("cpu"))
    assert in_library(made, RULES, calling("cpu"))[1] == ()
