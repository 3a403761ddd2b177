"""Rollouts: at each step the candidate of the largest logit, or one drawn by the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.rl.agent import agent_of
from xrl_jax.rl.env import EnvParams, EnvState, reset, step
from xrl_jax.rl.networks import NetworkConfig

# Logits [M + 1] of a state's candidates and of No-Op, the last.
Choice = Callable[[EnvState, EnvParams], jax.Array]
_LEAST_GAIN = 1e-6  # share of the first state's seconds that greedy search takes for a gain


def by_network(config: NetworkConfig, weights: Any) -> Choice:
    """Logits of a policy."""
    agent = agent_of(config)
    return lambda state, params: agent.say(weights, agent.see(state, params), params).logits


def by_gain(state: EnvState, params: EnvParams) -> jax.Array:
    """What greedy search takes where nothing is drawn: the largest predicted gain while there is
    one.
    """
    gain = -state.moves.seconds / params.start.seconds
    return jnp.append(jnp.where(state.moves.valid, gain, -jnp.inf), _LEAST_GAIN)


def by_chance(state: EnvState, params: EnvParams) -> jax.Array:
    """Any candidate, and now and then No-Op."""
    return jnp.append(jnp.where(state.moves.valid, 0.0, -jnp.inf), -10.0)


class Trail(NamedTuple):
    """What was done in each step; entry -1 where nothing was rewritten."""

    entry: jax.Array  # [T] int32
    root: jax.Array  # [T] int32
    partner: jax.Array  # [T] int32
    op: jax.Array  # [T] int32, of the root
    shape: jax.Array  # [T, R] int32
    rank: jax.Array  # [T] int32
    seconds: jax.Array  # [T] float32, after the step
    candidates: jax.Array  # [T] int32, how many there were to choose from


def follow(
    choose: Choice,
    params: EnvParams,
    state: EnvState,
    key: jax.Array,
    temperature: jax.Array,
    n_steps: int,
) -> tuple[EnvState, Trail]:
    """So many steps; after No-Op nothing more is done.

    Args:
      temperature: 0 takes the largest logit, 1 draws by the probabilities.
    """

    def one(state: EnvState, key: jax.Array) -> tuple[EnvState, Trail]:
        to_act, to_step = jax.random.split(key)
        logits = choose(state, params)
        noise = jax.random.gumbel(to_act, logits.shape)
        action = jnp.argmax(logits + temperature * noise)
        after, outcome = step(to_step, state, jnp.where(state.done, params.slots, action), params)
        after = jax.tree.map(lambda old, new: jnp.where(state.done, old, new), state, after)
        slot = jnp.minimum(action, params.slots - 1)
        root, f = state.moves.root[slot], state.graph.nodes
        applied = outcome.applied & ~state.done
        return after, Trail(
            jnp.where(applied, state.moves.entry[slot], -1),
            root,
            state.moves.partner[slot],
            f.op[root],
            f.shape[root],
            f.rank[root],
            after.seconds,
            jnp.where(state.done, 0, state.moves.n),
        )

    return jax.lax.scan(one, state, jax.random.split(key, n_steps))


def least_met(
    choose: Choice, params: EnvParams, key: jax.Array, temperature: jax.Array, n_steps: int
) -> jax.Array:
    """Least seconds that a rollout meets, relative to where it begins."""
    to_begin, to_go = jax.random.split(key)
    _, trail = follow(choose, params, reset(to_begin, params), to_go, temperature, n_steps)
    return jnp.minimum(jnp.min(trail.seconds) / params.start.seconds, 1.0)
