"""TASO's backtracking search (Jia et al., SOSP 2019, algorithm 2), without its weaknesses.

A queue of graphs by cost; the cheapest is taken, every candidate is applied, and what costs less
than alpha times the best goes back. Here: the original's alpha of 1 by default admits no loss, ours
is 1.05; candidates are costed from the match alone and built only when taken; graphs met before are
told by a hash that sees the structure, not by a sum of operators; regions are timed as they become
promising, not all at creation; and the search starts from the results of two descents (with
lowerings alone, then with every rule), so that a short budget ends with at least those. It is given
up when it has found nothing better for a while.
"""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

import jax

from xrl_jax.cost.roofline import CostTable
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.search.base import Budget, Problem, Reached, Run, SearchResult, Step, Strategy
from xrl_jax.search.changes import chooses_lowering
from xrl_jax.search.descend import descend, known_moves
from xrl_jax.search.states import Space, State
from xrl_jax.search.walk import Phase, search_graphs

ALPHA = 1.05  # TASO's C++ default; its Python examples use 1.0
KEEP = 2  # states of each graph that are timed as whole programs
_PER_STATE = 64  # candidates of a state that enter the queue, the cheapest first
# A graph is given up when its best has not become faster by this share for that share of its time,
# but not before so many seconds: what comes after can use the time better.
_PROGRESS = 1e-3
_PATIENCE, _LEAST_PATIENCE = 1 / 3, 5.0


def make_taso(*, alpha: float = ALPHA, max_states: int = 100_000, opened: bool = True) -> Strategy:
    """A TASO search.

    Args:
      alpha: states up to this factor above the best cost are kept.
      max_states: how many states are expanded at most for each graph (TASO's budget).
      opened: search from each of our openings, too, where TASO has the program itself.
    """

    def search(
        run: Run, space: Space, reached: list[Reached], index: int, clock: Stopwatch, key: jax.Array
    ) -> list[Reached]:
        return _best_first(run, space, reached, index, clock, alpha, max_states)

    phases = (Phase(_lowerings, 0.6), Phase(_greedily, 0.6), Phase(search))
    return lambda problem, budget, key: search_graphs(problem, budget, key, *phases, opened=opened)


def _lowerings(
    run: Run, space: Space, reached: list[Reached], index: int, clock: Stopwatch, key: jax.Array
) -> list[Reached]:
    return [
        descend(run, space, reached[0], index, clock, only=chooses_lowering, phase="lowerings"),
    ]


def _greedily(
    run: Run, space: Space, reached: list[Reached], index: int, clock: Stopwatch, key: jax.Array
) -> list[Reached]:
    return [descend(run, space, reached[0], index, clock, phase="greedy"), *reached]


class _Pending(NamedTuple):
    """A state that waits in the queue: `parent` itself, or what `move` would make of it."""

    parent: State
    steps: list[Step]
    move: tuple[int, int, int] | None  # entry, root, partner


def _best_first(
    run: Run,
    space: Space,
    roots: list[Reached],
    index: int,
    clock: Stopwatch,
    alpha: float,
    limit: int,
) -> list[Reached]:
    """States by cost, best first: the roots and what best-first search finds from them."""
    oracle = run.problem.oracle
    order = itertools.count()
    queue: list[tuple[float, int, _Pending]] = []
    for state, steps in roots:
        heapq.heappush(queue, (state.seconds, next(order), _Pending(state, steps, None)))
    seen: set[tuple[int, int]] = set()
    best = sorted(roots, key=lambda b: b[0].seconds)
    patience = max(_PATIENCE * clock.seconds, _LEAST_PATIENCE)
    least, since = best[0][0].seconds, clock.elapsed
    while queue and not run.out_of_budget(clock) and len(seen) < limit:
        if best[0][0].seconds < (1 - _PROGRESS) * least:
            least, since = best[0][0].seconds, clock.elapsed
        elif clock.elapsed - since > patience:
            run.stalled()
            break
        predicted, _, pending = heapq.heappop(queue)
        if predicted > alpha * best[0][0].seconds:
            break
        made = _made(space, pending, oracle.table(), index)
        if made is None:
            continue
        state, steps = made
        mark = space.identity(state)
        if mark in seen:
            continue
        seen.add(mark)
        slack = (alpha - 1) * best[0][0].seconds
        state, moves = known_moves(run, space, state, clock, lambda m, s=slack: m.delta <= s)
        best = [(space.reprice(s, oracle.table()), t) for s, t in best]
        if pending.move is not None:
            best.append((state, steps))
        best = sorted(best, key=lambda b: b[0].seconds)[:KEEP]
        run.keep(index, best)
        bound = alpha * best[0][0].seconds
        if state.seconds > bound:  # dearer than its parent's candidate was predicted to be
            continue
        for i in range(min(len(moves.entry), _PER_STATE)):
            after = state.seconds + float(moves.delta[i])
            if after > bound:
                break
            move = (int(moves.entry[i]), int(moves.root[i]), int(moves.partner[i]))
            heapq.heappush(queue, (after, next(order), _Pending(state, steps, move)))
        run.report("backtracking")
    return best


def _made(space: Space, pending: _Pending, costs: CostTable, index: int) -> Reached | None:
    """The pending state, under current costs; None where its candidate does not apply."""
    if pending.move is None:
        return space.reprice(pending.parent, costs), pending.steps
    entry, root, partner = pending.move
    parent = space.reprice(pending.parent, costs)
    child = space.step(parent, costs, entry, root, partner)
    if child is None:
        return None
    step = Step(
        index, space.rule_name(entry), space.place(parent, root), parent.seconds - child.seconds
    )
    return child, [*pending.steps, step]


def taso(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    """TASO's search with the defaults of `make_taso`."""
    return make_taso()(problem, budget, key)
