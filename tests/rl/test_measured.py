"""Rewards from measurements: on values that can be computed by hand, then a whole update."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl.test_train import CONFIG, params
from xrl_jax.rl.env import EnvState
from xrl_jax.rl.measured import (
    bonus_rewards,
    measured_update,
    potentials,
    savings,
    shaped_rewards,
)
from xrl_jax.rl.train import training_of

BOTH = jnp.array([True, True])
HALF, ONES = jnp.array([0.5, 0.5]), jnp.array([1.0, 1.0])  # discounts


def test_predictions_shape_the_rewards_and_the_measurement_decides_the_last() -> None:
    phi = jnp.array([0.0, 2.0, 5.0])  # percent predicted to be saved
    found = shaped_rewards(phi, BOTH, jnp.float32(8.0), HALF)
    np.testing.assert_allclose(found, [0.5 * 2.0 - 0.0, 8.0 - 2.0])


def test_undiscounted_rewards_add_up_to_the_measured_saving() -> None:
    phi = jnp.array([0.0, -3.0, 5.0])  # a loss on the way
    assert float(shaped_rewards(phi, BOTH, jnp.float32(8.0), ONES).sum()) == 8.0


def test_if_the_measurement_fails_predictions_are_the_rewards() -> None:
    phi = jnp.array([0.0, 2.0, 5.0])
    np.testing.assert_allclose(shaped_rewards(phi, BOTH, jnp.float32(np.nan), ONES), [2.0, 3.0])


def test_steps_after_the_end_of_an_episode_have_no_reward() -> None:
    phi, counts = jnp.array([0.0, 2.0, 2.0]), jnp.array([True, False])
    np.testing.assert_allclose(shaped_rewards(phi, counts, jnp.float32(8.0), HALF), [8.0, 0.0])


def test_without_shaping_untimed_steps_get_the_bonus() -> None:
    found = bonus_rewards(jnp.array([True, True, False]), jnp.float32(8.0), 0.125)
    np.testing.assert_allclose(found, [0.125, 8.0, 0.0])
    failed = bonus_rewards(jnp.array([True, True, False]), jnp.float32(np.nan), 0.125)
    np.testing.assert_allclose(failed, [0.125, 0.0, 0.0])


def test_potentials_restart_at_zero_with_each_episode() -> None:
    after = jnp.array([4.0, 3.0])
    np.testing.assert_allclose(potentials(jnp.float32(9.0), after, BOTH), [0.0, 5.0, 6.0])
    begins = jnp.array([False, True])  # the episode begins at 4
    np.testing.assert_allclose(potentials(jnp.float32(9.0), after, begins), [0.0, 0.0, 1.0])


def test_changes_within_the_noise_count_once_they_add_up() -> None:
    saved, measured = savings(np.array([1.0, 1.0, 0.5, 1.0]), [0.98, 0.75, 0.625, np.nan], 0.03)
    np.testing.assert_allclose(saved, [0.0, 25.0, -12.5, np.nan])
    np.testing.assert_allclose(measured, [1.0, 0.75, 0.625, 1.0])
    saved, measured = savings(measured, [0.96, 0.75, 0.625, 1.0], 0.03)
    np.testing.assert_allclose(saved, [4.0, 0.0, 0.0, 0.0], atol=1e-4)


@pytest.fixture(scope="module")
def one_update():
    """Run an update of eight steps, every four of which are timed; timings equal predictions."""
    config, asked = dataclasses.replace(CONFIG, steps=8, updates=1), []
    given = params(2)
    start = np.asarray(given.start.seconds)

    def relative_time(index: int, state: EnvState) -> float:
        asked.append(index)
        return float(state.seconds / start[index])

    update = measured_update(config, relative_time, interval=4, noise=0.0)
    state = training_of(config).init(jax.random.key(0), given)
    after, metrics = update(state, given)
    return state, after, metrics, asked


@pytest.mark.slow
def test_every_environment_is_timed_after_each_segment(one_update) -> None:
    assert one_update[3] == [0, 1, 0, 1]


@pytest.mark.slow
def test_the_next_segment_starts_from_the_measured_times(one_update) -> None:
    before, after, metrics, _ = one_update
    relative = after.envs.seconds / params(2).start.seconds
    np.testing.assert_allclose(after.timed, jnp.where(after.envs.done, 1.0, relative))
    assert np.isfinite(float(metrics.reward))
    leaves = zip(jax.tree.leaves(before.weights), jax.tree.leaves(after.weights), strict=True)
    assert any(not np.array_equal(a, b) for a, b in leaves)
