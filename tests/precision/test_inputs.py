"""Typical inputs: the user's, and drawn ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.precision.inputs import calibration_inputs, drawn_inputs

W = np.ones((3, 2), np.float32)
TOKENS = np.asarray([5, 7, 5], np.int32)
X = np.asarray([[1.0, -2.0, 4.0]], np.float32)


def fn(w: jax.Array, x: jax.Array, tokens: jax.Array) -> jax.Array:
    return x @ w + tokens.sum()


PROGRAM = from_jax(fn, W, X, TOKENS, weights=0)
LEAVES = [W, X, TOKENS]


def test_batches_are_put_beside_the_weights() -> None:
    ((w, x, tokens),) = calibration_inputs(PROGRAM, LEAVES, [(2 * X, TOKENS + 1)])
    assert w is W
    np.testing.assert_array_equal(x, [[2.0, -4.0, 8.0]])
    np.testing.assert_array_equal(tokens, [6, 8, 6])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (X, r"calibration\[0\] is of type ndarray: give a tuple"),
        ((X,), r"calibration\[0\] has 1 arguments, not the 2 without weights"),
        ((X, TOKENS, X), r"calibration\[0\] has 3 arguments, not the 2 without weights"),
        ((X[:, :2], TOKENS), r"has an array float32\[1, 2\] where the example has float32\[1, 3\]"),
        ((X, TOKENS * 1.0), r"has an array float64\[3\] where the example has int32\[3\]"),
    ],
)
def test_a_batch_unlike_the_example_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibration_inputs(PROGRAM, LEAVES, [batch])


def test_drawn_elements_are_elements_of_the_known_inputs() -> None:
    known = [LEAVES, [W, 10 * X, TOKENS]]
    drawn = drawn_inputs(PROGRAM, known, 20, seed=0)
    assert all(w is W for w, _, _ in drawn)
    assert {float(v) for _, x, _ in drawn for v in x.reshape(-1)} == {1, -2, 4, 10, -20, 40}
    assert {int(v) for _, _, tokens in drawn for v in tokens} == {5, 7}


def test_draws_repeat_with_the_seed() -> None:
    a, b, c = (drawn_inputs(PROGRAM, [LEAVES], 1, seed=s)[0][1] for s in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert (np.asarray(a) != np.asarray(c)).any()


def test_where_all_elements_are_equal_others_are_drawn() -> None:
    x = jnp.zeros((1, 3))
    ((_, drawn, _),) = drawn_inputs(PROGRAM, [[W, x, TOKENS]], 1, seed=0)
    assert len(set(np.asarray(drawn).reshape(-1).tolist())) == 3


def test_the_type_stays_as_weak_as_the_example() -> None:
    program = from_jax(lambda x: x * 2, 3.0)
    (example,) = [jnp.asarray(3.0)]
    ((drawn,),) = drawn_inputs(program, [[example]], 1, seed=0)
    assert getattr(drawn, "weak_type", False) == getattr(example, "weak_type", False)
