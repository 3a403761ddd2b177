"""Probabilities of actions that can be worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.rl.actions import Logits, draw, entropy, log_prob
from xrl_jax.rl.env import Action

# Two candidates: seven indices. The first is approved of with a probability of 3/4, the other 1/2.
LOGITS = Logits(
    jnp.log(jnp.array([0.1, 0.1, 0.1, 0.1, 0.3, 0.1, 0.2])), jnp.log(jnp.array([3.0, 1.0]))
)


def action(index: int, *approved: bool) -> Action:
    return Action(jnp.int32(index), jnp.array(approved))


@pytest.mark.parametrize(
    ("done", "offered", "probability"),
    [
        (action(4, True, False), (True, True), 0.3 * 0.75 * 0.5),
        (action(4, False, False), (True, True), 0.3 * 0.25 * 0.5),
        (action(4, False, True), (False, True), 0.3 * 0.5),
        (action(6, False, True), (False, False), 0.2),
    ],
)
def test_approvals_count_where_they_were_offered(done, offered, probability: float) -> None:
    found = float(jnp.exp(log_prob(LOGITS, done, jnp.array(offered))))
    assert found == pytest.approx(probability, rel=1e-5)


def test_entropy_is_that_of_the_index_and_of_offered_approvals() -> None:
    of_index = -sum(p * np.log(p) for p in (0.1, 0.1, 0.1, 0.1, 0.3, 0.1, 0.2))
    of_first = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    assert float(entropy(LOGITS, jnp.array([False, False]))) == pytest.approx(of_index, rel=1e-5)
    found = float(entropy(LOGITS, jnp.array([True, False])))
    assert found == pytest.approx(of_index + of_first, rel=1e-5)


def test_without_temperature_the_most_probable_is_drawn() -> None:
    drawn = draw(jax.random.key(0), LOGITS._replace(approval=jnp.array([3.0, -1.0])), 0.0)
    assert int(drawn.index) == 4
    np.testing.assert_array_equal(drawn.approved, [True, False])


def test_actions_are_drawn_by_their_probabilities() -> None:
    drawn = jax.vmap(lambda key: draw(key, LOGITS))(jax.random.split(jax.random.key(0), 4000))
    assert float((drawn.index == 4).mean()) == pytest.approx(0.3, abs=0.03)
    np.testing.assert_allclose(drawn.approved.mean(axis=0), [0.75, 0.5], atol=0.03)
