"""What is done in a state: drawn from logits, and how probable that was.

An action is an index (`rl.env`) and, for each candidate, whether it is in the mask, which counts in
macro-actions. Both are drawn at once; the probability of what was done is that of the index, where
one was asked for, times those of the mask where it counted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.rl import ppo
from xrl_jax.rl.env import Action


class Logits(NamedTuple):
    """Of all that can be done in a state."""

    index: jax.Array  # [2 M + 1]
    mask: jax.Array  # [M], of each candidate on its own


def draw(key: jax.Array, logits: Logits, temperature: jax.Array | float = 1.0) -> Action:
    """An action.

    Args:
      temperature: 0 takes what is the most probable, 1 draws by the probabilities.
    """
    of_index, of_mask = jax.random.split(key)
    noise = jax.random.gumbel(of_index, logits.index.shape)
    doubt = jax.random.logistic(of_mask, logits.mask.shape)
    index = jnp.argmax(logits.index + temperature * noise)
    return Action(index.astype(jnp.int32), logits.mask + temperature * doubt > 0)


def log_prob(logits: Logits, action: Action, asked: jax.Array, maskable: jax.Array) -> jax.Array:
    """Logarithm of the probability of an action.

    Args:
      asked: bool, the index counts (`env.Outcome`).
      offered: [M] bool, which the mask count (`env.offered`).
    """
    sign = jnp.where(action.mask, 1.0, -1.0)
    masks = jnp.where(maskable, jax.nn.log_sigmoid(sign * logits.mask), 0.0)
    index = jnp.where(asked, ppo.log_prob(logits.index, action.index), 0.0)
    return index + jnp.sum(masks)


def entropy(logits: Logits, asked: jax.Array, maskable: jax.Array) -> jax.Array:
    """Entropy in nats of the index and of the mask, as far as they counted: in the mean over
    actions, that of both together.
    """
    x = logits.mask
    each = jax.nn.softplus(x) - x * jax.nn.sigmoid(x)
    index = jnp.where(asked, ppo.entropy(logits.index), 0.0)
    return index + jnp.sum(jnp.where(maskable, each, 0.0))
