"""Random search: repeated walks from the original that apply uniformly random candidates, each
until the cost has grown too far.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

from xrl_jax.search.base import Budget, Problem, SearchResult, Step
from xrl_jax.search.descend import measure_graph
from xrl_jax.search.run import Reached, Turn
from xrl_jax.search.walk import Phase, Walk


@dataclass(frozen=True)
class Random:
    """Search that keeps the best state met on random walks.

    Attributes:
      limit: a walk ends where the cost exceeds the start's by this factor.
      horizon: most candidates tried in one walk, as in X-RLflow.
    """

    limit: float = 2.0
    horizon: int = 100
    walk: Walk = field(default_factory=Walk)

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        return self.walk(problem, budget, key, [Phase(self._walks)])

    def _walks(self, turn: Turn) -> list[Reached]:
        rng = np.random.default_rng(np.asarray(jax.random.bits(turn.key, (2,), np.uint32)))
        best: Reached = turn.reached[0][0], []
        while not turn.run.out_of_budget(turn.clock):
            best, moved = self._one_walk(turn, best, rng)
            turn.run.report("random")
            if not moved:
                break  # no candidate applies
        return [best]

    def _one_walk(
        self, turn: Turn, best: Reached, rng: np.random.Generator
    ) -> tuple[Reached, bool]:
        """Return the best state after one walk, and whether the walk took any step."""
        run, space, reached, index, clock, _ = turn
        oracle = run.problem.oracle
        state, steps = space.reprice(reached[0][0], oracle.costs), []
        limit = self.limit * reached[0][0].seconds
        for _ in range(self.horizon):
            candidates = space.candidates(state, oracle.costs)
            run.candidates += len(candidates.variant)
            if not len(candidates.variant) or run.out_of_budget(clock):
                break
            i = int(rng.integers(len(candidates.variant)))
            candidate = candidates.at(i)
            after = space.step(state, oracle.costs, *candidate)
            if after is None:
                continue
            place, gain = space.place(state, candidate[1]), state.seconds - after.seconds
            steps = [*steps, Step(index, space.rule_name(candidate[0]), place, gain)]
            state = after
            if state.seconds < best[0].seconds:
                if measure_graph(oracle, state.graph, clock, run.budget.measurements):
                    state = space.reprice(state, oracle.costs)
                    best = (space.reprice(best[0], oracle.costs), best[1])
                if state.seconds < best[0].seconds:
                    best = (state, steps)
                    run.keep(index, [best])
            if state.seconds > limit:
                break
        return best, bool(steps)
