"""Random search: walks of uniformly random candidates from the original, each as long as the best
found so far allows.
"""

from __future__ import annotations

import jax
import numpy as np

from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.search.base import Budget, Problem, Reached, Run, SearchResult, Step
from xrl_jax.search.descend import measure_graph
from xrl_jax.search.states import Space
from xrl_jax.search.walk import Phase, search_graphs

_LIMIT = 2.0  # a walk ends where the cost exceeds the start's by this factor
_HORIZON = 100  # steps of one walk, as in X-RLflow


def random(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    """Best state met on random walks."""

    def search(
        run: Run, space: Space, reached: list[Reached], index: int, clock: Stopwatch, key: jax.Array
    ) -> list[Reached]:
        rng = np.random.default_rng(np.asarray(jax.random.bits(key, (2,), np.uint32)))
        oracle = run.problem.oracle
        start = reached[0][0]
        best: Reached = (start, [])
        while not run.out_of_budget(clock):
            state, steps = space.reprice(start, oracle.table()), []
            for _ in range(_HORIZON):
                moves = space.moves(state, oracle.table())
                run.candidates += len(moves.entry)
                if not len(moves.entry) or run.out_of_budget(clock):
                    break
                i = int(rng.integers(len(moves.entry)))
                after = space.step(
                    state,
                    oracle.table(),
                    int(moves.entry[i]),
                    int(moves.root[i]),
                    int(moves.partner[i]),
                )
                if after is None:
                    continue
                place = space.place(state, int(moves.root[i]))
                gain = state.seconds - after.seconds
                steps = [*steps, Step(index, space.rule_name(int(moves.entry[i])), place, gain)]
                state = after
                if state.seconds < best[0].seconds:
                    if measure_graph(oracle, state.graph, clock, run.budget.measurements):
                        state = space.reprice(state, oracle.table())
                        best = (space.reprice(best[0], oracle.table()), best[1])
                    if state.seconds < best[0].seconds:
                        best = (state, steps)
                        run.keep(index, [best])
                if state.seconds > _LIMIT * start.seconds:
                    break
            run.report("random")
            if not steps:
                break  # nothing applies at all
        return [best]

    return search_graphs(problem, budget, key, Phase(search))
