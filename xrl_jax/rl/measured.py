"""Rewards from measurements: the programs of the environments are timed every few steps.

A *segment* is the result of one `Training.collect`: some steps of every environment, after which
its program is timed. An episode that ends within a segment waits for the timing. The saving of a
segment is known only at its end; until then the reward is shaped by predictions (Ng, Harada,
Russell, ICML 1999), which does not change the optimal policy:

    r_t = m_t + g_t Phi(s_{t+1}) - Phi(s_t)

g_t is the discount of the step, 1 within a macro-action. m_t is X-RLflow's
100 (RT_{t-1} - RT_t) / RT_0 where RT_t was measured, else 0. Phi is the saving since the last
measurement that the cost model predicts, in percent, and 0 directly after a measurement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost.model import Oracle
from xrl_jax.cost.programs import job_or_failure, program_job, program_key
from xrl_jax.measure.base import Job
from xrl_jax.program.program import Program
from xrl_jax.rl.collect import TrainState, Transition
from xrl_jax.rl.env import EnvParams, EnvState
from xrl_jax.rl.learn import Metrics
from xrl_jax.rl.train import training_of
from xrl_jax.rl.train_config import TrainConfig
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.transform.union import split_union

# (index of an environment, its state) -> measured time of its program, relative to the program it
# began from; NaN if it cannot be timed.
RelativeTime = Callable[[int, EnvState], float]


def shaped_rewards(
    potential: jax.Array, counts: jax.Array, saved: jax.Array, discounts: jax.Array
) -> jax.Array:
    """Return the shaped rewards [T] of a segment; without discount, their sum is `saved`.

    Args:
      potential: [T + 1] Phi of the states; 0 before the first step that counts.
      counts: [T] bool, which steps count.
      saved: percent, measured after the segment; if NaN (it failed), the prediction is used.
      discounts: [T].
    """
    last = counts & (jnp.cumsum(counts) == jnp.sum(counts))
    earned = jnp.where(jnp.isnan(saved), potential[1:], saved)
    later = jnp.where(last, earned, discounts * potential[1:])
    return jnp.where(counts, later - potential[:-1], 0.0)


def bonus_rewards(counts: jax.Array, saved: jax.Array, bonus: float) -> jax.Array:
    """Return the rewards [T] of a segment as in X-RLflow: the measured saving in the last step that
    counts, and a bonus in the others.

    Args:
      counts, saved: as for `shaped_rewards`, except that a failed measurement saves nothing.
    """
    last = counts & (jnp.cumsum(counts) == jnp.sum(counts))
    return jnp.where(counts, jnp.where(last, jnp.nan_to_num(saved), bonus), 0.0)


def potentials(before: jax.Array, after: jax.Array, counts: jax.Array) -> jax.Array:
    """Return the predicted savings [T + 1] in seconds since the segment, or its episode, began.

    Args:
      before: predicted seconds of the first state.
      after: [T] predicted seconds after each step.
      counts: [T] bool; a first step that does not count has begun an episode.
    """
    seconds = jnp.concatenate([before[None], after])
    first = jnp.where(counts[0], seconds[0], seconds[1])
    return jnp.where(jnp.arange(len(seconds)) < jnp.argmax(counts), 0.0, first - seconds)


def savings(
    before: np.ndarray, now: Sequence[float], noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the percent saved [B] and the relative times [B] that the next saving is counted from.

    These stay unchanged as long as the difference is within the noise, so that many small gains
    count in the end.

    Args:
      before: [B] relative times that savings are counted from.
      now: [B] relative times measured now; NaN where that failed.
      noise: relative difference up to which two timings are considered equal.
    """
    found = np.asarray(now, np.float32)
    moved = np.abs(found / before - 1.0) > noise
    saved = np.where(moved, 100.0 * (before - found), 0.0)
    return np.where(np.isnan(found), np.nan, saved), np.where(moved, found, before)


def timed_by(oracle: Oracle, programs: Sequence[Program]) -> RelativeTime:
    """Return a function that times programs in the worker, interleaved with the original. Each
    program is timed once, and its timing is kept in the store.

    Args:
      programs: the original of each environment.
    """

    originals = {id(p): p for p in programs}
    how = {"options": oracle.options, "constants": oracle.constants}
    references = {i: program_job(p, **how) for i, p in originals.items()}
    # By original and program key.
    known = {(i, program_key(p)): 1.0 for i, p in originals.items()}

    def relative_time(index: int, state: EnvState) -> float:
        original = id(programs[index])
        now = split_union(programs[index], state.graph, state.owner)
        place = original, program_key(now)
        if place not in known:
            job, relative = job_or_failure(now, **how), None
            if isinstance(job, Job):  # else a lowering cannot be traced
                relative = oracle.time_against(job, references[original]).relative
            known[place] = float("nan") if relative is None else relative
        return known[place]

    return relative_time


def measured_update(
    config: TrainConfig, relative_time: RelativeTime, *, interval: int, noise: float
) -> Callable[[TrainState, EnvParams], tuple[TrainState, Metrics]]:
    """Return an update like `Training.update` with measured rewards, as a loop on the host.

    Args:
      relative_time: called with the index of an environment and its state.
      interval: steps between two measurements, a divisor of `config.steps`; N = 5 in X-RLflow.
      noise: see `savings`.
    """
    segment = training_of(dataclasses.replace(config, steps=interval), waits=True)
    collect, learn = engine_jit(segment.collect), engine_jit(training_of(config).learn)

    @engine_jit
    def rewarded(
        transitions: Transition, before: jax.Array, start: jax.Array, saved: jax.Array
    ) -> Transition:
        def one(
            after: Any, counts: Any, discounts: Any, before: Any, start: Any, saved: Any
        ) -> jax.Array:
            if config.reward_every > 1:
                return config.reward_scale * bonus_rewards(counts, saved, config.bonus)
            phi = 100.0 * potentials(before, after, counts) / start
            return config.reward_scale * shaped_rewards(phi, counts, saved, discounts)

        each = jax.vmap(one, in_axes=(1, 1, 1, 0, 0, 0), out_axes=1)
        of_steps = transitions.seconds, transitions.counts, transitions.discount
        return transitions._replace(reward=each(*of_steps, before, start, saved))

    def update(state: TrainState, params: EnvParams) -> tuple[TrainState, Metrics]:
        parts = []
        for _ in range(config.steps // interval):
            predicted, last = state.envs.seconds, np.asarray(state.timed)
            state, transitions = collect(state, params)
            host = jax.device_get(state.envs)
            now = [
                relative_time(b, jax.tree.map(lambda v, b=b: v[b], host))
                for b in range(len(predicted))
            ]
            saved, timed = savings(last, now, noise)
            timed = np.where(host.done, 1.0, timed)
            parts.append(rewarded(transitions, predicted, params.start.seconds, jnp.asarray(saved)))
            state = state._replace(timed=jnp.asarray(timed, jnp.float32))
        transitions = jax.tree.map(lambda *v: jnp.concatenate(v), *parts)
        return learn(state, params, transitions)

    return update
