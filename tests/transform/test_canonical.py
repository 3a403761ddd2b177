"""Canonicalisation: one form for what can be written in several ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import nodes_of
from xrl_jax.program.program import to_jax
from xrl_jax.transform.canonical import canonical

X = np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(2, 3)
TOKENS = np.linspace(-1.0, 1.0, 2 * 4 * 6, dtype=np.float32).reshape(2, 4, 6)


def operators(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Return the operators of the canonical program, without sources, in order; assert that it
    computes the function.
    """
    program = canonical(from_jax(fn, *args))
    got, want = jax.jit(to_jax(program))(*args), jax.jit(fn)(*args)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    nodes = sorted(zip(*nodes_of(program.graph)[::2], strict=True), key=lambda n: n[1])
    return [n.op for n, _ in nodes if n.args]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.exp(x + 0.0),
        lambda x: lax.exp(1.0 * x),
        lambda x: lax.exp(x / 1.0),
        lambda x: lax.exp(x - jnp.zeros((2, 3))),
        lambda x: lax.exp(jnp.maximum(-jnp.inf, x)),
        lambda x: lax.exp(jnp.where(jnp.ones((2, 3), bool), x, 5.0)),
        lambda x: lax.exp(lax.neg(lax.neg(x))),
        lambda x: lax.exp(x.T.T),
        lambda x: lax.exp(x.reshape(6).reshape(2, 3)),
        lambda x: lax.exp(x[:]),
        lambda x: lax.exp(lax.dynamic_slice(x, (0, 0), (2, 3))),
        lambda x: lax.exp(jnp.pad(x, 0)),
        lambda x: lax.exp(jnp.concatenate([x])),
    ],
)
def test_identity_operations_are_removed(fn: Callable[..., Any]) -> None:
    assert operators(fn, X) == ["exp"]


def test_a_mask_of_ones_is_removed() -> None:
    """Transformers' modules have such masks: ones, cast to integers, sliced, multiplied by an
    einsum.
    """

    def fn(x: jax.Array) -> jax.Array:
        mask = jnp.ones((3, 4)).astype(jnp.int32)[1]
        return jnp.einsum("h,bhq->bhq", mask, lax.exp(x))

    assert operators(fn, TOKENS) == ["exp"]


@pytest.mark.parametrize("fn", [lambda x: x * (x > 0), lambda x: (x != 2.0).astype(x.dtype) * x])
def test_a_product_with_a_comparison_becomes_a_select(fn: Callable[..., Any]) -> None:
    """XLA turns it into a select, and then a NaN that is not selected becomes zero."""
    x = jnp.asarray([[-1.0, jnp.nan, 2.0], [0.0, jnp.inf, -jnp.inf]])
    assert operators(fn, x)[-1] == "select"


def test_a_product_with_a_comparison_per_row_stays_a_product() -> None:
    x = jnp.asarray([[-1.0, jnp.nan, 2.0], [0.0, jnp.inf, -jnp.inf]])
    assert operators(lambda x: x * (x[:, 0] >= 0)[:, None], x)[-1] == "mul"


def test_a_bias_of_zeros_is_removed() -> None:
    def fn(x: jax.Array) -> jax.Array:
        mask = jnp.ones((2, 3), jnp.int32)
        return lax.exp(x + jnp.where(mask > 0, 0.0, jnp.finfo(jnp.float32).min))

    assert operators(fn, X) == ["exp"]


def test_constants_are_folded() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.float32(64.0))

    assert operators(fn, X) == ["div"]


def test_operations_whose_result_may_be_nan_are_kept() -> None:
    """0 * x is not 0 if x is infinite, and max(x, nan) is nan."""
    assert operators(lambda x: x * 0.0, X) == ["mul"]
    assert "max" in operators(lambda x: jnp.maximum(x, jnp.nan), X)


@pytest.mark.parametrize("number", [1e20, np.inf, -np.inf])
def test_casts_out_of_the_integer_range_are_left_to_xla(number: float) -> None:
    """NumPy returns another integer, and warns."""

    def fn(x: jax.Array) -> jax.Array:
        return x + lax.convert_element_type(lax.full((2, 3), number, np.float32), np.int32)

    assert operators(fn, np.zeros((2, 3), np.int32)) == ["broadcast", "cast", "add"]


def test_a_constant_start_of_a_slice_is_clamped() -> None:
    """`dynamic_slice` shifts it to lie within the array."""

    def fn(x: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, (5, 1), (1, 2))

    assert operators(fn, X) == ["slice"]
    program = canonical(from_jax(fn, X))
    np.testing.assert_array_equal(jax.jit(to_jax(program))(X), X[1:2, 1:3])


