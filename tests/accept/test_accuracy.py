"""A result's error against float64 may be a few times the original's error, and not more."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.accept.accuracy import TIMES_ORIGINAL, assess, references, relative_error
from xrl_jax.frontends.jaxpr import from_jax

INF, NAN = float("inf"), float("nan")
X = np.linspace(0.5, 2.0, 7, dtype=np.float32)


def check(original, optimised, *args, tolerance=None):
    exact = references(from_jax(original, *args), [args])
    return assess(original, optimised, exact, [args], tolerance=tolerance)


@pytest.mark.parametrize(
    ("got", "reference", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),  # relative to the largest entry
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([1.0, INF], [2.0, INF], 0.5),
        ([1.0, -INF], [1.0, INF], INF),
        ([0.0], [0.0], 0.0),
        ([1e-9], [0.0], INF),
        ([NAN], [NAN], 0.0),
        ([3 + 4j], [0 + 5j], np.hypot(3, 1) / 5),
    ],
)
def test_relative_error(got, reference, error):
    assert relative_error(np.asarray(got), np.asarray(reference)) == pytest.approx(error)


def test_the_error_of_bfloat16_is_taken_in_float64():
    got = jnp.asarray([1.0, 2.0], jnp.bfloat16)
    assert relative_error(got, np.asarray([1.0, 2.0 + 2**-30])) == pytest.approx(2**-31)


def test_the_original_itself_is_accurate():
    accuracy = check(jnp.exp, jnp.exp, X)
    assert accuracy.ok and accuracy.reason == "" and accuracy.element < 1
    assert 0.0 < accuracy.error == accuracy.original_error < 1e-6


def test_four_times_the_originals_error_is_the_default_tolerance():
    def rough(x):
        return (x * jnp.float32(1 + 1e-4)).astype(jnp.float32)

    exact = references(from_jax(lambda x: x, X), [[X]])
    twice = assess(rough, lambda x: x * (1 + 2e-4), exact, [[X]])
    assert twice.ok and twice.tolerance == pytest.approx(TIMES_ORIGINAL * 1e-4, rel=1e-2)
    five = assess(rough, lambda x: x * (1 + 5e-4), exact, [[X]])
    assert not five.ok
    assert five.reason == "the result's error against float64 is 5.00e-04, allowed is 4.00e-04"


def test_for_an_exact_original_a_few_units_in_the_last_place_are_allowed():
    assert check(lambda x: x * 2, lambda x: x * np.float32(2 + 4e-7), X).ok
    assert not check(lambda x: x * 2, lambda x: x * np.float32(2 + 4e-6), X).ok


def test_a_given_tolerance_replaces_the_default():
    assert check(lambda x: x, lambda x: x * np.float32(1.01), X, tolerance=0.02).ok
    assert not check(jnp.exp, jnp.exp, X, tolerance=0.0).ok


def test_integers_and_booleans_must_be_equal():
    n = jnp.arange(4)
    assert check(lambda n: n > 1, lambda n: n >= 2, n).ok
    accuracy = check(lambda n: n, lambda n: n + 1, n)
    assert not accuracy.ok and accuracy.reason == "result 0 (int32) differs from the original's"


@pytest.mark.parametrize(
    "other", [lambda x: x[:3], lambda x: x.astype(jnp.bfloat16)], ids=["shape", "dtype"]
)
def test_shape_and_dtype_must_be_those_of_the_original(other):
    accuracy = check(lambda x: x, other, jnp.asarray(X))
    assert not accuracy.ok and accuracy.reason.endswith("the original gives float32[7]")


def test_nan_and_infinity_must_be_where_the_originals_are():
    x = np.array([-1.0, 0.0, 1.0], np.float32)
    assert check(jnp.log, jnp.log, x).ok  # nan, -inf, 0
    assert not check(jnp.log, lambda x: jnp.nan_to_num(jnp.log(x)), x).ok


def test_values_that_overflow_only_in_float32_are_compared_with_the_original():
    x = np.array([1.0, 100.0], np.float32)  # exp(100) is finite in float64
    assert check(jnp.exp, jnp.exp, x).ok


def test_the_worst_of_all_samples_and_results_counts():
    def wrong_at_two(x):
        return x, jnp.where(x == 2.0, 0.0, x)

    samples = [[jnp.ones(3)], [jnp.full(3, 2.0)]]
    exact = references(from_jax(lambda x: (x, x), samples[0][0]), samples)
    accuracy = assess(lambda x: (x, x), wrong_at_two, exact, samples)
    assert accuracy.error == 1.0 and not accuracy.ok


def test_empty_results_agree():
    assert check(lambda x: x, lambda x: x, jnp.zeros((0, 3))).ok


def test_each_element_may_err_only_as_far_as_rounding_explains():
    """The bound holds for each element, so a large value elsewhere does not hide its error."""
    x = jnp.asarray([1e6, 1.0, 1.0])

    def spread(x):  # as a transform of the values in one tile does
        return x * 2 + 1e-8 * jnp.max(x)

    accuracy = check(lambda x: x * 2, spread, x)
    assert accuracy.error < accuracy.tolerance and not accuracy.ok
    assert accuracy.reason.startswith("element [1] of result 0 is 2.0")
    assert "times the error allowed there" in accuracy.reason


def test_an_element_may_err_where_large_numbers_cancel():
    def before(x):
        return (x + 1e4) - 1e4

    assert check(before, lambda x: x, X).ok  # which is more exact
    assert check(lambda x: x.sum() - 1, lambda x: x[::-1].sum() - 1, X).ok


def test_an_index_may_differ_where_the_reference_shows_a_tie():
    x = jnp.asarray([0.1, 0.3, 0.3, 0.2])

    def tied(x):
        return jnp.argmax(jnp.tanh(x * 3))

    def the_other(x):
        return jnp.int32(2) + 0 * tied(x)

    assert check(tied, the_other, x).ok
    assert not check(tied, the_other, x.at[2].set(0.29)).ok


def test_infinity_must_not_spread():
    x = jnp.asarray([jnp.inf, 1.0, 2.0])
    accuracy = check(lambda x: x, lambda x: x + 0 * x.sum(), x)
    assert accuracy.reason == "result 0 differs from the original's in NaN or infinity, in 3 places"


def test_prepared_weights_can_be_freed_before_the_reference_runs():
    ran: list[str] = []

    def noted(name):
        return lambda x: ran.append(name) or x

    samples = [[jnp.ones(3)], [jnp.zeros(3)]]
    exact = references(from_jax(lambda x: x, *samples[0]), samples)
    assess(
        noted("original"),
        noted("optimised"),
        lambda: ran.append("reference") or exact(),
        samples,
        after_runs=lambda: ran.append("given up"),
    )
    assert ran == [*["original", "optimised"] * 2, "given up", "reference"]
