"""Errors of narrow weights, measured by rounding them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.libraries.registry import by_name
from xrl_jax.precision.errors import Errors, error_bound
from xrl_jax.transform.narrow import STORAGE, narrowed, sites

RNG = np.random.default_rng(0)
PARAMS = {name: RNG.normal(size=(32, 32)).astype(np.float32) for name in "vw"}
X = RNG.normal(size=(2, 32)).astype(np.float32)


def network(params: dict[str, Any], x: Any) -> jax.Array:
    return jnp.tanh(x @ params["v"]) @ params["w"]


LIBRARY = by_name("xla")  # products keep the plain lowering
PROGRAM = from_jax(network, PARAMS, X, weights=0)
LEAVES = [*jax.tree.leaves(PARAMS), X]


@pytest.mark.parametrize("precision", STORAGE)
def test_the_error_is_that_of_the_narrowed_program(precision: str) -> None:
    places = sites(PROGRAM, LIBRARY)
    chosen = dict.fromkeys(places, precision)
    exact = np.asarray(network(PARAMS, X), np.float64)
    y = np.asarray(narrowed(PROGRAM, chosen, LIBRARY)(PARAMS, X), np.float64)
    expected = np.abs(y - exact).max() / np.abs(exact).max()
    assert Errors(PROGRAM, places, [LEAVES]).of(chosen).max() == pytest.approx(expected, rel=0.02)


def test_an_input_without_an_error_says_nothing_about_others() -> None:
    assert error_bound(np.asarray([0.0, 2e-3, 2e-3])) == pytest.approx(2e-3)
    assert error_bound(np.zeros(3)) == 0.0
    assert error_bound(np.asarray([0.0, np.inf])) == np.inf


def test_nothing_chosen_causes_no_error() -> None:
    assert Errors(PROGRAM, sites(PROGRAM, LIBRARY), [LEAVES]).of({}).max() == 0.0


def test_the_errors_of_several_products_add_up_as_squares() -> None:
    places = sites(PROGRAM, LIBRARY)
    errors = Errors(PROGRAM, places, [LEAVES])
    each = [errors.of({s: "weight-in-bfloat16"}).max() for s in places]
    both = errors.of(dict.fromkeys(places, "weight-in-bfloat16")).max()
    assert both == pytest.approx(np.sqrt(np.sum(np.square(each))), rel=0.5)


def test_a_weight_beyond_the_range_of_float16_has_an_infinite_error() -> None:
    params = {"v": PARAMS["v"] * 1e5, "w": PARAMS["w"]}
    first = next(iter(sites(PROGRAM, LIBRARY)))
    errors = Errors(PROGRAM, {first: STORAGE}, [[*jax.tree.leaves(params), X]])
    assert errors.of({first: "weight-in-float16"}).max() == np.inf
    assert errors.of({first: "weight-in-bfloat16"}).max() < 0.1


def test_on_unusual_inputs_the_error_of_bfloat16_is_allowed() -> None:
    places = sites(PROGRAM, LIBRARY)
    errors = Errors(PROGRAM, places, [LEAVES], unusual=[[*LEAVES[:-1], 2 * X]])
    half, whole = ({s: p for s in places} for p in ("weight-in-float16", "weight-in-bfloat16"))
    assert errors.excess(whole, 1e-9) == pytest.approx(1.0, rel=0.5)
    assert errors.excess(half, 1e-9) < 0.2  # three bits more
    assert errors.excess(whole, 1.0) < 0.1
    assert errors.excess({}, 1e-9) == 0.0


def test_an_unusual_input_may_overflow_where_it_does_in_bfloat16() -> None:
    w, x = np.full((24, 8), 88.7 / 24, np.float32), np.ones((1, 24), np.float32)
    program = from_jax(lambda w, x: jnp.exp(x @ w), w, x, weights=0)  # 88.875 in bfloat16
    (site,) = places = sites(program, LIBRARY)
    errors = Errors(program, places, [[w, 0.1 * x]], unusual=[[w, x]])
    assert errors.excess({site: "weight-in-bfloat16"}, 1e-2) == 1.0


def test_products_inside_loops_are_no_sites() -> None:
    def fn(w: jax.Array, xs: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, x: (jnp.tanh(c @ w + x), c), xs[0], xs)[0]

    xs = np.stack([X] * 200)
    assert sites(from_jax(fn, PARAMS["v"], xs, weights=0), LIBRARY) == {}


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("rows", [2, 40])
def test_a_weight_that_is_not_finite_has_an_infinite_error_in_integers(
    value: float, rows: int
) -> None:
    w = np.where(np.arange(1024).reshape(32, 32) == 5, value, PARAMS["w"]).astype(np.float32)
    x = RNG.normal(size=(rows, 32)).astype(np.float32)
    program = from_jax(lambda w, x: jnp.tanh(x @ w), w, x, weights=0)
    (site,) = found = sites(program, by_name("onednn"))
    for precision in found[site]:
        if precision.endswith("int8"):
            assert Errors(program, found, [[w, x]]).of({site: precision}).max() == np.inf
