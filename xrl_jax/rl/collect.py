"""Acting in many environments at once: the state of training, and the recording of rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from xrl_jax.rl import actions, ppo
from xrl_jax.rl.agent import Agent
from xrl_jax.rl.env import Action, EnvParams, EnvState, batch_axes, maskable, reset, select, step
from xrl_jax.rl.networks import Output
from xrl_jax.rl.train_config import TrainConfig
from xrl_jax.runtime.engine_jit import wide


class TrainState(NamedTuple):
    """The state of training: all that is needed to continue it."""

    weights: Any  # of the network
    optimiser: Any
    envs: EnvState  # [B, ...]
    key: jax.Array
    best: jax.Array  # [B] least seconds seen in each environment, relative to its start
    timed: jax.Array  # [B] time at the episode's last reward by time, relative to its start


class Transition(NamedTuple):
    """One step of one environment."""

    observation: Any  # see `rl.agent`
    action: Action
    maskable: jax.Array  # [M] bool, which entries of the mask counted
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    discount: jax.Array
    end: jax.Array
    counts: jax.Array
    index_counts: jax.Array  # the index counted
    macro: jax.Array  # a macro-action is under way after the step: the next index does not count
    seconds: jax.Array  # after the step
    terminated: jax.Array
    applied: jax.Array


@dataclass(frozen=True)
class Collector:
    """Collects rollouts of an agent.

    Attributes:
      axis: mesh axis along which environments are spread; None for one device.
      waits: after an episode has ended, the next one begins only with the next rollout.
    """

    config: TrainConfig
    agent: Agent
    optimiser: optax.GradientTransformation
    axis: str | None = None
    waits: bool = False

    def device_key(self, key: jax.Array) -> jax.Array:
        """Return a key that is specific to this device."""
        return key if self.axis is None else jax.random.fold_in(key, jax.lax.axis_index(self.axis))

    def observe(self, envs: EnvState, params: EnvParams) -> Any:
        """Return the agent's observation of each environment."""
        return jax.vmap(self.agent.observe, in_axes=(0, batch_axes(params)))(envs, params)

    def evaluate(self, weights: Any, observation: Any, params: EnvParams) -> Output:
        """Return logits and value for each observation of a batch."""

        def one(of_one: Any) -> Output:
            return self.agent.apply(weights, of_one, params)

        n = len(jax.tree.leaves(observation)[0])
        if wide() and n > self.agent.chunk_size:  # else intermediates exceed the memory
            return jax.lax.map(one, observation, batch_size=self.agent.chunk_size)
        return jax.vmap(one)(observation)

    def init(self, key: jax.Array, params: EnvParams) -> TrainState:
        """Return the initial state of training."""
        key, env_key, weight_key = jax.random.split(key, 3)
        keys = jax.random.split(self.device_key(env_key), params.start.counts.shape[0])
        envs = jax.vmap(reset, in_axes=(0, batch_axes(params)))(keys, params)
        first = jax.tree.map(lambda v: v[0], self.observe(envs, params))
        weights = self.agent.init(weight_key, first, params)
        best = jnp.ones_like(envs.seconds)
        return TrainState(weights, self.optimiser.init(weights), envs, key, best, best)

    def collect(self, state: TrainState, params: EnvParams) -> tuple[TrainState, Transition]:
        """Act in all environments; return the new state and transitions [T, B]."""
        act = jax.vmap(step, in_axes=(0, 0, 0, batch_axes(params)))
        mask_of = jax.vmap(maskable, in_axes=(0, 0, batch_axes(params)))

        def one(
            carry: tuple[EnvState, jax.Array, jax.Array], key: jax.Array
        ) -> tuple[Any, Transition]:
            envs, timed, first = carry
            act_key, step_key = jax.random.split(key)
            observation = self.observe(envs, params)
            logits, value = self.evaluate(state.weights, observation, params)
            action = jax.vmap(actions.draw)(jax.random.split(act_key, len(value)), logits)
            counted = mask_of(envs, action.index, params)
            after, outcome = act(jax.random.split(step_key, len(value)), envs, action, params)
            log_prob = jax.vmap(actions.log_prob)(logits, action, outcome.index_counts, counted)
            if self.waits:
                after = jax.vmap(select)(envs.done & ~first, envs, after)
            # `Outcome.reward` rewards every step by time; here the configuration says which steps.
            relative = after.seconds / params.start.seconds
            due = after.done | (after.t % self.config.reward_every == 0)
            macro = after.macro.left > 0
            reward, timed = ppo.timed_reward(
                timed, relative, due, outcome.counts, self.config.bonus, records=self.config.records
            )
            return (after, timed, jnp.bool_(False)), Transition(
                observation,
                action,
                counted,
                log_prob,
                value,
                self.config.reward_scale * reward,
                jnp.where(outcome.terminated, 0.0, jnp.where(macro, 1.0, self.config.gamma)),
                after.done | ~outcome.counts,
                outcome.counts,
                outcome.index_counts,
                macro,
                after.seconds,
                outcome.terminated,
                outcome.applied,
            )

        key, now = jax.random.split(state.key)
        keys = jax.random.split(self.device_key(now), self.config.steps)
        start = state.envs, state.timed, jnp.bool_(True)
        (envs, timed, _), transitions = jax.lax.scan(one, start, keys)
        return state._replace(envs=envs, timed=timed, key=key), transitions
