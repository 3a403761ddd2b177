"""The reference is the traced program in double precision, with an error bar on every element."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.accept.reference import reference
from xrl_jax.frontends.jaxpr import from_jax

THIRD = np.float32(1) / np.float32(3)


def of(fn, *args):
    return reference(from_jax(fn, *args))(args)


def test_casts_and_constants_are_computed_in_float64():
    def fn(x):
        return (x + 1e-12).astype(jnp.bfloat16).astype(jnp.float32) * jnp.float32(3)

    found = of(fn, jnp.ones(2))
    assert found.exact[0].dtype == np.float64 and found.narrow == ()
    assert found.exact[0] == pytest.approx(3 + 3 * float(np.float32(1e-12)), rel=1e-15)


def test_arrays_that_a_function_closes_over_become_float64():
    w = jnp.full((3, 2), THIRD)

    def fn(x):
        return jax.lax.dot(x, w)  # refuses arguments of two dtypes

    found = of(fn, jnp.ones((1, 3)))
    assert found.exact[0].tolist() == [[3 * float(THIRD)] * 2]


def test_control_flow_is_computed_in_float64():
    def fn(x):
        last, rows = jax.lax.scan(lambda c, y: (c * THIRD, c + y), jnp.float32(1), x)
        chosen = jax.lax.cond(x[0] > 0, lambda v: v * THIRD, lambda v: v, last)
        return rows, jax.lax.fori_loop(0, 2, lambda _, c: c * THIRD, chosen)

    found = of(fn, jnp.ones(3))
    third = float(THIRD)
    assert found.narrow == ()
    assert found.exact[0] == pytest.approx([2, 1 + third, 1 + third**2], rel=1e-15)
    assert found.exact[1] == pytest.approx(third**6, rel=1e-14)


def test_opaque_equations_are_computed_in_float64_if_possible():
    index = jnp.asarray([1, 1])

    def fn(x):
        return jnp.sort(x.at[index].add(THIRD))[::-1], jnp.linalg.solve(3 * jnp.eye(3), x)

    found = of(fn, jnp.zeros(3).at[0].set(1.0))
    assert found.narrow == ()
    assert found.exact[0] == pytest.approx([1, 2 * float(THIRD), 0], rel=1e-15)
    assert found.exact[1] == pytest.approx([1 / 3, 0, 0], rel=1e-15)


def test_equations_that_cannot_be_computed_in_float64_are_named():
    def fn(x):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        return jax.lax.bitcast_convert_type(bits, jnp.float32) * THIRD

    found = of(fn, jnp.ones(2))
    assert found.narrow == ("bitcast_convert_type",)
    assert found.exact[0].tolist() == [float(THIRD)] * 2


def test_integers_and_keys_keep_their_types():
    key = jax.random.key(3)
    found = of(lambda n, k: (n + 1, k), jnp.arange(3), key)
    assert found.exact[0].tolist() == [1, 2, 3] and found.exact[0].dtype == np.int32
    assert (found.exact[1] == np.asarray(jax.random.key_data(key))).all()


def test_results_carry_their_rounding_error():
    found = of(lambda x: x * x, jnp.asarray([3.0, THIRD]))
    assert found.error[0] == pytest.approx([0.0, float(THIRD) ** 2 * 2.0**-24])
    assert of(lambda x: -x, jnp.asarray([THIRD])).error[0].tolist() == [0.0]


def test_the_error_estimate_of_a_sum_comes_from_its_terms():
    found = of(lambda x, y: x @ y, jnp.asarray([[1e4, 0.0], [1.0, 1.0]]), jnp.ones((2, 1)))
    assert found.error[0][:, 0] / 2.0**-24 == pytest.approx([1e4, np.sqrt(2)], rel=1e-3)


def test_masked_values_do_not_affect_the_error_of_a_maximum():
    """An attention's mask adds -1e9 to ignored scores, which leaves the largest score as exact as
    before.
    """
    x = jnp.asarray([0.1, THIRD, 1.0])

    def fn(x):
        return jnp.max(x * THIRD + jnp.asarray([0.0, 0.0, -1e9]))

    assert of(fn, x).error[0] == pytest.approx(THIRD**2 * 2.0**-24, rel=0.5)


def recurrent_layer(state, row):
    """Return the state after one more row, twice."""
    state = jnp.tanh(state @ jnp.outer(row, row) / 48 + row)
    return state, state


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.nn.softmax(x @ x.T / 7),
        lambda x: jnp.tanh(x @ x.T) @ x,
        lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5),
        lambda x: jnp.cumsum(x, -1) * jax.nn.gelu(x),
        lambda x: jnp.take(x @ x.T, jnp.asarray([3, 1]), axis=0).astype(jnp.bfloat16),
        lambda x: jax.lax.scan(lambda c, y: (jnp.sin(c + y), c), x[0], x)[1][1:],
        lambda x: jax.lax.scan(recurrent_layer, x[:8] / 9, jnp.tile(x, (4, 1)))[1],
        lambda x: jax.lax.fori_loop(0, 5, lambda _, y: jnp.tanh(y @ x.T @ x / 32), x),
        lambda x: jnp.linalg.solve(x[:, :32] + 9 * jnp.eye(32), x),
    ],
    ids=[
        *("softmax", "products", "normalisation", "gelu", "bfloat16"),
        *("scan", "recurrent", "while", "solve"),
    ],
)
def test_error_estimates_are_as_large_as_the_errors(fn):
    x = jax.random.normal(jax.random.key(0), (32, 48))
    found = of(fn, x)
    error = np.abs(np.asarray(fn(x), np.float64) - found.exact[0]) / found.error[0]
    assert error.max() < 32 and 0.1 < np.median(error) < 8


def test_results_that_a_rounding_error_could_change_are_marked():
    x = jnp.asarray([0.5, 1.0, 1.5])

    def fn(x):
        y = (x * THIRD) * 3
        return y >= 1, jnp.floor(y), jnp.argmax(jnp.stack([y, y + 1]), 0), jnp.argmax(y - y)

    found = of(fn, x)
    assert found.error[0].tolist() == [False, True, False]
    assert found.error[1].tolist() == [0.0, 1.0, 0.0]
    assert found.error[2].tolist() == [False, False, False]
    assert bool(found.error[3])


def test_an_uncertain_select_has_an_error_of_the_difference():
    found = of(lambda x: jnp.where(x * THIRD * 3 > 1, x, 5.0 * x), jnp.asarray([0.5, 1.0]))
    assert found.error[0] == pytest.approx([0.0, 4.0], rel=1e-3)


def test_the_result_of_an_uncertain_branch_has_an_infinite_error():
    def fn(x, y):
        return jax.lax.cond(y * THIRD * 3 > x, lambda: y, lambda: 2 * y)

    assert of(fn, jnp.float32(1), jnp.float32(1)).error[0] == np.inf
    assert of(fn, jnp.float32(1), jnp.float32(2)).error[0] == 0.0


def test_a_loop_whose_end_is_uncertain_has_an_infinite_error():
    def fn(x):
        return jax.lax.while_loop(lambda c: c < 1, lambda c: c + x * THIRD, jnp.float32(0))

    assert of(fn, jnp.float32(1)).error[0] == np.inf
    assert 0 < of(fn, jnp.float32(0.9)).error[0] < 1e-6


def test_a_loop_may_carry_keys_and_integers():
    def fn(x):
        def step(state, _):
            key, count, y = state
            key, own = jax.random.split(key)
            return (key, count + 1, y * THIRD + jax.random.uniform(own)), count

        last, counts = jax.lax.scan(step, (jax.random.key(0), 0, x), length=3)
        return last[2], counts, jax.lax.cond(last[1] > 2, lambda k: k, jnp.flip, counts)

    found = of(fn, jnp.float32(1))
    assert 0 < found.error[0] < 1e-6
    assert found.exact[1].tolist() == found.exact[2].tolist() == [0, 1, 2]
    assert not found.error[1].any() and not found.error[2].any()


def test_a_nan_survives_a_maximum_under_a_sum():
    def fn(x):
        return jnp.sum(jnp.maximum(x, 0.0), axis=1)

    x = jnp.ones((64, 1024)).at[3, 3].set(jnp.nan)
    for errors in (True, False):
        found = reference(from_jax(fn, x), errors=errors)((x,))
        np.testing.assert_array_equal(np.isnan(found.exact[0]), np.arange(64) == 3)
