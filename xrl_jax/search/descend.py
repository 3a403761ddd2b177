"""Greedy descent, on its own or as a part of other searches: measure the regions that matter at a
state, then apply improving candidates as long as there are any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xrl_jax.cost.model import Oracle
from xrl_jax.cost.regions import Region
from xrl_jax.cost.view import CostView, view_graph
from xrl_jax.graph.graph import TensorGraph
from xrl_jax.language.rule import Rule
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.search.base import Step
from xrl_jax.search.run import Reached, Turn
from xrl_jax.search.states import PricedCandidates, State, variants_where

_view = engine_jit(lambda costs, graph: view_graph(costs.sharing, graph))


def measure_graph(
    oracle: Oracle, graph: TensorGraph, clock: Stopwatch, limit: int | None, new: int | None = None
) -> int:
    """Time the regions of a priced graph, the costliest first; return how many became known."""
    return oracle.measure(untimed(oracle, graph), clock=clock, limit=limit, new=new)


def untimed(oracle: Oracle, graph: TensorGraph) -> dict[tuple[int, int], Region]:
    """Return the regions of a priced graph that have no timing yet, the costliest first."""
    order = np.argsort(-np.asarray(graph.nodes.cost), kind="stable")
    views = CostView(*(np.asarray(v)[order] for v in _view(oracle.costs, graph)))  # type: ignore[arg-type]
    return oracle.untimed_regions(views)


@dataclass(frozen=True)
class Descent:
    """Descent by improving candidates, best first, until none improves or the time is over.

    Attributes:
      hope: a candidate is worth measuring if it is predicted to gain, or to lose at most this share
        of the cost of the nodes it replaces.
      at_once: number of regions timed before the candidates are priced and selected anew.
    """

    hope: float = 0.5
    at_once: int = 8

    def __call__(
        self,
        turn: Turn,
        *,
        only: Callable[[Rule], bool] = lambda rule: True,
        phase: str = "descending",
    ) -> Reached:
        """Return the state reached from the first state of the turn, and all steps to it.

        Each pass goes through the improving candidates of the state in order of gain and applies
        those that still match and still gain; then all candidates are found again.

        Args:
          only: whether a rule may be used.
          phase: name for the progress display.
        """
        run, space, reached, index, clock, _ = turn
        state, steps = reached[0]
        allowed = variants_where(space.rules, only)
        while not run.out_of_budget(clock):
            state, candidates = self.known_candidates(turn, state, self._is_promising, allowed)
            run.keep(index, [(state, steps)])
            costs = run.problem.oracle.costs
            improved = False
            for i in range(len(candidates.variant)):
                if candidates.delta[i] >= -1e-9 or run.clock.done:
                    break
                candidate = candidates.at(i)
                after = space.step(state, costs, *candidate)
                if after is None or after.seconds >= state.seconds - 1e-9:
                    continue
                place, gain = space.place(state, candidate[1]), state.seconds - after.seconds
                step = Step(index, space.rule_name(candidate[0]), place, gain)
                grown = after.graph.nodes.op.shape != state.graph.nodes.op.shape
                state, steps, improved = after, [*steps, step], True
                run.keep(index, [(state, steps)])
                if grown:
                    break  # slots moved as the bucket grew: find the candidates again
            run.report(phase)
            if not improved and not clock.done:
                break
        return state, steps

    def known_candidates(
        self,
        turn: Turn,
        state: State,
        promising: Callable[[PricedCandidates], np.ndarray],
        allowed: np.ndarray | None = None,
    ) -> tuple[State, PricedCandidates]:
        """Return the state and its candidates, priced after the regions of every promising
        candidate have been measured (as far as the budget allows).

        The costliest regions and the most promising ones are timed first, a few at a time: their
        timings calibrate the predictions for similar operators, after which many other candidates
        are not promising any more.

        Args:
          promising: returns [M] bool, which candidates are promising.
          allowed: [V] bool, which variants of the rule table may be used; all by default.
        """
        run, space, clock = turn.run, turn.space, turn.clock
        oracle, limit = run.problem.oracle, run.budget.measurements
        state = space.matched(state)
        while True:
            known = measure_graph(oracle, state.graph, clock, limit, self.at_once)
            if known:
                state = space.reprice(state, oracle.costs)
            candidates = space.candidates(state, oracle.costs, allowed)
            hopeful = promising(candidates)
            views = CostView(*(np.asarray(v)[hopeful] for v in candidates.views))  # type: ignore[arg-type]
            wanted = oracle.untimed_regions(views) if hopeful.any() else {}
            new = oracle.measure(wanted, clock=clock, limit=limit, new=self.at_once)
            if not new and not known:
                break
            state = space.reprice(state, oracle.costs)
        run.candidates += len(candidates.variant)
        return state, candidates

    def _is_promising(self, candidates: PricedCandidates) -> np.ndarray:
        return candidates.delta <= self.hope * candidates.gone
