"""Descent shared by the strategies: measure what matters at a state, then take improving candidates
while there are any.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost import roofline
from xrl_jax.cost.model import Oracle
from xrl_jax.cost.timing import Stopwatch
from xrl_jax.search.base import Reached, Run, Step
from xrl_jax.search.states import Moves, Space, State

_view = jax.jit(roofline.view_graph)
# A candidate is worth its measurements if its roofline gains, or loses at most this share of the
# nodes it replaces.
_HOPE = 0.5


def measure_state(oracle: Oracle, state: State, clock: Stopwatch, limit: int | None) -> int:
    """Time the state's own regions; how many became known."""
    return oracle.measure(oracle.unknown(_view(state.graph)), clock=clock, limit=limit)


def measure_moves(
    oracle: Oracle,
    moves: Moves,
    clock: Stopwatch,
    limit: int | None,
    *,
    keep: Callable[[float], bool],
) -> int:
    """Time the regions that promising candidates would make, the most promising first; how many
    became known.
    """
    hopeful = np.array([keep(float(d)) for d in moves.delta], bool)
    if not hopeful.any():
        return 0
    views = roofline.NodeView(*(np.asarray(v)[hopeful] for v in moves.views))  # type: ignore[arg-type]
    return oracle.measure(oracle.unknown(views), clock=clock, limit=limit)


def known_moves(
    run: Run,
    space: Space,
    state: State,
    clock: Stopwatch,
    slack: float,
    allowed: np.ndarray | None = None,
) -> tuple[State, Moves]:
    """The state and its moves under costs that know every promising candidate's regions (as far as
    the budget goes).

    Args:
      slack: candidates that add at most this many seconds by the roofline are promising.
      allowed: [E] which entries of the rule table count; all by default.
    """
    oracle = run.problem.oracle
    limit = run.budget.measurements
    if measure_state(oracle, state, clock, limit):
        state = space.reprice(state, oracle.table())
    state = space.matched(state)
    moves = space.moves(state, oracle.table()).among(allowed)
    if measure_moves(oracle, moves, clock, limit, keep=lambda d: d <= slack):
        state = space.reprice(state, oracle.table())
        moves = space.moves(state, oracle.table()).among(allowed)
    run.candidates += len(moves.entry)
    return state, moves


def descend(
    run: Run,
    space: Space,
    reached: Reached,
    index: int,
    clock: Stopwatch,
    *,
    only: Callable[[str], bool] = lambda family: True,
    phase: str = "descending",
) -> tuple[State, list[Step]]:
    """Take improving candidates, best first, until none improves or the clock runs out.

    Each pass goes through the improving candidates of the state in order of gain and takes those
    that still match and still gain; then all candidates are found again. `only` filters rules by
    family. Returns the state reached and all steps to it.
    """
    oracle = run.problem.oracle
    families = [r.family for r in space.rules.rules]
    state, steps = reached
    fits = np.array([only(f) for f in families], bool)
    rule_of = np.asarray(space.rules.table.entry_rule)
    allowed = fits[rule_of] & (rule_of >= 0)
    while not run.out_of_budget(clock):
        slack = _HOPE * float(jnp.max(state.graph.nodes.cost))
        state, moves = known_moves(run, space, state, clock, slack, allowed)
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
