"""Greedy descent, and its restriction to lowerings.

`greedy` takes improving candidates until none improves. `local` does so with lowerings alone: each
node's best form on its own, which is what a lookup table would reach and every search has to beat.
So it is judged by that alone: nothing else is timed beside it, and it is not refined.
"""

from __future__ import annotations

import jax

from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.search.base import Alone, Budget, Problem, Reached, Run, SearchResult
from xrl_jax.search.changes import chooses_lowering
from xrl_jax.search.descend import descend
from xrl_jax.search.states import Space
from xrl_jax.search.walk import Phase, search_graphs


def greedy(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    """Improving candidates, best first, until there are none."""

    def search(
        run: Run, space: Space, reached: list[Reached], index: int, clock: Stopwatch, key: jax.Array
    ) -> list[Reached]:
        return [descend(run, space, reached[0], index, clock, phase="greedy")]

    return search_graphs(problem, budget, key, Phase(search))


@Alone
def local(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    """Each node's best lowering on its own."""

    def search(
        run: Run, space: Space, reached: list[Reached], index: int, clock: Stopwatch, key: jax.Array
    ) -> list[Reached]:
        return [descend(run, space, reached[0], index, clock, only=chooses_lowering, phase="local")]

    return search_graphs(problem, budget, key, Phase(search))
