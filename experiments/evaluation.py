"""Evaluation of a policy in its environment, compared with greedy search and chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.rl.actions import Logits
from xrl_jax.rl.decode import by_chance, by_gain, by_network, least_seconds
from xrl_jax.rl.env import EnvParams, EnvState, batch_axes
from xrl_jax.rl.networks import NetworkConfig
from xrl_jax.runtime.engine_jit import engine_jit

N = 4  # rollouts of the policy and of chance; the best of them counts
_STEPS = 4  # steps per action of the horizon, because a macro-action takes several
# For each rollout, the choice that it follows (policy, greedy search, chance) and its temperature.
_ROLLOUTS = ((0, 0.0), *((0, 1.0),) * (N - 1), (1, 0.0), *((2, 1.0),) * N)


class Reached(NamedTuple):
    """Least predicted seconds that rollouts have met on each program [K], relative to its own."""

    policy: np.ndarray  # best of one rollout by the most probable actions and N - 1 sampled ones
    greedy: np.ndarray  # each step applies the rule of the largest predicted gain wherever it gains
    chance: np.ndarray  # best of N rollouts

    def by_program(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the values by program, then by field."""
        ways = self._asdict().items()
        return {name: {way: float(v[k]) for way, v in ways} for k, name in enumerate(names)}


def evaluator(network: NetworkConfig, params: EnvParams) -> Callable[[Any, jax.Array], Reached]:
    """Return a function from a policy's weights and a key to `Reached`, compiled when first called.

    Args:
      params: environments of different programs, one each: `start` has a leading dimension [K].
    """
    n_steps = _STEPS * int(params.horizon)
    ways = jnp.array([way for way, _ in _ROLLOUTS])
    temperatures = jnp.array([t for _, t in _ROLLOUTS])

    @engine_jit
    def least(weights: Any, params: EnvParams, key: jax.Array) -> jax.Array:
        # Every rollout computes all three choices and follows one, so that the environment is
        # compiled only once.
        choices = by_network(network, weights), by_gain, by_chance

        def one(params: EnvParams, key: jax.Array, way: jax.Array, t: jax.Array) -> jax.Array:
            def choose(state: EnvState, params: EnvParams) -> Logits:
                logits = [choice(state, params) for choice in choices]
                return jax.tree.map(lambda *v: jnp.stack(v)[way], *logits)

            return least_seconds(choose, params, key, t, n_steps)

        rollouts = jax.vmap(one, in_axes=(None, 0, 0, 0))
        of_all = jax.vmap(rollouts, in_axes=(batch_axes(params), None, None, None))
        return of_all(params, jax.random.split(key, len(ways)), ways, temperatures)

    def evaluate(weights: Any, key: jax.Array) -> Reached:
        weights = jax.device_get(weights)  # else all devices of a training would repeat this
        found, way = np.asarray(least(weights, params, key)), np.asarray(ways)
        return Reached(*(found[:, way == i].min(axis=1) for i in range(3)))

    return evaluate
