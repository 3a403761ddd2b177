"""Actions: sampling them from logits, their log-probability and their entropy.

An action (`rl.env.Action`) is an index and a mask over the candidates, which matters only in
macro-actions. Both are drawn at once. The probability of an action is that of its index, if the
index counts in this step, times the probabilities of the mask entries that count.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.rl import ppo
from xrl_jax.rl.env import Action


class Logits(NamedTuple):
    """Parameters of the distribution over actions in one state."""

    index: jax.Array  # [2 M + 1]
    mask: jax.Array  # [M], one independent Bernoulli logit for each candidate


def draw(key: jax.Array, logits: Logits, temperature: jax.Array | float = 1.0) -> Action:
    """Draw an action.

    Args:
      temperature: 0 takes the most probable action, 1 samples from the distribution.
    """
    index_key, mask_key = jax.random.split(key)
    gumbel_noise = jax.random.gumbel(index_key, logits.index.shape)
    logistic_noise = jax.random.logistic(mask_key, logits.mask.shape)
    index = jnp.argmax(logits.index + temperature * gumbel_noise)
    return Action(index.astype(jnp.int32), logits.mask + temperature * logistic_noise > 0)


def log_prob(
    logits: Logits, action: Action, index_counts: jax.Array, maskable: jax.Array
) -> jax.Array:
    """Return the log-probability of an action.

    Args:
      index_counts: bool, whether the index counts (`env.Outcome`).
      maskable: [M] bool, which entries of the mask count (`env.maskable`).
    """
    sign = jnp.where(action.mask, 1.0, -1.0)
    masks = jnp.where(maskable, jax.nn.log_sigmoid(sign * logits.mask), 0.0)
    index = jnp.where(index_counts, ppo.log_prob(logits.index, action.index), 0.0)
    return index + jnp.sum(masks)


def entropy(logits: Logits, index_counts: jax.Array, maskable: jax.Array) -> jax.Array:
    """Return the entropy in nats of the index and of the mask entries, as far as they count.

    Which entries count depends on the action; the mean of this over actions is the joint entropy.
    """
    x = logits.mask
    each = jax.nn.softplus(x) - x * jax.nn.sigmoid(x)
    index = jnp.where(index_counts, ppo.entropy(logits.index), 0.0)
    return index + jnp.sum(jnp.where(maskable, each, 0.0))
