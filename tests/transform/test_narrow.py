"""Products that read a weight in float16, bfloat16 or int8."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import nodes_of
from xrl_jax.libraries.registry import by_name
from xrl_jax.program.host import disassemble
from xrl_jax.program.program import Program
from xrl_jax.transform.narrow import STORAGE, Site, narrowed, sites

LIBRARY = by_name("xla")  # it prefers no lowering: products keep the plain one
W = np.asarray([[1.0, 0.0, -127.0], [0.4, 0.0, 63.6]], np.float32)
X = np.asarray([[1.0, 2.0]], np.float32)


def product(w: np.ndarray = W) -> Program:
    return from_jax(lambda w, x: x @ w, w, X, weights=0)


def ops_of(program: Program) -> list[str]:
    return [n.op for n in nodes_of(program.graph)[0]]


def test_a_product_with_a_weight_is_a_site() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ w @ (w.T @ w) + x @ x.T @ jnp.ones((1, 3))

    program = from_jax(fn, W, X, weights=0)
    nodes = disassemble(program).main.nodes
    shapes = [nodes[site.index].shape for site in sites(program, LIBRARY)]
    assert shapes == [(1, 3), (1, 3), (1, 3)]  # not w.T @ w, made once, and not x @ x.T


def test_a_product_of_two_activations_is_none() -> None:
    assert sites(from_jax(lambda x: x @ x.T, X), LIBRARY) == {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float_is_a_cast_of_the_weight(dtype: str) -> None:
    program = product()
    (site,) = sites(program, LIBRARY)
    narrow = narrowed(program, {site: f"weight-in-{dtype}"}, LIBRARY)
    assert ops_of(narrow) == ["weight", "input", "cast", "dot"]
    expected = X @ np.asarray(jnp.asarray(W, dtype), np.float32)
    np.testing.assert_allclose(narrow(W, X), expected, rtol=1e-6)


def test_int8_has_a_scale_for_each_column() -> None:
    """The columns of W, by their scales: 127 and 51 of 1 / 127; zeros; -127 and 64 of 1."""
    program = product()
    (site,) = sites(program, LIBRARY)
    y = narrowed(program, {site: "weight-in-int8"}, LIBRARY)(W, X)
    np.testing.assert_allclose(y, [[1.0 + 2 * 51 / 127, 0.0, -127.0 + 2 * 64.0]], rtol=1e-6)


def test_int8_of_a_transposed_weight_scales_its_rows() -> None:
    program = from_jax(lambda w, x: jnp.einsum("bk,nk->bn", x, w), W.T.copy(), X, weights=0)
    (site,) = sites(program, LIBRARY)
    y = narrowed(program, {site: "weight-in-int8"}, LIBRARY)(W.T, X)
    np.testing.assert_allclose(y, [[1.0 + 2 * 51 / 127, 0.0, -127.0 + 2 * 64.0]], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_special_activations_come_through(dtype: str) -> None:
    program = product()
    (site,) = sites(program, LIBRARY)
    x = np.asarray([[np.inf, 1.0]], np.float32)
    y = np.asarray(narrowed(program, {site: f"weight-in-{dtype}"}, LIBRARY)(W, x))
    np.testing.assert_array_equal(y, np.asarray([[np.inf, np.nan, -np.inf]]))


def test_two_products_share_a_narrow_weight() -> None:
    program = from_jax(lambda w, x: (x @ w, (x + 1) @ w), W, X, weights=0)
    chosen = dict.fromkeys(sites(program, LIBRARY), "weight-in-float16")
    assert ops_of(narrowed(program, chosen, LIBRARY)).count("cast") == 1


def test_products_of_repeated_layers_are_sites_of_the_body() -> None:
    def fn(w: list[Any], x: Any) -> Any:
        for each in w:
            x = jnp.exp(jnp.sin(jnp.tanh(x @ each) * 2.0 + 1.0) / 3.0)
        return x

    weights = [np.eye(4, dtype=np.float32) * (i + 1) for i in range(8)]
    x = np.ones((1, 4), np.float32)
    program = from_jax(fn, weights, x, weights=0)
    found = sites(program, LIBRARY)
    assert {site.graph for site in found} == {1}
    narrow = narrowed(program, dict.fromkeys(found, "weight-in-int8"), LIBRARY)
    np.testing.assert_allclose(narrow(weights, x), fn(list(map(jnp.asarray, weights)), x), 1e-6)


def test_a_weight_in_bfloat16_can_only_become_int8() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )

    w = jnp.asarray(W, jnp.bfloat16)
    program = from_jax(fn, w, X, weights=0)
    places = sites(program, LIBRARY)
    assert list(places.values()) == [("weight-in-int8",)]
    y = narrowed(program, dict.fromkeys(places, "weight-in-int8"), LIBRARY)(w, X)
    np.testing.assert_allclose(y, [[1.0 + 2 * 51 / 127, 0.0, -127.0 + 2 * 64.0]], rtol=1e-2)


def test_a_site_names_its_graph_and_node() -> None:
    assert sites(product(), LIBRARY) == {Site(0, 2): STORAGE}