def test_a_reshape_before_a_broadcast_is_removed() -> None:
    def fn(x: jax.Array, b: jax.Array) -> jax.Array:
        return x + b.reshape(1, 3)

    assert operators(fn, X, X[0]) == ["broadcast", "add"]


def test_the_head_dimensions_of_a_weight_are_flattened() -> None:
    """Flax's DenseGeneral has weights [features, heads, size], and [heads, size, features] for the
    sum.
    """

    def fn(x: jax.Array, inner: jax.Array, outer: jax.Array) -> jax.Array:
        heads = jnp.einsum("btc,chd->bthd", x, inner)
        return jnp.einsum("bthd,hdc->btc", lax.exp(heads), outer)

    w = np.ones((6, 3, 2), np.float32)
    found = operators(fn, TOKENS, w, w.reshape(3, 2, 6))
    assert found == ["reshape", "dot", "reshape", "exp", "reshape", "reshape", "dot"]


def test_transposes_are_absorbed_by_the_product() -> None:
    assert operators(lambda x, w: x @ w.T, X, np.ones((4, 3), np.float32)) == ["dot"]
    assert operators(lambda x, w: (w @ x.T).T, X, np.ones((4, 3), np.float32)) == ["dot"]


def test_a_weight_of_several_parts_becomes_a_matrix() -> None:
    """Heads or experts that are stored one after the other, [part, in, out]."""

    def fn(w, x):
        return jnp.einsum("td,edh->teh", x, w)

    w = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    program = canonical(from_jax(fn, w, X, weights=0))
    dot = next(e for e in jax.make_jaxpr(to_jax(program))(w, X).eqns if "dot" in str(e.primitive))
    assert [v.aval.shape for v in dot.invars] == [(2, 3), (3, 8)]
    np.testing.assert_allclose(to_jax(program)(w, X), fn(w, X), rtol=1e-6)


def test_a_weight_comes_second_if_it_is_multiplied_by_a_vector() -> None:
    def fn(w, x):
        return lax.dot(w, x, precision=(lax.Precision.HIGHEST, lax.Precision.DEFAULT))

    w = np.ones((4, 3), np.float32)
    for x in (X[0], X[:1].T):
        program = canonical(from_jax(fn, w, x, weights=0))
        dot = next(
            e for e in jax.make_jaxpr(to_jax(program))(w, x).eqns if "dot" in str(e.primitive)
        )
        assert [v.aval.shape for v in dot.invars] == [x.shape, w.shape]
        assert dot.params["precision"] == (lax.Precision.DEFAULT, lax.Precision.HIGHEST)
        np.testing.assert_allclose(to_jax(program)(w, x), fn(w, x), rtol=1e-6)


def test_a_vector_of_weights_stays_where_it_is() -> None:
    program = canonical(from_jax(lambda w, x: x @ w, X[0], X, weights=0))
    (dot,) = jax.make_jaxpr(to_jax(program))(X[0], X).eqns
    assert [v.aval.shape for v in dot.invars] == [(2, 3), (3,)]


def test_swapping_operands_keeps_the_precision_of_each() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot(w, x, precision=(lax.Precision.HIGHEST, lax.Precision.DEFAULT)).T

    args = X.T, np.ones((4, 3), np.float32)
    (dot,) = jax.make_jaxpr(to_jax(canonical(from_jax(fn, *args))))(*args).eqns
    assert dot.params["precision"] == (lax.Precision.DEFAULT, lax.Precision.HIGHEST)


def test_a_scalar_is_broadcast_if_the_result_is_an_array() -> None:
    assert operators(lambda x: x[0, 0] + jnp.zeros((2, 3)), X) == ["slice", "reshape", "broadcast"]


def test_outer_products_stay_products() -> None:
    assert operators(lambda a, b: jnp.einsum("i,j->ij", a, b), X[0], X[1]) == ["dot"]


def test_a_constant_passed_to_all_layers_is_known_in_their_body() -> None:
    """Each layer is passed its own row of a mask of ones."""

    def fn(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
        masks = jnp.ones((4, 6))
        for mask, w in zip(masks, ws, strict=True):
            h = jnp.tanh(lax.exp(x @ w) - 0.5)
            x = (lax.cos(h) + lax.sin(x)) * mask
        return x

    args = TOKENS, [np.full((6, 6), 0.1 * i, np.float32) for i in range(4)]
    program = canonical(from_jax(fn, *args))
    (body,) = program.bodies
    assert "mul" not in [n.op for n in nodes_of(body.graph)[0]]
    np.testing.assert_allclose(
        jax.jit(to_jax(program))(*args), jax.jit(fn)(*args), rtol=1e-6, atol=1e-6
    )
