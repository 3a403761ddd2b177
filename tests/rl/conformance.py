"""Conformance suite for environments that rewrite programs: properties that hold on random walks.

`conforms` walks with random actions, No-Op now and then, and checks every step.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests.graph.valid import is_acyclic
from xrl_jax.cost.model import price
from xrl_jax.program.program import Program
from xrl_jax.rl.env import Action, EnvParams, EnvState, Outcome, allowed, reset, step
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.transform.union import split_union

RESET, STEP, ALLOWED = engine_jit(reset), engine_jit(step), engine_jit(allowed)


def walk(
    params: EnvParams, seed: int, n: int, no_op: float = 0.05
) -> list[tuple[EnvState, int, EnvState, Outcome]]:
    """Return the state, action index, next state and outcome of n random steps."""
    rng = np.random.default_rng(seed)
    state, found = RESET(jax.random.key(seed), params), []
    for i in range(n):
        does = np.flatnonzero(ALLOWED(state.candidates, params.table))[:-1]
        stop = not len(does) or rng.random() < no_op
        index = params.no_op if stop else int(rng.choice(does))
        mask = jnp.asarray(rng.random(params.slots) < 0.5)
        key = jax.random.fold_in(jax.random.key(seed), i)
        after, outcome = STEP(key, state, Action(jnp.int32(index), mask), params)
        found.append((state, index, after, outcome))
        state = after
    return found


def conforms(params: EnvParams, program: Program, args: tuple, *, seed: int, n: int = 40) -> None:
    """Raise AssertionError if the environment breaks a promise."""
    first = RESET(jax.random.key(seed), params)
    saved, t, ends = 0.0, 0, 0
    steps = walk(params, seed, n)
    for before, index, after, outcome in steps:
        ended = bool(outcome.terminated | outcome.truncated)
        assert bool(after.done) == ended and not (outcome.terminated & outcome.truncated)
        assert bool(outcome.counts) != bool(before.done)
        assert bool(is_acyclic(after.graph))
        whole = price(params.costs, after.graph)[0].nodes.cost  # priced anew
        np.testing.assert_allclose(after.graph.nodes.cost, whole, rtol=1e-5)
        variants = np.asarray(after.candidates.variant)
        assert np.isfinite(after.candidates.seconds).all()
        assert (
            np.asarray(after.graph.nodes.op)[np.asarray(after.candidates.root)][variants >= 0] > 0
        ).all()
        if not outcome.counts:  # the step after an end begins the next episode
            assert outcome.reward == 0 and after.t == 0 and not ended
            jax.tree.map(np.testing.assert_array_equal, after.graph, first.graph)
            saved, t = 0.0, 0
            continue
        assert bool(outcome.index_counts) == (int(before.macro.left) == 0)
        t += int(outcome.index_counts)
        saved += float(outcome.reward)
        assert int(after.t) == t <= int(params.horizon)
        assert bool(outcome.terminated) == bool(outcome.index_counts and index == params.no_op)
        ends_here = t == int(params.horizon) and int(after.macro.left) == 0
        assert bool(outcome.truncated) == (ends_here and not outcome.terminated)
        assert int(before.macro.left) == 0 or int(after.macro.left) < int(before.macro.left)
        share = 100 * (1 - float(after.seconds) / float(first.seconds))
        np.testing.assert_allclose(saved, share, atol=1e-2)  # rewards add up
        ends += ended
        if ended:
            found = split_union(program, after.graph, after.owner)
            for a, b in zip(
                jax.tree.leaves(found(*args)), jax.tree.leaves(program(*args)), strict=True
            ):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert ends > 0, "no episode came to an end: walk further"
    again = walk(params, seed, n)
    for one, other in zip(steps, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one[2:], other[2:])


def batch_is_each_by_itself(params: EnvParams, starts: list, axes: object) -> None:
    """Assert that environments of different programs behave under vmap as each does on its own."""
    batch = dataclasses.replace(params, start=jax.tree.map(lambda *v: jnp.stack(v), *starts))
    keys = jax.random.split(jax.random.key(0), len(starts))
    states = engine_jit(jax.vmap(reset, in_axes=(0, axes)))(keys, batch)
    action = jax.vmap(lambda m: Action(jnp.argmax(m.valid), m.valid))(states.candidates)
    many = engine_jit(jax.vmap(step, in_axes=(0, 0, 0, axes)))
    after, outcome = many(keys, states, action, batch)
    for i, start in enumerate(starts):
        own = dataclasses.replace(params, start=start)
        pick = functools.partial(jax.tree.map, lambda v, i=i: v[i])
        one, alone = STEP(keys[i], RESET(keys[i], own), pick(action), own)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), pick(after), one)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), pick(outcome), alone)
