"""Search by a trained policy: rollouts under predicted costs, whose best states are measured.

Each round follows the policy, once by its most probable candidates and several times by candidates
drawn, from the best state so far or, every other round, from the graph's first state; the best
state that any of these met is rebuilt, its regions are timed, and the next round decodes under what
they took. Nothing else is tried: what this finds, the policy has found.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost.roofline import CostTable
from xrl_jax.cost.timing import Stopwatch
from xrl_jax.graph.engine_jit import engine_jit
from xrl_jax.rl.agent import agent_of
from xrl_jax.rl.decode import Trail, by_network, follow
from xrl_jax.rl.env import EnvParams, EnvState, Start, reset
from xrl_jax.rl.finetune import finetuned
from xrl_jax.rl.networks import NetworkConfig
from xrl_jax.rl.policy import Policy, load_policy
from xrl_jax.search.base import Budget, Problem, Reached, Run, SearchResult, Step
from xrl_jax.search.descend import measure_state
from xrl_jax.search.states import Space, State, place_text
from xrl_jax.search.walk import Phase, search_graphs

_ROLLOUTS = 8  # at once: the first takes the most probable candidate, the others draw
_AT_ONCE = 16  # steps between two looks at the clock
_SLOTS = (16, 64, 256)  # candidates that the policy sees: the first that suffices at the start
_HORIZON = 128  # steps of a rollout, at most
_AIMLESS = 2  # looks without a better state, after which all rollouts end
_STALLED = 8  # rounds without a better state, after which a search ends
_KEPT = 4  # states of a graph that are kept for timing whole programs


def by_policy(
    policy: Policy, *, finetune: bool = False, alone: bool = False
) -> Callable[[Problem, Budget, jax.Array], SearchResult]:
    """A strategy that follows this policy.

    Args:
      finetune: train it further on the program first, for half of the time (`rl.finetune`).
      alone: the rollouts are all there is: what they have found is timed, and not refined.
    """

    def strategy(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        config, weights = policy.fitted(problem.rules)
        notes = [f"the policy was trained on {policy.trained or 'what its file does not say'}"]
        to_tune, key = jax.random.split(key)
        if finetune:
            clock = Stopwatch(budget.seconds)
            weights, updates = finetuned(config, weights, problem, budget, to_tune)
            notes.append(f"then on this program, {updates} updates")
            budget = dataclasses.replace(budget, seconds=max(clock.left, 1e-3))
        decode = _Decoder(config, weights, problem)
        found = search_graphs(problem, budget, key, Phase(functools.partial(_search, decode)))
        note = "; ".join(filter(None, (*notes, found.note)))
        return dataclasses.replace(found, note=note, refine=not alone)

    strategy.__name__ = "xrlflow"  # as reports call it
    return strategy


def xrlflow(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    """Rollouts of the policy that comes with the package.

    Raises:
      PolicyError: it does not fit this version.
    """
    return by_policy(load_policy())(problem, budget, key)


@functools.cache
def _following(config: NetworkConfig) -> tuple[Any, Any]:
    """First states, and some steps, of all rollouts; compiled once for each bucket."""

    def start(params: EnvParams, key: jax.Array) -> EnvState:
        keys = jax.random.split(key, _ROLLOUTS)
        return jax.vmap(reset, in_axes=(0, None))(keys, params)

    def steps(
        weights: Any, params: EnvParams, states: EnvState, key: jax.Array
    ) -> tuple[EnvState, Trail]:
        def one(state: EnvState, key: jax.Array, temperature: jax.Array) -> tuple[EnvState, Trail]:
            choose = by_network(config, weights)
            return follow(choose, params, state, key, temperature, _AT_ONCE)

        temperature = jnp.ones(_ROLLOUTS).at[0].set(0.0)
        return jax.vmap(one)(states, jax.random.split(key, _ROLLOUTS), temperature)

    return engine_jit(start), engine_jit(steps)


@dataclasses.dataclass(frozen=True)
class _Decoder:
    """A policy at work on one problem."""

    config: NetworkConfig
    weights: Any
    problem: Problem
    slots: int = _SLOTS[-1]

    def trails(self, run: Run, state: State, clock: Stopwatch, key: jax.Array) -> Trail:
        """What the rollouts do from a state: [B, T, ...]; shorter where the time runs out."""
        n = state.graph.nodes.op.shape[0]
        start = Start(
            state.graph,
            state.masks,
            jnp.zeros(n, jnp.int32),
            jnp.zeros(n).at[0].set(1.0),
            jnp.float32(state.seconds),
        )
        params = EnvParams(
            self.problem.rules.table,
            self.problem.oracle.table(),
            start,
            horizon=_HORIZON,
            slots=self.slots,
        )
        begin, steps = _following(self.config)
        to_begin, key = jax.random.split(key)
        states, parts, best = begin(params, to_begin), [], [state.seconds]
        for k in jax.random.split(key, _HORIZON // _AT_ONCE):
            states, trail = steps(self.weights, params, states, k)
            parts.append(jax.tree.map(np.asarray, trail))
            run.candidates += int(parts[-1].candidates.sum())
            best.append(min(best[-1], float(parts[-1].seconds.min())))
            aimless = len(best) > _AIMLESS and best[-1] == best[-1 - _AIMLESS]
            if run.out_of_budget(clock) or aimless or bool(jnp.all(states.done)):
                break
        return jax.tree.map(lambda *v: np.concatenate(v, axis=1), *parts)


def _search(
    decode: _Decoder,
    run: Run,
    space: Space,
    reached: list[Reached],
    index: int,
    clock: Stopwatch,
    key: jax.Array,
) -> list[Reached]:
    """The best states of one graph that rollouts have met."""
    oracle, limit = run.problem.oracle, run.budget.measurements
    first = reached[0][0]
    n = len(space.moves(first, oracle.table()).entry)
    slots = agent_of(decode.config).slots
    if slots is None:
        slots = next((s for s in _SLOTS if s >= 2 * n), _SLOTS[-1])
    decode = dataclasses.replace(decode, slots=slots)
    root = _Kept([], (first, []))
    kept = {space.identity(first): root}
    since = 0
    for turn in itertools.count():
        if run.out_of_budget(clock):
            break
        key, now = jax.random.split(key)
        begin = root if turn % 2 else next(iter(kept.values()))
        start = space.matched(space.reprice(begin.reached[0], oracle.table()))
        trail = decode.trails(run, start, clock, now)
        most = int(trail.candidates.max(initial=0))
        if most > slots:
            run.note = f"it saw {slots} of up to {most} candidates at a step, drawn evenly"
        made = _rebuilt(space, start, oracle.table(), trail, index, begin)
        learned = measure_state(oracle, made.reached[0], clock, limit)
        now_kept = {space.identity(made.reached[0]): made, **kept}
        ranked = _ranked(space, now_kept, oracle.table())[:_KEPT]
        since = 0 if learned or ranked[0][0] not in kept else since + 1
        kept = dict(ranked)
        run.keep(index, [k.reached for k in kept.values()])
        run.report("xrlflow")
        if since >= _STALLED:
            run.stalled()
            break
    found = [_told(space, first, oracle.table(), k.moves, index) for k in kept.values()]
    return sorted(found, key=lambda reached: reached[0].seconds)


Move = tuple[int, int, int]  # entry, root, partner


class _Kept(NamedTuple):
    """A state of a graph, and the moves to it from the first."""

    moves: list[Move]
    reached: Reached


def _rebuilt(
    space: Space, start: State, costs: CostTable, trail: Trail, index: int, begin: _Kept
) -> _Kept:
    """The state of least seconds that any rollout has met; where they began if that is none.

    Args:
      start: where they began, under these costs.
      begin: the same as it is kept.
    """
    row, last = divmod(int(np.argmin(trail.seconds)), trail.seconds.shape[1])
    if trail.seconds[row, last] >= start.seconds:
        return begin
    at = [t for t in range(last + 1) if trail.entry[row, t] >= 0]
    moves = [
        (int(trail.entry[row, t]), int(trail.root[row, t]), int(trail.partner[row, t])) for t in at
    ]
    seconds = [start.seconds, *(float(trail.seconds[row, t]) for t in at)]
    steps = [
        Step(
            index,
            space.rule_name(entry),
            place_text(root, *(np.asarray(f)[row, t] for f in (trail.op, trail.shape, trail.rank))),
            before - after,
        )
        for t, (entry, root, _), before, after in zip(
            at, moves, seconds[:-1], seconds[1:], strict=True
        )
    ]
    state, taken = space.steps(start, costs, moves)
    return _Kept(
        [*begin.moves, *(moves[i] for i in taken)],
        (state, [*begin.reached[1], *(steps[i] for i in taken)]),
    )


def _told(
    space: Space, first: State, costs: CostTable, moves: Sequence[Move], index: int
) -> Reached:
    """The state after moves from the first, and what each gains, all under these costs."""
    state, steps = space.reprice(first, costs), []
    for entry, root, partner in moves:
        after = space.step(state, costs, entry, root, partner)
        if after is not None:
            place, gain = space.place(state, root), state.seconds - after.seconds
            steps.append(Step(index, space.rule_name(entry), place, gain))
            state = after
    return state, steps


def _ranked(
    space: Space, kept: dict[tuple[int, int], _Kept], costs: CostTable
) -> list[tuple[tuple[int, int], _Kept]]:
    """What is kept, under these costs, the best first."""

    def now(kept: _Kept) -> _Kept:
        state, steps = kept.reached
        return kept._replace(reached=(space.reprice(state, costs), steps))

    priced = [(identity, now(each)) for identity, each in kept.items()]
    return sorted(priced, key=lambda each: each[1].reached[0].seconds)
