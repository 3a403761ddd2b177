"""Proofs that programs compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xrl_jax
from xrl_jax.egraph import equivalence
from xrl_jax.egraph.equivalence import Equivalence
from xrl_jax.egraph.limits import Stop
from xrl_jax.egraph.proof import check, shortened
from xrl_jax.graph.bindings import Equation

RNG = np.random.default_rng(0)
X = jnp.ones((4, 8))
V, W = (jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32) for _ in range(2))


def compared(
    one: Callable[..., Any], other: Callable[..., Any], *args: Any, **how: Any
) -> Equivalence:
    found = xrl_jax.equivalent(xrl_jax.from_jax(one, *args), xrl_jax.from_jax(other, *args), **how)
    assert check(found.proof)
    return found


def by(found: Equivalence) -> list[str]:
    """Return the rules of the proof."""
    return sorted(r.rule for r in found.proof.rewrites)


def test_the_order_of_commutative_operands_needs_no_rewrite():
    found = compared(lambda x, y: x * y + y, lambda x, y: y + y * x, X, X)
    assert found and by(found) == []


def test_two_transposes_cancel():
    found = compared(lambda x: jax.nn.relu(x.T).T @ V, lambda x: jax.nn.relu(x) @ V, X)
    assert found
    assert len(found.proof.rewrites) == 2
    assert "by 2 rewrites" in str(found)


def test_other_weights_are_not_proven_equal():
    found = compared(lambda x: x @ V, lambda x: x @ W, X)
    assert not found and found.outputs == (False,)
    assert found.saturation.stop is Stop.SATURATED
    assert "not proven equal: 0 of 1" in str(found)


def test_each_result_is_compared():
    def transposed(x: jax.Array) -> tuple[jax.Array, ...]:
        return x @ V, jax.nn.relu(x.T).T

    found = compared(transposed, lambda x: (x @ W, jax.nn.relu(x)), X)
    assert found.outputs == (False, True)
    assert found.proof.rewrites and not found


def test_a_scale_that_was_folded_into_a_weight_is_equal_by_value():
    scale = jnp.asarray(RNG.uniform(0.5, 2.0, 8), jnp.float32)
    folded = jnp.asarray(np.asarray(V, np.float64) * np.asarray(scale, np.float64), jnp.float32)
    found = compared(lambda x: (x @ V) * scale, lambda x: x @ folded, X)
    assert found and "equal-by-value" in by(found)
    assert len(found.proof.rewrites) <= 3
    off = folded.at[0, 0].multiply(1.001)
    assert not compared(lambda x: (x @ V) * scale, lambda x: x @ off, X)


def test_an_outlier_does_not_hide_other_differences():
    """Two weights with an element of 1e8; another element differs by a factor of two."""
    large = V.at[0, 0].set(1e8)
    scale = jnp.full(8, 0.7)
    same, off = large * scale, (large * scale).at[3, 3].multiply(2.0)
    assert compared(lambda x: (x @ large) * scale, lambda x: x @ same, X)
    assert not compared(lambda x: (x @ large) * scale, lambda x: x @ off, X)


def test_infinities_of_a_mask_are_compared_as_they_are():
    mask = jnp.where(V > 0, 0.0, -jnp.inf)
    same, off = (jnp.asarray(np.asarray(m).T.copy()) for m in (mask, mask.at[2, 5].set(-7.0)))
    y = jnp.ones((8, 8))
    assert compared(lambda x: x + mask, lambda x: x + same.T, y)
    assert not compared(lambda x: x + mask, lambda x: x + off.T, y)


def test_arrays_that_functions_of_equations_close_over_distinguish_them():
    """Their texts are the same."""
    inside = [jax.make_jaxpr(lambda x, c=c: x + c)(X) for c in (V[:4], W[:4], V[:4])]
    equations = [Equation(jax.lax.sin_p, {"jaxpr": j}, 1, ()) for j in inside]
    one, other, again = (equivalence._key(e, ()) for e in equations)
    assert str(inside[0]) == str(inside[1])
    assert one == again != other


def test_products_that_were_merged_by_hand():
    both = jnp.concatenate([V, W], axis=1)
    found = compared(lambda x: (x @ V, x @ W), lambda x: tuple(jnp.split(x @ both, 2, axis=1)), X)
    assert found.outputs == (True, True)


def test_a_loop_equals_its_steps():
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ V), None), x, None, length=3)[0]

    def steps(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.tanh(x @ V)
        return x

    assert compared(loop, steps, X)


def test_which_arguments_are_weights_does_not_matter():
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    one, other = xrl_jax.from_jax(fn, X, V, weights=1), xrl_jax.from_jax(fn, X, V)
    assert xrl_jax.equivalent(one, other)


def norm(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def norm_by_rsqrt(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)


SPELLINGS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sums in another order": (lambda x: (x + 2 * x) + 3 * x, lambda x: x + (2 * x + 3 * x)),
    "gelu by a quotient": (
        lambda x: x * 0.5 * (1 + jax.lax.erf(x / 1.4142135)),
        lambda x: x * (0.5 * (1 + jax.lax.erf(x * 0.70710678))),
    ),
    "leading dimensions flattened": (
        lambda x: x.reshape(2, 2, 8) @ V,
        lambda x: (x.reshape(2, 2, 8).reshape(4, 8) @ V).reshape(2, 2, 8),
    ),
    "a product transposed": (lambda x: x @ V, lambda x: (V.T @ x.T).T),
    "layer norm": (norm, norm_by_rsqrt),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_layers_are_equal_in_any_spelling(name):
    assert compared(*SPELLINGS[name], X)


def test_some_spellings_are_equal_for_finite_values_only():
    """The reciprocal of e**100 is 0 in float32."""

    def silu(x: jax.Array) -> jax.Array:
        return x / (1 + jnp.exp(-x))

    assert not compared(jax.nn.silu, silu, X)
    assert compared(jax.nn.silu, silu, X, assume=("finite",))


def test_constants_are_compared_before_the_rules_are_through():
    """The e-graph goes on growing."""

    def attention(q: jax.Array, k: jax.Array) -> jax.Array:
        return jax.nn.softmax(q @ k.T / jnp.sqrt(8.0))

    def scaled(q: jax.Array, k: jax.Array) -> jax.Array:
        return jax.nn.softmax((q * 8.0**-0.5) @ k.T)

    found = compared(attention, scaled, X, X, assume=("finite",))
    assert found and "equal-by-value" in by(found)


def test_a_limit_is_named():
    found = compared(lambda x: (x @ V, x @ W), lambda x: (x @ W, x @ V), X, iterations=1)
    assert not found
    assert "limit on iterations; a higher limit may show more" in str(found)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ((jnp.tanh, X), (jnp.tanh, X[:2]), r"argument 0 .* float32\[4,8\], float32\[2,8\]"),
        ((jnp.tanh, X), (jnp.add, X, X), "1 and 2 arguments"),
        ((jnp.tanh, X), (jnp.sum, X), r"result 0 .* float32\[4,8\], float32\[\]"),
    ],
)
def test_programs_with_other_arguments_or_results_are_refused(one, other, message):
    with pytest.raises(ValueError, match=message):
        xrl_jax.equivalent(xrl_jax.from_jax(*one), xrl_jax.from_jax(*other))


def test_programs_with_effects_are_refused():
    def fn(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x[0, 0])
        return x

    program = xrl_jax.from_jax(fn, X)
    with pytest.raises(ValueError, match="effects"):
        xrl_jax.equivalent(program, program)


def test_a_proof_is_checked_rewrite_by_rewrite():
    found = compared(lambda x: jax.nn.relu(x.T).T @ V, lambda x: jax.nn.relu(x) @ V, X)
    proof = found.proof
    for n in range(len(proof.rewrites)):
        assert not check(proof._replace(rewrites=proof.rewrites[:n] + proof.rewrites[n + 1 :]))
    assert shortened(proof) == proof
