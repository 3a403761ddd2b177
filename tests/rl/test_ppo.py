"""Advantages and losses, compared with values that can be computed by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from xrl_jax.rl.ppo import (
    advantages,
    clipped_surrogate,
    entropy,
    mean_where,
    normalised,
    timed_reward,
)

REWARDS = jnp.array([1.0, 0.0, 2.0])
VALUES = jnp.array([1.0, 2.0, 4.0, 8.0])
HALF = jnp.full(3, 0.5)


def test_the_reward_is_the_saving_since_the_last_timing() -> None:
    saved, timed = timed_reward(
        timed=jnp.array([1.0, 1.0, 0.75]),
        relative=jnp.array([0.75, 0.75, 1.0]),
        due=jnp.array([True, False, False]),
        counts=jnp.array([True, True, False]),  # the last begins an episode
        bonus=0.125,
    )
    np.testing.assert_allclose(saved, [25.0, 0.125, 0.0])
    np.testing.assert_allclose(timed, [0.75, 1.0, 1.0])


def test_with_records_only_new_minima_are_rewarded() -> None:
    """Times go 1 -> 1.25 -> 0.75 -> 1.0 -> 0.5: each of the two records saves a quarter."""
    timed, rewards = jnp.float32(1.0), []
    for relative in (1.25, 0.75, 1.0, 0.5):
        yes = jnp.bool_(True)
        reward, timed = timed_reward(timed, jnp.float32(relative), yes, yes, 0.0, records=True)
        rewards.append(float(reward))
    assert rewards == [0.0, 25.0, 0.0, 25.0]


def test_advantages_of_an_episode_that_terminates() -> None:
    # Errors: 1 + 2/2 - 1 = 1, 0 + 4/2 - 2 = 0, 2 + 0 - 4 = -2; each advantage adds a quarter of the
    # next one.
    found = advantages(
        REWARDS, jnp.array([0.5, 0.5, 0.0]), jnp.array([False, False, True]), VALUES, HALF
    )
    np.testing.assert_allclose(found, [0.875, -0.5, -2.0])


def test_a_truncated_episode_bootstraps_from_the_value_of_its_last_state() -> None:
    # The second step ends an episode: its error includes the next state's value, 4, and no later
    # advantage is added.
    found = advantages(
        REWARDS, jnp.array([0.5, 0.5, 0.5]), jnp.array([False, True, False]), VALUES, HALF
    )
    np.testing.assert_allclose(found, [1.0, 0.0, 2.0])


def test_with_lambda_1_advantages_are_returns_minus_values() -> None:
    found = advantages(
        REWARDS, jnp.array([0.5, 0.5, 0.0]), jnp.array([False, False, True]), VALUES, jnp.ones(3)
    )
    np.testing.assert_allclose(found + VALUES[:3], [1 + 0 / 2 + 2 / 4, 0 + 2 / 2, 2.0])


def test_the_steps_of_a_macro_action_count_as_one_step() -> None:
    # The first two steps are one action: their rewards add up, and the value between them cancels.
    discounts, lambdas = jnp.array([1.0, 0.5, 0.0]), jnp.array([1.0, 0.5, 0.5])
    ends = jnp.array([False, False, True])
    found = advantages(REWARDS, discounts, ends, VALUES, lambdas)
    joined = advantages(
        jnp.array([1.0 + 0.0, 2.0]), discounts[1:], ends[1:], jnp.array([1.0, 4.0, 8.0]), HALF[1:]
    )
    np.testing.assert_allclose(found[jnp.array([0, 2])], joined)


def test_the_surrogate_gains_nothing_beyond_the_clip() -> None:
    ratio, advantage = jnp.array([1.5, 1.5, 0.5, 0.5]), jnp.array([1.0, -1.0, 1.0, -1.0])
    found = clipped_surrogate(ratio, advantage, 0.2)
    np.testing.assert_allclose(found, [1.2, -1.5, 0.5, -0.8], rtol=1e-6)


def test_entropy_leaves_masked_choices_out() -> None:
    np.testing.assert_allclose(entropy(jnp.array([0.0, 0.0, -1e9])), np.log(2), rtol=1e-6)
    np.testing.assert_allclose(entropy(jnp.array([3.0, -1e9, -1e9])), 0.0, atol=1e-6)


def test_means_leave_out_masked_values() -> None:
    values, where = jnp.array([1.0, 3.0, 100.0]), jnp.array([True, True, False])
    assert float(mean_where(values, where)) == 2.0
    assert float(mean_where(values, jnp.zeros(3, bool))) == 0.0
    np.testing.assert_allclose(normalised(values, where)[:2], [-1.0, 1.0], rtol=1e-6)
