"""Training a policy with PPO: `make_train(config)(key, params)` is one scan, to be jitted.

Everything is a function of the key: the same key and the same costs give the same parameters, bit
for bit. `jax.vmap(train, in_axes=(0, None))(keys, params)` trains several at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from xrl_jax.rl import actions, ppo
from xrl_jax.rl.agent import agent_of
from xrl_jax.rl.env import (
    Action,
    EnvParams,
    EnvState,
    batch_axes,
    batch_specs,
    either,
    offered,
    reset,
    step,
)
from xrl_jax.rl.networks import NetworkConfig, Output
from xrl_jax.runtime.engine_jit import wide


@dataclass(frozen=True)
class TrainConfig:
    """Settings of PPO; where they are X-RLflow's (its run_gn_ppo.py), that is said.

    Attributes:
      updates: rollouts, each with its updates.
      steps: of each environment in a rollout.
      epochs: passes over a rollout; 4 in X-RLflow.
      minibatches: of one pass.
      learning_rate: of Adam; 5e-4 in X-RLflow.
      falls: the rate does, to 0 in a line; it is constant in X-RLflow.
      gamma: discount of an action; 0.99 in X-RLflow.
      lambda_: of advantage estimation, as in X-RLflow.
      clip: of the ratio of probabilities, as in X-RLflow.
      value_weight: c1, as in X-RLflow.
      entropy_weight: c2; 0.01 in X-RLflow.
      max_gradient: norm at which gradients are clipped, as in X-RLflow.
      target_kl: an update ends where the policy has moved so far, as in X-RLflow.
      reward_scale: rewards are percent; values are learned in this unit. 1 in X-RLflow.
      reward_every: steps, after which what they saved is rewarded, as it is where an episode ends;
        5 in X-RLflow.
      bonus: percent, the reward of the other steps; 0.1 in X-RLflow, so that stalling pays.
      records: a step is rewarded for what it saves below the least time of the episode so far,
        since the best state of a rollout is what a search takes: a way to it that leads through
        dearer ones costs nothing. Not in X-RLflow, and not where times are measured.
    """

    network: NetworkConfig = field(default_factory=NetworkConfig)
    updates: int = 100
    steps: int = 32
    epochs: int = 2
    minibatches: int = 4
    learning_rate: float = 3e-3
    falls: bool = True
    gamma: float = 0.95
    lambda_: float = 0.95
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.003
    max_gradient: float = 0.5
    target_kl: float = 0.05
    reward_scale: float = 0.1
    reward_every: int = 1
    bonus: float = 0.0
    records: bool = True


PAPER = TrainConfig(
    network=NetworkConfig(
        encoder="candidates", width=64, layers=5, heads=1, greed=0.0, sweeps=False
    ),
    steps=100,
    epochs=4,
    minibatches=50,  # of 16, where there are eight environments
    learning_rate=5e-4,
    falls=False,
    gamma=0.99,
    entropy_weight=0.01,
    reward_scale=1.0,
    reward_every=5,
    bonus=0.1,
    records=False,
)
"""X-RLflow's own settings (its run_gn_ppo.py), without its code's defects."""


class TrainState(NamedTuple):
    """Where training stands; all that is needed to go on."""

    weights: Any  # of the network
    optimiser: Any
    envs: EnvState  # [B, ...]
    key: jax.Array
    best: jax.Array  # [B] least seconds an environment has met, relative to its start
    timed: jax.Array  # [B] of its episode, last rewarded, relative to its start


def restarted(state: TrainState) -> TrainState:
    """With the next step, all environments begin a new episode."""
    done = jnp.ones_like(state.envs.done)
    return state._replace(envs=state.envs._replace(done=done))


class Metrics(NamedTuple):
    """What one update tells; means over the rollout."""

    reward: jax.Array  # of a step, percent
    best: jax.Array  # [B] least seconds met so far, relative to the start
    entropy: jax.Array  # nats
    value_loss: jax.Array
    kl: jax.Array  # approximate, of the last minibatch
    terminated: jax.Array  # share of steps
    applied: jax.Array  # share of steps


class Transition(NamedTuple):
    """One step of one environment."""

    seen: Any  # see `rl.agent`
    action: Action
    offered: jax.Array  # [M] bool, whose approvals counted
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    discount: jax.Array
    end: jax.Array
    counts: jax.Array
    asked: jax.Array  # the index counted
    sweeps: jax.Array  # after the step a sweep is under way: the next index does not count
    seconds: jax.Array  # after the step
    terminated: jax.Array
    applied: jax.Array


class Shares(NamedTuple):
    """What each step of a minibatch counts in its means."""

    of_steps: jax.Array
    of_actions: jax.Array  # of those in which something was decided


class Training(NamedTuple):
    """The pieces of a training: all pure, to be jitted by who calls them.

    `update` is `collect`, which acts in all environments and gives transitions [T, B], and `learn`.
    """

    init: Callable[[jax.Array, EnvParams], TrainState]
    collect: Callable[[TrainState, EnvParams], tuple[TrainState, Transition]]
    learn: Callable[[TrainState, EnvParams, Transition], tuple[TrainState, Metrics]]
    update: Callable[[TrainState, EnvParams], tuple[TrainState, Metrics]]


def make_train(
    config: TrainConfig,
) -> Callable[[jax.Array, EnvParams], tuple[TrainState, Metrics]]:
    """A training from the first to the last update as one function.

    Returns:
      train(key, params) -> the last state and metrics [updates, ...]; `params` of a batch of
      environments: `start` has a leading dimension [B].
    """
    training = training_of(config)

    def train(key: jax.Array, params: EnvParams) -> tuple[TrainState, Metrics]:
        start = training.init(key, params)
        return jax.lax.scan(lambda s, _: training.update(s, params), start, None, config.updates)

    return train


def training_of(config: TrainConfig, *, axis: str | None = None, waits: bool = False) -> Training:
    """The pieces of which `make_train` is made, for those who want to look in between.

    Args:
      axis: of a mesh along which environments are spread, see `spread`; None for one device.
      waits: where an episode ends, the next begins with the next `collect` only.
    """
    agent = agent_of(config.network)
    optimiser = _optimiser(config)

    def mean(values: Any) -> Any:
        """Over the devices."""
        return values if axis is None else jax.lax.pmean(values, axis)

    def own(key: jax.Array) -> jax.Array:
        """A key of this device."""
        return key if axis is None else jax.random.fold_in(key, jax.lax.axis_index(axis))

    def see(envs: EnvState, params: EnvParams) -> Any:
        return jax.vmap(agent.see, in_axes=(0, batch_axes(params)))(envs, params)

    def init(key: jax.Array, params: EnvParams) -> TrainState:
        key, of_envs, of_weights = jax.random.split(key, 3)
        keys = jax.random.split(own(of_envs), _n_envs(params))
        envs = jax.vmap(reset, in_axes=(0, batch_axes(params)))(keys, params)
        weights = agent.init(of_weights, jax.tree.map(lambda v: v[0], see(envs, params)), params)
        best = jnp.ones_like(envs.seconds)
        return TrainState(weights, optimiser.init(weights), envs, key, best, best)

    def evaluate(weights: Any, seen: Any, params: EnvParams) -> Output:
        def one(of_one: Any) -> Output:
            return agent.say(weights, of_one, params)

        n = len(jax.tree.leaves(seen)[0])
        if wide() and n > agent.at_once:  # what lies between of more would not fit in memory
            return jax.lax.map(one, seen, batch_size=agent.at_once)
        return jax.vmap(one)(seen)

    def collect(state: TrainState, params: EnvParams) -> tuple[TrainState, Transition]:
        act = jax.vmap(step, in_axes=(0, 0, 0, batch_axes(params)))
        offer = jax.vmap(offered, in_axes=(0, 0, batch_axes(params)))

        def one(
            carry: tuple[EnvState, jax.Array, jax.Array], key: jax.Array
        ) -> tuple[Any, Transition]:
            envs, timed, first = carry
            to_act, to_step = jax.random.split(key)
            seen = see(envs, params)
            logits, value = evaluate(state.weights, seen, params)
            action = jax.vmap(actions.draw)(jax.random.split(to_act, len(value)), logits)
            counted = offer(envs, action.index, params)
            after, outcome = act(jax.random.split(to_step, len(value)), envs, action, params)
            log_prob = jax.vmap(actions.log_prob)(logits, action, outcome.asked, counted)
            if waits:
                after = jax.vmap(either)(envs.done & ~first, envs, after)
            # The environment rewards each step by time; when it is due here is a setting.
            relative = after.seconds / params.start.seconds
            due = after.done | (after.t % config.reward_every == 0)
            sweeps = after.sweep.left > 0
            reward, timed = ppo.timed_reward(
                timed, relative, due, outcome.counts, config.bonus, records=config.records
            )
            return (after, timed, jnp.bool_(False)), Transition(
                seen,
                action,
                counted,
                log_prob,
                value,
                config.reward_scale * reward,
                jnp.where(outcome.terminated, 0.0, jnp.where(sweeps, 1.0, config.gamma)),
                after.done | ~outcome.counts,
                outcome.counts,
                outcome.asked,
                sweeps,
                after.seconds,
                outcome.terminated,
                outcome.applied,
            )

        key, now = jax.random.split(state.key)
        keys = jax.random.split(own(now), config.steps)
        start = state.envs, state.timed, jnp.bool_(True)
        (envs, timed, _), moves = jax.lax.scan(one, start, keys)
        return state._replace(envs=envs, timed=timed, key=key), moves

    def loss(
        weights: Any,
        params: EnvParams,
        batch: Transition,
        advantage: jax.Array,
        target: jax.Array,
        share: Shares,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """What is minimised; and value loss, entropy, divergence: all parts of means."""
        logits, value = evaluate(weights, batch.seen, params)
        counted = batch.asked, batch.offered
        # Of a step in which nothing was decided only the value is learned.
        log_prob = jax.vmap(actions.log_prob)(logits, batch.action, *counted)
        ratio = jnp.exp(log_prob - batch.log_prob)
        gain = ppo.clipped_surrogate(ratio, advantage, config.clip) @ share.of_actions
        value_loss = 0.5 * (value - target) ** 2 @ share.of_steps
        entropy = jax.vmap(actions.entropy)(logits, *counted) @ share.of_actions
        kl = (ratio - 1.0 - jnp.log(ratio)) @ share.of_actions
        total = config.value_weight * value_loss - gain - config.entropy_weight * entropy
        return total, (value_loss, entropy, kl)

    def of_minibatch(
        weights: Any,
        params: EnvParams,
        batch: Transition,
        advantage: jax.Array,
        target: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], Any]:
        """Value loss, entropy, divergence, and the gradient: means, added up part by part."""
        decides = batch.asked | jnp.any(batch.offered, axis=1)
        advantage = ppo.normalised(advantage, decides)
        share = Shares(ppo.shares(batch.counts), ppo.shares(decides))
        n = math.gcd(len(target), agent.at_once)
        parts = jax.tree.map(
            lambda v: v.reshape(-1, n, *v.shape[1:]), (batch, advantage, target, share)
        )
        gradient = jax.value_and_grad(loss, has_aux=True)
        (_, told), found = jax.lax.map(lambda part: gradient(weights, params, *part), parts)
        return jax.tree.map(lambda v: jnp.sum(v, axis=0), (told, found))

    def learn(
        state: TrainState, params: EnvParams, moves: Transition
    ) -> tuple[TrainState, Metrics]:
        last = evaluate(state.weights, see(state.envs, params), params).value
        values = jnp.concatenate([moves.value, last[None]])
        lambdas = jnp.where(moves.sweeps, 1.0, config.lambda_)
        advantage = jax.vmap(ppo.advantages, in_axes=1, out_axes=1)(
            moves.reward, moves.discount, moves.end, values, lambdas
        )
        rows = jax.tree.map(
            lambda v: v.reshape(-1, *v.shape[2:]), (moves, advantage, advantage + moves.value)
        )
        n = moves.reward.size

        def minibatch(carry: tuple, at: jax.Array) -> tuple[tuple, tuple]:
            weights, optimiser_state, goes_on = carry
            part = jax.tree.map(lambda v: v[at], rows)
            told, gradient = mean(of_minibatch(weights, params, *part))
            goes_on &= told[2] < config.target_kl
            change, new_state = optimiser.update(gradient, optimiser_state, weights)
            new = optax.apply_updates(weights, change), new_state
            weights, optimiser_state = jax.tree.map(
                lambda a, b: jnp.where(goes_on, a, b), new, (weights, optimiser_state)
            )
            return (weights, optimiser_state, goes_on), told

        key, now = jax.random.split(state.key)
        keys = jax.random.split(own(now), config.epochs)
        order = jax.vmap(lambda k: jax.random.permutation(k, n))(keys)
        order = order.reshape(config.epochs * config.minibatches, -1)
        carry = state.weights, state.optimiser, jnp.bool_(True)
        (weights, optimiser_state, _), told = jax.lax.scan(minibatch, carry, order)
        best = jnp.minimum(state.best, jnp.min(moves.seconds, axis=0) / params.start.seconds)
        metrics = Metrics(
            mean(ppo.mean_where(moves.reward, moves.counts)) / config.reward_scale,
            best,
            jnp.mean(told[1]),
            jnp.mean(told[0]),
            told[2][-1],
            mean(jnp.mean(moves.terminated)),
            mean(jnp.mean(moves.applied)),
        )
        after = state._replace(weights=weights, optimiser=optimiser_state, key=key, best=best)
        return after, metrics

    def update(state: TrainState, params: EnvParams) -> tuple[TrainState, Metrics]:
        after, moves = collect(state, params)
        return learn(after, params, moves)

    return Training(init, collect, learn, update)


def spread(config: TrainConfig, devices: Sequence[Any]) -> Training:
    """A training whose environments are spread over devices; gradients are means over all of them,
    and all have the same weights. Over one device it is `training_of`.

    The number of environments has to be a multiple of that of the devices.
    """
    if len(devices) == 1:
        return training_of(config)
    axis = "environments"
    mesh = jax.sharding.Mesh(np.asarray(devices), (axis,))
    training = training_of(config, axis=axis)
    each, same = PartitionSpec(axis), PartitionSpec()
    states = TrainState._make((same, same, each, same, each, each))
    moves = PartitionSpec(None, axis)
    metrics = Metrics._make((same, each, same, same, same, same, same))

    def over_devices(fn: Any, first: Any, out: Any, *rest: Any) -> Any:
        def call(given: Any, params: EnvParams, *others: Any) -> Any:
            ins = (first, batch_specs(params, each, same), *rest)
            return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False)(
                given, params, *others
            )

        return call

    return Training(
        over_devices(training.init, same, states),
        over_devices(training.collect, states, (states, moves)),
        over_devices(training.learn, states, (states, metrics), moves),
        over_devices(training.update, states, (states, metrics)),
    )


def _optimiser(config: TrainConfig) -> optax.GradientTransformation:
    n = config.updates * config.epochs * config.minibatches
    rate = config.learning_rate
    if config.falls:
        rate = optax.linear_schedule(rate, 0.0, n)
    return optax.chain(optax.clip_by_global_norm(config.max_gradient), optax.adam(rate, eps=1e-5))


def _n_envs(params: EnvParams) -> int:
    return params.start.counts.shape[0]
