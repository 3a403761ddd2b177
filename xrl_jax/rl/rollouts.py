"""Rollouts of a policy from a program, and the programs that they have met."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost.roofline import CostTable
from xrl_jax.language.table import CompiledRules
from xrl_jax.measure.target import usable_cores
from xrl_jax.rl.actions import Logits
from xrl_jax.rl.agent import agent_of
from xrl_jax.rl.decode import Best, Rollout, Trail, begin, by_network, follow
from xrl_jax.rl.edits import Edit, Edits, RolloutOutcome, choices, edited, packed
from xrl_jax.rl.env import EnvParams, EnvState, Start
from xrl_jax.rl.networks import NetworkConfig
from xrl_jax.runtime.kept_trace import kept_trace
from xrl_jax.runtime.settings import under_own_settings
from xrl_jax.search.base import Found, Step
from xrl_jax.search.states import place_text
from xrl_jax.transform.union import divided

# At once: some take the most probable action, with edits, the others draw. Small graphs have room
# for more: so many nodes in all.
_FEWEST, _MOST, _NODES = 8, 16, 4096
_TOGETHER = 4  # of these, in one batch: batches run side by side, one on each core
_REWRITES = (8, 32)  # in a step, at least and at most: one for each so many slots of the bucket
_SLOTS_EACH = 64
_AT_ONCE = 16  # steps between two looks at the clock
_STEPS = 256  # of a rollout, at most
_HORIZON = 64  # actions of a rollout, at most
_AIMLESS = 4  # looks without a better state, after which all rollouts end
_SLOTS = (16, 64, 128)  # candidates that the policy sees: the first that suffices at the start
_TRAIL = Trail._make(range(len(Trail._fields)))  # its structure


class Met(NamedTuple):
    """What rollouts from a program have come to."""

    found: list[Found]  # the cheapest program of each rollout that met a cheaper one, best first
    outcomes: list[RolloutOutcome]  # of each rollout with edits
    candidates: int  # how many there were to choose from, in all
    most: int  # in one state, of which the policy saw no more than there are slots


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A policy at work under one rule table."""

    config: NetworkConfig
    weights: Any
    rules: CompiledRules

    def slots_for(self, start: Start) -> int:
        """How many candidates the policy is to see."""
        n = int(np.bitwise_count(np.asarray(start.masks)).sum())
        enough = next((s for s in _SLOTS if s >= n), _SLOTS[-1])
        return agent_of(self.config).slots or enough

    def rollouts(
        self,
        begun: Found,
        start: Start,
        costs: CostTable,
        key: jax.Array,
        *,
        plan: Sequence[Sequence[Edit]],
        slots: int,
        over: Callable[[], bool],
    ) -> Met:
        """Follow the policy from a program, several times at once.

        Args:
          begun: the program, with the steps that led to it.
          start: made of it, under these costs.
          plan: edits of the first rollouts, which take the most probable actions; the others draw
            theirs.
          slots: candidates that the policy sees; another number has to be compiled.
          over: asked every now and then whether there is no time left.
        """
        bucket = len(start.masks)
        params = EnvParams(
            self.rules.table, costs, start, _HORIZON, slots=slots, at_once=rewrites_at_once(bucket)
        )
        n = at_once(bucket)
        first = jax.tree.map(lambda v: jnp.stack([v] * _TOGETHER), begin(params))
        batches, parts, best = [first] * (n // _TOGETHER), [], [float(start.seconds)]
        draws = np.arange(n) >= len(plan)
        temperatures = jnp.float32(draws).reshape(-1, _TOGETHER)
        edits = [packed(plan[i]) if i < len(plan) else packed(()) for i in range(n)]
        edits = jax.tree.map(lambda *v: jnp.stack(v).reshape(-1, _TOGETHER, len(v[0])), *edits)
        to_go = functools.partial(_following(self.config), self.weights, params)
        go_on = under_own_settings(_waited_for(to_go))  # settings are a thread's own
        with ThreadPoolExecutor(usable_cores()) as pool:
            for k in jax.random.split(key, _STEPS // _AT_ONCE):
                # All with edits have one key: they see the same candidates where there are more.
                keys = jax.random.split(k, n)[np.where(draws, np.arange(n), 0)]
                keys = keys.reshape(-1, _TOGETHER)
                # Two threads that find nothing compiled would both compile.
                mapped = pool.map if parts else map
                each = (jax.tree.map(lambda v, i=i: v[i], edits) for i in range(len(batches)))
                made = list(mapped(go_on, batches, keys, temperatures, each))
                batches = [now for now, _ in made]
                parts.append(_in_one([trail for _, trail in made]))
                best.append(min(float(now.best.seconds.min()) for now in batches))
                aimless = len(best) > _AIMLESS and best[-1] == best[-1 - _AIMLESS]
                if over() or aimless or all(bool(now.state.done.all()) for now in batches):
                    break
        trail = jax.tree.map(lambda *v: np.concatenate(v, axis=1), *parts)
        met = _in_one([now.best for now in batches]), trail
        of_each = [jax.tree.map(lambda v, i=i: v[i], met) for i in range(n)]
        found = [
            _found(begun, start, self.rules, best, trail) for best, trail in of_each if best.steps
        ]
        outcomes = [
            _outcome(start, self.rules, best, trail) for best, trail in of_each[: len(plan)]
        ]
        most = int(trail.candidates.max(initial=0))
        cheapest_first = sorted(found, key=lambda f: f.seconds)
        return Met(cheapest_first, outcomes, int(trail.candidates.sum()), most)


@functools.cache
def _following(config: NetworkConfig) -> Any:
    """Some steps of a batch of rollouts; traced and compiled once for each bucket."""

    def steps(
        weights: Any,
        params: EnvParams,
        rollouts: Rollout,
        keys: jax.Array,
        temperature: jax.Array,
        edits: Edits,
    ) -> tuple[Rollout, Trail]:
        def one(
            now: Rollout, key: jax.Array, temperature: jax.Array, edits: Edits
        ) -> tuple[Rollout, Trail]:
            says = by_network(config, weights)

            def choose(state: EnvState, params: EnvParams) -> Logits:
                return edited(says(state, params), state, params, edits)

            return follow(choose, params, now, key, temperature, _AT_ONCE)

        return jax.vmap(one)(rollouts, keys, temperature, edits)

    return kept_trace(steps, settings=repr(config), like=lambda _w, _p, now, *_: (now, _TRAIL))


def _waited_for(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which ends when its arrays are there: a thread is to have but one batch."""
    return lambda *args: jax.block_until_ready(fn(*args))


def _in_one(batches: list[Any]) -> Any:
    """Batches [B, ...] as one, of NumPy's arrays."""
    return jax.tree.map(lambda *v: np.concatenate([np.asarray(x) for x in v]), *batches)


def at_once(bucket: int) -> int:
    """How many rollouts of graphs in this bucket are made at once; a multiple of the batch."""
    return max(_FEWEST, min(_MOST, _NODES // bucket))


def rewrites_at_once(bucket: int) -> int:
    """How many rewrites of a macro-action are made in one step: a larger graph has more places."""
    return int(np.clip(bucket // _SLOTS_EACH, *_REWRITES))


def _outcome(start: Start, rules: CompiledRules, best: Best, trail: Trail) -> RolloutOutcome:
    """What came of one rollout."""
    made = trail.entry >= 0
    rewrites = int(made[: int(best.steps)].sum())
    end = float(trail.seconds[-1]) if made.any() else math.inf
    what_else = functools.partial(choices, start, rules, trail)
    return RolloutOutcome(float(best.seconds), rewrites, end, what_else)


def _found(begun: Found, start: Start, rules: CompiledRules, best: Best, trail: Trail) -> Found:
    """The program of the cheapest state of one rollout."""
    rule_of = np.asarray(rules.table.entry_rule)
    seconds = [float(start.seconds), *map(float, trail.seconds)]
    steps = []
    for t in range(int(best.steps)):
        made = np.flatnonzero(trail.entry[t] >= 0)
        for k in made:
            at, graph = (t, k), int(trail.owner[t, k])
            of_root = (np.asarray(f)[at] for f in (trail.op, trail.shape, trail.rank))
            place = place_text(int(trail.root[at]), *of_root)
            gain = (seconds[t] - seconds[t + 1]) / len(made) / float(start.counts[graph])
            steps.append(Step(graph, rules.rules[rule_of[trail.entry[at]]].name, place, gain))
    program = divided(begun.program, best.graph, best.owner)
    return Found(program, float(best.seconds), (*begun.steps, *steps))
