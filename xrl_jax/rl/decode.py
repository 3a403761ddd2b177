"""Rollouts that take the most probable action at each step, or sample one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.graph.graph import TensorGraph
from xrl_jax.rl.actions import Logits, draw
from xrl_jax.rl.agent import agent_of
from xrl_jax.rl.env import (
    KINDS,
    LEAST_GAIN,
    EnvParams,
    EnvState,
    allowed,
    ended_state,
    same_rule,
    select,
    step,
)
from xrl_jax.rl.networks import NetworkConfig

Choice = Callable[[EnvState, EnvParams], Logits]


def by_network(config: NetworkConfig, weights: Any) -> Choice:
    """Return a `Choice` that gives the logits of a policy."""
    agent = agent_of(config)
    return lambda state, params: agent.apply(weights, agent.observe(state, params), params).logits


def by_gain(state: EnvState, params: EnvParams) -> Logits:
    """Return logits that reproduce greedy search at temperature 0: the rule with the largest
    predicted gain is applied wherever it gains, until none gains.
    """
    gain = -state.candidates.seconds / params.start.seconds
    same = same_rule(state.candidates, params.table)
    largest = jnp.max(jnp.where(same, gain, -jnp.inf), axis=1)  # gain of each one's rule
    once, macro = allowed(state.candidates, params.table)[:-1].reshape(KINDS, -1)
    takes = jnp.stack([once & (jnp.sum(same, axis=1) == 1), macro])
    index = jnp.append(jnp.where(takes, largest, -jnp.inf), LEAST_GAIN)
    return Logits(index, jnp.where(gain > LEAST_GAIN, 1.0, -1.0))


def by_chance(state: EnvState, params: EnvParams) -> Logits:
    """Return logits by which all allowed actions are equally likely, except for a rarer No-Op."""
    index = jnp.where(allowed(state.candidates, params.table), 0.0, -jnp.inf)
    return Logits(index.at[params.no_op].set(-10.0), jnp.zeros(params.slots))


class Trail(NamedTuple):
    """The rewrites of a rollout's steps; variant -1 where nothing was rewritten."""

    variant: jax.Array  # [T, K] int32
    root: jax.Array  # [T, K] int32
    owner: jax.Array  # [T, K] int32, of the root before the step, as are op, shape and rank
    op: jax.Array  # [T, K] int32
    shape: jax.Array  # [T, K, R] int32
    rank: jax.Array  # [T, K] int32
    seconds: jax.Array  # [T] float32, after the step
    candidates: jax.Array  # [T] int32, how many there were to choose from before the step


class Best(NamedTuple):
    """The cheapest state that a rollout has reached."""

    graph: TensorGraph
    owner: jax.Array  # [N] int32
    seconds: jax.Array
    steps: jax.Array  # int32, how many led to it


class Rollout(NamedTuple):
    """The state of a rollout."""

    state: EnvState
    n: jax.Array  # int32, steps made
    best: Best


def begin(params: EnvParams) -> Rollout:
    """Return a rollout before its first step, which only begins the episode."""
    state, none = ended_state(params), jnp.int32(0)
    return Rollout(state, none, Best(state.graph, state.owner, state.seconds, none))


def follow(
    choose: Choice,
    params: EnvParams,
    rollout: Rollout,
    key: jax.Array,
    temperature: jax.Array,
    n_steps: int,
) -> tuple[Rollout, Trail]:
    """Advance a rollout by `n_steps` steps; after the end of its episode it stays unchanged.

    Args:
      temperature: see `actions.draw`.
    """

    def one(rollout: Rollout, key: jax.Array) -> tuple[Rollout, Trail]:
        state = rollout.state
        finished = state.done & (rollout.n > 0)
        act_key, step_key = jax.random.split(key)
        action = draw(act_key, choose(state, params), temperature)
        after, outcome = step(step_key, state, action, params)
        after = select(finished, state, after)
        n = jnp.where(finished, rollout.n, rollout.n + 1)
        reached = Best(after.graph, after.owner, after.seconds, n)
        best = select(after.seconds < rollout.best.seconds, reached, rollout.best)
        f, root = state.graph.nodes, outcome.root
        return Rollout(after, n, best), Trail(
            jnp.where(finished, -1, outcome.variant),
            root,
            state.owner[root],
            f.op[root],
            f.shape[root],
            f.rank[root],
            after.seconds,
            jnp.where(outcome.index_counts, state.candidates.n, 0),
        )

    return jax.lax.scan(one, rollout, jax.random.split(key, n_steps))


def least_seconds(
    choose: Choice, params: EnvParams, key: jax.Array, temperature: jax.Array, n_steps: int
) -> jax.Array:
    """Return the least seconds that a rollout reaches, relative to its start."""
    done, _ = follow(choose, params, begin(params), key, temperature, n_steps + 1)
    return done.best.seconds / params.start.seconds
