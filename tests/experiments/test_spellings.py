"""The same networks in two spellings: the plain functions, and the report on both."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import spellings, wild_networks
from experiments.side_by_side import Entry, SideBySide
from experiments.wild_networks import NETWORKS, plain


def test_a_plain_norm_has_mean_0_and_variance_1() -> None:
    weights = {"scale": jnp.array([2.0, 2.0]), "bias": jnp.array([0.0, 1.0])}
    y = plain._norm(weights, jnp.array([[1.0, 3.0]]), 0.0)
    np.testing.assert_array_equal(y, [[-2.0, 3.0]])


def test_plain_attention_with_equal_scores_averages_the_visible_values() -> None:
    q, v = jnp.zeros((1, 2, 2)), jnp.array([[[1.0, 5.0], [3.0, 7.0]]])
    np.testing.assert_allclose(plain._attention(q, q, v, heads=2), [[[2.0, 6.0], [2.0, 6.0]]])
    ahead = jnp.array([[0.0, -1e9], [0.0, 0.0]])
    found = plain._attention(q, q, v, heads=2, addend=ahead)
    np.testing.assert_allclose(found, [[[1.0, 5.0], [2.0, 6.0]]])


@pytest.mark.slow
@pytest.mark.parametrize("name", plain.TWINS)
def test_the_plain_spelling_computes_the_same_function(name: str) -> None:
    if importlib.util.find_spec(NETWORKS[name].family) is None:
        pytest.skip(f"{NETWORKS[name].family} is not installed")
    fn, args, _ = NETWORKS[name].make()
    twin, same, _ = getattr(wild_networks, f"{name}_plain")()
    expected, found = jax.jit(fn)(*args), jax.jit(twin)(*same)
    np.testing.assert_allclose(found, expected, atol=1e-4 * float(jnp.abs(expected).max()))


def test_the_table_shows_both_spellings() -> None:
    entries = {
        "as written": Entry(0.011, 2.0, 1.9, 2.1, "jit", 1e-7, 4e-7),
        "plain": Entry(0.010, 2.2, 2.1, 2.3, "jit", 1e-7, 4e-7),
    }
    ratios = {"as written/plain": (1.1, 1.05, 1.15)}
    both = SideBySide("net", {"jit": 0.022}, (0.99, 1.01), entries, ratios, {})
    (row,) = zip(*(column.cells for column in spellings.table([both]).columns), strict=True)
    assert row == ("net", "11.00", "10.00", "1.10", "1.05-1.15", "2.00, 2.20")
