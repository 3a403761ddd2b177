"""Descent shared by the strategies: measure what matters at a state, then take improving candidates
while there are any.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from xrl_jax.cost.model import Oracle
from xrl_jax.cost.view import CostView, view_graph
from xrl_jax.graph.graph import TensorGraph
from xrl_jax.language.rule import Rule
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.search.base import Reached, Run, Step
from xrl_jax.search.states import Moves, Space, State

_view = engine_jit(lambda costs, graph: view_graph(costs.sharing, graph))
# A candidate is worth its measurements if it is predicted to gain, or to lose at most this share of
# the nodes it replaces.
_HOPE = 0.5
_AT_ONCE = 8  # regions are timed before the others' promise is looked at again


def measure_graph(
    oracle: Oracle, graph: TensorGraph, clock: Stopwatch, limit: int | None, new: int | None = None
) -> int:
    """Time the regions of a priced graph, the costliest first; how many became known."""
    order = np.argsort(-np.asarray(graph.nodes.cost), kind="stable")
    views = CostView(*(np.asarray(v)[order] for v in _view(oracle.table(), graph)))  # type: ignore[arg-type]
    return oracle.measure(oracle.unknown(views), clock=clock, limit=limit, new=new)


def known_moves(
    run: Run,
    space: Space,
    state: State,
    clock: Stopwatch,
    promising: Callable[[Moves], np.ndarray],
    allowed: np.ndarray | None = None,
) -> tuple[State, Moves]:
    """The state and its moves under costs that know every promising candidate's regions (as far as
    the budget goes).

    The costliest regions and the most promising are timed first, a few at a time: what they take
    says what their forms are worth elsewhere, and many others are promising no more.

    Args:
      promising: which moves [M] are.
      allowed: [E] which entries of the rule table count; all by default.
    """
    oracle = run.problem.oracle
    limit = run.budget.measurements
    state = space.matched(state)
    while True:
        known = measure_graph(oracle, state.graph, clock, limit, _AT_ONCE)
        if known:
            state = space.reprice(state, oracle.table())
        moves = space.moves(state, oracle.table(), allowed)
        hopeful = promising(moves)
        views = CostView(*(np.asarray(v)[hopeful] for v in moves.views))  # type: ignore[arg-type]
        wanted = oracle.unknown(views) if hopeful.any() else {}
        if not oracle.measure(wanted, clock=clock, limit=limit, new=_AT_ONCE) and not known:
            break
        state = space.reprice(state, oracle.table())
    run.candidates += len(moves.entry)
    return state, moves


def _hopeful(moves: Moves) -> np.ndarray:
    return moves.delta <= _HOPE * moves.gone


def descend(
    run: Run,
    space: Space,
    reached: Reached,
    index: int,
    clock: Stopwatch,
    *,
    only: Callable[[Rule], bool] = lambda rule: True,
    phase: str = "descending",
) -> tuple[State, list[Step]]:
    """Take improving candidates, best first, until none improves or the clock runs out.

    Each pass goes through the improving candidates of the state in order of gain and takes those
    that still match and still gain; then all candidates are found again. `only` filters rules.
    Returns the state reached and all steps to it.
    """
    oracle = run.problem.oracle
    state, steps = reached
    fits = np.array([only(r) for r in space.rules.rules], bool)
    rule_of = np.asarray(space.rules.table.entry_rule)
    allowed = fits[rule_of] & (rule_of >= 0)
    while not run.out_of_budget(clock):
        state, moves = known_moves(run, space, state, clock, _hopeful, allowed)
        run.keep(index, [(state, steps)])
        costs = oracle.table()
        improved = False
        for i in range(len(moves.entry)):
            if moves.delta[i] >= -1e-9 or run.clock.done:
                break
            entry, root, partner = int(moves.entry[i]), int(moves.root[i]), int(moves.partner[i])
            after = space.step(state, costs, entry, root, partner)
            if after is None or after.seconds >= state.seconds - 1e-9:
                continue
            place = space.place(state, root)
            step = Step(index, space.rule_name(entry), place, state.seconds - after.seconds)
            grown = after.graph.nodes.op.shape != state.graph.nodes.op.shape
            state, steps, improved = after, [*steps, step], True
            run.keep(index, [(state, steps)])
            if grown:
                break  # slots moved with the bucket: find the candidates again
        run.report(phase)
        if not improved and not clock.done:
            break
    return state, steps
