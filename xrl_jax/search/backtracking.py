"""TASO's backtracking search (Jia et al., SOSP 2019, algorithm 2), without its weaknesses.

A queue holds graphs by cost. The cheapest is popped, every candidate is applied to it, and results
that cost less than alpha times the best go back into the queue. Differences from TASO: alpha is
above 1, since an alpha of 1 admits no loss; graphs seen before are recognised by a hash of their
structure, not by a sum over operators; regions are timed as they become promising, not all at
creation; and the search starts from the results of two descents (with lowerings only, then with
every rule), so that a short budget ends with at least those. The search is abandoned when it has
found nothing better for a while.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from xrl_jax.cost.roofline import CostTable
from xrl_jax.search.base import Budget, Problem, SearchResult, Step
from xrl_jax.search.descend import Descent
from xrl_jax.search.moves import chooses_lowering
from xrl_jax.search.run import Reached, Turn
from xrl_jax.search.states import Space, State
from xrl_jax.search.walk import Phase, Walk


class _Pending(NamedTuple):
    """A state in the queue: `parent` itself, or `parent` after applying `candidate`."""

    parent: State
    steps: list[Step]
    candidate: tuple[int, int, int] | None  # variant, root, partner


@dataclass(frozen=True)
class Taso:
    """TASO's search.

    Attributes:
      alpha: states that cost at most this factor times the best are kept. The default is that of
        TASO's C++ code; its Python examples use 1.0.
      most_states: largest number of states expanded for each graph (TASO's budget).
      own_start: search from the program itself only, as TASO does, not from the other starting
        points.
      keep: number of best states of each graph that are timed in whole programs.
      per_state: largest number of candidates of a state that enter the queue, cheapest first.
      progress, patience, least_patience: a graph is abandoned when its best state has not become
        faster by the share `progress` during the share `patience` of its time, and during at least
        `least_patience` seconds: later parts of the search can use the time better.
      lowerings_share, greedy_share: shares of the time left for the two descents.
      descent: the descent that both use.
      walk: how the graphs of the program share the time.
    """

    alpha: float = 1.05
    most_states: int = 100_000
    own_start: bool = False
    keep: int = 2
    per_state: int = 64
    progress: float = 1e-3
    patience: float = 1 / 3
    least_patience: float = 5.0
    lowerings_share: float = 0.6
    greedy_share: float = 0.6
    descent: Descent = field(default_factory=Descent)
    walk: Walk = field(default_factory=Walk)

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        phases = (
            Phase(self._lowerings, self.lowerings_share),
            Phase(self._greedily, self.greedy_share),
            Phase(self._best_first),
        )
        return self.walk(problem, budget, key, phases, from_starting_points=not self.own_start)

    def _lowerings(self, turn: Turn) -> list[Reached]:
        return [self.descent(turn, only=chooses_lowering, phase="lowerings")]

    def _greedily(self, turn: Turn) -> list[Reached]:
        return [self.descent(turn, phase="greedy"), *turn.reached]

    def _best_first(self, turn: Turn) -> list[Reached]:
        """Return the cheapest states, best first, among those of the turn and those that
        best-first search reaches from them.
        """
        run, space, roots, index, clock, _ = turn
        oracle = run.problem.oracle
        order = itertools.count()
        queue: list[tuple[float, int, _Pending]] = []
        for state, steps in roots:
            heapq.heappush(queue, (state.seconds, next(order), _Pending(state, steps, None)))
        seen: set[tuple[int, int]] = set()
        best = sorted(roots, key=lambda b: b[0].seconds)
        patience = max(self.patience * clock.seconds, self.least_patience)
        least, since = best[0][0].seconds, clock.elapsed
        while queue and not run.out_of_budget(clock) and len(seen) < self.most_states:
            if best[0][0].seconds < (1 - self.progress) * least:
                least, since = best[0][0].seconds, clock.elapsed
            elif clock.elapsed - since > patience:
                run.stalled()
                break
            predicted, _, pending = heapq.heappop(queue)
            if predicted > self.alpha * best[0][0].seconds:
                break
            made = _applied(space, pending, oracle.costs, index)
            if made is None:
                continue
            state, steps = made
            identity = space.identity(state)
            if identity in seen:
                continue
            seen.add(identity)
            slack = (self.alpha - 1) * best[0][0].seconds
            state, candidates = self.descent.known_candidates(
                turn, state, lambda m, s=slack: m.delta <= s
            )
            best = [(space.reprice(s, oracle.costs), t) for s, t in best]
            if pending.candidate is not None:
                best.append((state, steps))
            best = sorted(best, key=lambda b: b[0].seconds)[: self.keep]
            run.keep(index, best)
            bound = self.alpha * best[0][0].seconds
            if state.seconds > bound:  # more expensive than was predicted when it was queued
                continue
            for i in range(min(len(candidates.variant), self.per_state)):
                after = state.seconds + float(candidates.delta[i])
                if after > bound:
                    break
                pending = _Pending(state, steps, candidates.at(i))
                heapq.heappush(queue, (after, next(order), pending))
            run.report("backtracking")
        return best


def _applied(space: Space, pending: _Pending, costs: CostTable, index: int) -> Reached | None:
    """Return the pending state under current costs; None where its candidate does not apply."""
    if pending.candidate is None:
        return space.reprice(pending.parent, costs), pending.steps
    variant, root, partner = pending.candidate
    parent = space.reprice(pending.parent, costs)
    child = space.step(parent, costs, variant, root, partner)
    if child is None:
        return None
    step = Step(
        index, space.rule_name(variant), space.place(parent, root), parent.seconds - child.seconds
    )
    return child, [*pending.steps, step]
