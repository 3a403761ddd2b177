"""What is done in a state: drawn from logits, and how probable that was.

An action is an index (`rl.env`) and, for each candidate, whether it is approved of, which counts
in sweeps. Both are drawn at once; the probability of what was done is that of the index, where one
was asked for, times those of the approvals that counted.
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
    approval: jax.Array  # [M], of each candidate on its own


def draw(key: jax.Array, logits: Logits, temperature: jax.Array | float = 1.0) -> Action:
    """An action.

    Args:
      temperature: 0 takes what is the most probable, 1 draws by the probabilities.
    """
    of_index, of_approval = jax.random.split(key)
    noise = jax.random.gumbel(of_index, logits.index.shape)
    doubt = jax.random.logistic(of_approval, logits.approval.shape)
    index = jnp.argmax(logits.index + temperature * noise)
    return Action(index.astype(jnp.int32), logits.approval + temperature * doubt > 0)


def log_prob(logits: Logits, action: Action, asked: jax.Array, offered: jax.Array) -> jax.Array:
    """Logarithm of the probability of an action.

    Args:
      asked: bool, the index counts (`env.Outcome`).
      offered: [M] bool, which approvals count (`env.offered`).
    """
    sign = jnp.where(action.approved, 1.0, -1.0)
    approvals = jnp.where(offered, jax.nn.log_sigmoid(sign * logits.approval), 0.0)
    index = jnp.where(asked, ppo.log_prob(logits.index, action.index), 0.0)
    return index + jnp.sum(approvals)


def entropy(logits: Logits, asked: jax.Array, offered: jax.Array) -> jax.Array:
    """Entropy in nats of the index and of the approvals, as far as they counted: in the mean over
    actions, that of both together.
    """
    x = logits.approval
    each = jax.nn.softplus(x) - x * jax.nn.sigmoid(x)
    index = jnp.where(asked, ppo.entropy(logits.index), 0.0)
    return index + jnp.sum(jnp.where(offered, each, 0.0))
