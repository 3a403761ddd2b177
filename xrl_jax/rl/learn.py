"""Learning from a rollout by PPO (Schulman et al. 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from xrl_jax.rl import actions, ppo
from xrl_jax.rl.collect import Collector, TrainState, Transition
from xrl_jax.rl.env import EnvParams
from xrl_jax.rl.train_config import TrainConfig


class Metrics(NamedTuple):
    """Metrics of one update; means over the rollout."""

    reward: jax.Array  # of a step, percent
    best: jax.Array  # [B] least seconds seen so far, relative to the start
    entropy: jax.Array  # nats
    value_loss: jax.Array
    kl: jax.Array  # approximate, of the last minibatch
    terminated: jax.Array  # share of steps
    applied: jax.Array  # share of steps


class StepWeights(NamedTuple):
    """The weights of a minibatch's steps in its means."""

    of_steps: jax.Array  # in means over the steps that count
    of_actions: jax.Array  # in means over the steps in which something was decided


@dataclass(frozen=True)
class Learner:
    """Learns by PPO from the rollouts of a collector."""

    collector: Collector

    @property
    def config(self) -> TrainConfig:
        return self.collector.config

    def _mean(self, values: Any) -> Any:
        """Return the mean over the devices."""
        axis = self.collector.axis
        return values if axis is None else jax.lax.pmean(values, axis)

    def _loss(
        self,
        weights: Any,
        params: EnvParams,
        batch: Transition,
        advantage: jax.Array,
        target: jax.Array,
        step_weights: StepWeights,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Return the loss and (value loss, entropy, KL divergence): this part's share of means."""
        logits, value = self.collector.evaluate(weights, batch.observation, params)
        counted = batch.index_counts, batch.maskable
        # From a step in which nothing was decided, only the value is learned.
        log_prob = jax.vmap(actions.log_prob)(logits, batch.action, *counted)
        ratio = jnp.exp(log_prob - batch.log_prob)
        gain = ppo.clipped_surrogate(ratio, advantage, self.config.clip) @ step_weights.of_actions
        value_loss = 0.5 * (value - target) ** 2 @ step_weights.of_steps
        entropy = jax.vmap(actions.entropy)(logits, *counted) @ step_weights.of_actions
        kl = (ratio - 1.0 - jnp.log(ratio)) @ step_weights.of_actions
        total = self.config.value_weight * value_loss - gain - self.config.entropy_weight * entropy
        return total, (value_loss, entropy, kl)

    def _minibatch_gradient(
        self,
        weights: Any,
        params: EnvParams,
        batch: Transition,
        advantage: jax.Array,
        target: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], Any]:
        """Return (value loss, entropy, KL divergence) and the gradient, summed part by part."""
        decides = batch.index_counts | jnp.any(batch.maskable, axis=1)
        advantage = ppo.normalised(advantage, decides)
        step_weights = StepWeights(ppo.mean_weights(batch.counts), ppo.mean_weights(decides))
        n = math.gcd(len(target), self.collector.agent.chunk_size)
        parts = jax.tree.map(
            lambda v: v.reshape(-1, n, *v.shape[1:]), (batch, advantage, target, step_weights)
        )
        gradient = jax.value_and_grad(self._loss, has_aux=True)
        (_, losses), found = jax.lax.map(lambda part: gradient(weights, params, *part), parts)
        return jax.tree.map(lambda v: jnp.sum(v, axis=0), (losses, found))

    def learn(
        self, state: TrainState, params: EnvParams, transitions: Transition
    ) -> tuple[TrainState, Metrics]:
        """Update the weights by PPO on a rollout; return the new state and metrics."""
        last = self.collector.evaluate(
            state.weights, self.collector.observe(state.envs, params), params
        ).value
        values = jnp.concatenate([transitions.value, last[None]])
        lambdas = jnp.where(transitions.macro, 1.0, self.config.lambda_)
        advantage = jax.vmap(ppo.advantages, in_axes=1, out_axes=1)(
            transitions.reward, transitions.discount, transitions.end, values, lambdas
        )
        rows = jax.tree.map(
            lambda v: v.reshape(-1, *v.shape[2:]),
            (transitions, advantage, advantage + transitions.value),
        )
        n = transitions.reward.size

        def minibatch(carry: tuple, at: jax.Array) -> tuple[tuple, tuple]:
            weights, optimiser_state, continues = carry
            part = jax.tree.map(lambda v: v[at], rows)
            losses, gradient = self._mean(self._minibatch_gradient(weights, params, *part))
            continues &= losses[2] < self.config.target_kl
            change, new_state = self.collector.optimiser.update(gradient, optimiser_state, weights)
            new = optax.apply_updates(weights, change), new_state
            weights, optimiser_state = jax.tree.map(
                lambda a, b: jnp.where(continues, a, b), new, (weights, optimiser_state)
            )
            return (weights, optimiser_state, continues), losses

        key, now = jax.random.split(state.key)
        keys = jax.random.split(self.collector.device_key(now), self.config.epochs)
        order = jax.vmap(lambda k: jax.random.permutation(k, n))(keys)
        order = order.reshape(self.config.epochs * self.config.minibatches, -1)
        carry = state.weights, state.optimiser, jnp.bool_(True)
        (weights, optimiser_state, _), losses = jax.lax.scan(minibatch, carry, order)
        best = jnp.minimum(state.best, jnp.min(transitions.seconds, axis=0) / params.start.seconds)
        metrics = Metrics(
            self._mean(ppo.mean_where(transitions.reward, transitions.counts))
            / self.config.reward_scale,
            best,
            jnp.mean(losses[1]),
            jnp.mean(losses[0]),
            losses[2][-1],
            self._mean(jnp.mean(transitions.terminated)),
            self._mean(jnp.mean(transitions.applied)),
        )
        after = state._replace(weights=weights, optimiser=optimiser_state, key=key, best=best)
        return after, metrics
