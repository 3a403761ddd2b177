"""The functions of proximal policy optimisation: rewards, advantages and loss terms, unbatched.

Source: Schulman et al., "Proximal Policy Optimization Algorithms", 2017 (clipped surrogate, eq. 7;
J = L_clip - c1 L_vf + c2 L_entropy, eq. 9) and "High-Dimensional Continuous Control Using
Generalized Advantage Estimation", ICLR 2016 (eq. 16).
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def timed_reward(
    timed: jax.Array,
    relative: jax.Array,
    due: jax.Array,
    counts: jax.Array,
    bonus: float,
    *,
    records: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the reward of a step, in percent, and the time that the next saving is counted from.

    A step rewarded by time gets X-RLflow's 100 (RT_{t-1} - RT_t) / RT_0. Elementwise, for arrays of
    one shape.

    Args:
      timed: time at the last reward by time, relative to the start of the episode.
      relative: time after the step, likewise relative.
      due: bool, whether this step is rewarded by time; any other gets the bonus.
      counts: bool; false for a step that begins an episode, which gets no reward.
      records: reward only a time below all earlier ones, so that the rewards add up to the saving
        of the best state.
    """
    chex.assert_equal_shape([timed, relative, due, counts])
    due = due & (relative < timed) if records else due
    reward = jnp.where(due, 100.0 * (timed - relative), bonus)
    return jnp.where(counts, reward, 0.0), jnp.where(due | ~counts, relative, timed)


def advantages(
    rewards: jax.Array,
    discounts: jax.Array,
    ends: jax.Array,
    values: jax.Array,
    lambdas: jax.Array,
) -> jax.Array:
    """Return the generalised advantage estimates [T]:

        d_t = r_t + g_t v_{t+1} - v_t,    A_t = d_t + l_t g_t A_{t+1}, where no episode ends

    With g_t = l_t = 1 the value after step t cancels; this joins the steps caused by one action.

    Args:
      rewards: [T].
      discounts: [T] g_t; 0 where the episode terminated, else gamma: a truncated episode goes on in
        the value of its last state.
      ends: [T] bool, whether the episode ended with this step, terminated or truncated.
      values: [T + 1] v of the states, including the one after the last step.
      lambdas: [T] l_t; 0 trusts the values, 1 the rewards.
    """
    chex.assert_rank([rewards, discounts, ends, values, lambdas], 1)
    chex.assert_equal_shape([rewards, discounts, ends, values[1:], lambdas])
    errors = rewards + discounts * values[1:] - values[:-1]
    carry_on = jnp.where(ends, 0.0, lambdas * discounts)

    def back(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        error, factor = now
        advantage = error + factor * later
        return advantage, advantage

    return jax.lax.scan(back, jnp.zeros_like(errors[0]), (errors, carry_on), reverse=True)[1]


def clipped_surrogate(ratio: jax.Array, advantage: jax.Array, epsilon: float) -> jax.Array:
    """Return the objective, elementwise: min(r A, clip(r, 1 - epsilon, 1 + epsilon) A)."""
    clipped = jnp.clip(ratio, 1.0 - epsilon, 1.0 + epsilon)
    return jnp.minimum(ratio * advantage, clipped * advantage)


def log_prob(logits: jax.Array, action: jax.Array) -> jax.Array:
    """Return the log-probability of one action under logits [K]."""
    # Not by indexing, whose gradient is a scatter, see `rl.rows`.
    return jnp.sum(jnp.where(jnp.arange(len(logits)) == action, jax.nn.log_softmax(logits), 0.0))


def entropy(logits: jax.Array) -> jax.Array:
    """Return the entropy in nats of a distribution given by logits [K]; some may be masked."""
    log_probs = jax.nn.log_softmax(logits)
    probs = jnp.exp(log_probs)
    return -jnp.sum(jnp.where(probs > 0, probs * log_probs, 0.0))


def mean_weights(where: jax.Array) -> jax.Array:
    """Return weights that turn a sum into the mean of the values for which `where` holds."""
    return where / jnp.maximum(jnp.sum(where), 1)


def mean_where(values: jax.Array, where: jax.Array) -> jax.Array:
    """Return the mean of the values for which `where` holds; 0 if there are none."""
    return jnp.sum(jnp.where(where, values, 0.0) * mean_weights(where))


def normalised(values: jax.Array, where: jax.Array) -> jax.Array:
    """Return the values minus their mean, divided by their standard deviation (over `where`)."""
    centred = values - mean_where(values, where)
    return centred / jnp.sqrt(mean_where(centred**2, where) + 1e-8)
