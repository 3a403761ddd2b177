"""Probabilities of actions, compared with values that can be computed by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.rl.actions import Logits, draw, entropy, log_prob
from xrl_jax.rl.env import Action

# Two candidates have five indices. They are in the mask with probabilities of 3/4 and 1/2.
LOGITS = Logits(jnp.log(jnp.array([0.2, 0.1, 0.4, 0.1, 0.2])), jnp.log(jnp.array([3.0, 1.0])))


def action(index: int, *mask: bool) -> Action:
    return Action(jnp.int32(index), jnp.array(mask))


@pytest.mark.parametrize(
    ("done", "index_counts", "maskable", "probability"),
    [
        (action(2, True, False), True, (True, True), 0.4 * 0.75 * 0.5),
        (action(2, False, False), True, (True, True), 0.4 * 0.25 * 0.5),
        (action(2, False, True), True, (False, True), 0.4 * 0.5),
        (action(4, False, True), True, (False, False), 0.2),
        (action(4, False, True), False, (True, False), 0.25),
        (action(4, False, True), False, (False, False), 1.0),
    ],
)
def test_log_prob_covers_only_choices_that_were_offered(
    done, index_counts, maskable, probability
) -> None:
    found = float(jnp.exp(log_prob(LOGITS, done, jnp.bool_(index_counts), jnp.array(maskable))))
    assert found == pytest.approx(probability, rel=1e-5)


def test_entropy_covers_only_choices_that_were_offered() -> None:
    of_index = -sum(p * np.log(p) for p in (0.2, 0.1, 0.4, 0.1, 0.2))
    of_first = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))

    def found(index_counts: bool, maskable: bool) -> float:
        return float(entropy(LOGITS, jnp.bool_(index_counts), jnp.array([maskable, False])))

    assert found(True, False) == pytest.approx(of_index, rel=1e-5)
    assert found(True, True) == pytest.approx(of_index + of_first, rel=1e-5)
    assert found(False, True) == pytest.approx(of_first, rel=1e-5)


def test_at_zero_temperature_the_most_probable_action_is_drawn() -> None:
    drawn = draw(jax.random.key(0), LOGITS._replace(mask=jnp.array([3.0, -1.0])), 0.0)
    assert int(drawn.index) == 2
    np.testing.assert_array_equal(drawn.mask, [True, False])


def test_actions_are_drawn_by_their_probabilities() -> None:
    drawn = jax.vmap(lambda key: draw(key, LOGITS))(jax.random.split(jax.random.key(0), 4000))
    assert float((drawn.index == 2).mean()) == pytest.approx(0.4, abs=0.03)
    np.testing.assert_allclose(drawn.mask.mean(axis=0), [0.75, 0.5], atol=0.03)
