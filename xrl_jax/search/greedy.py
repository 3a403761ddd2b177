"""Greedy descent, and its restriction to lowerings.

`Greedy` applies improving candidates until none improves. `Local` does so with lowerings only,
which gives each node its best lowering on its own, as a lookup table would: the baseline that every
search has to beat.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax

from xrl_jax.search.base import Budget, Problem, SearchResult
from xrl_jax.search.descend import Descent
from xrl_jax.search.moves import chooses_lowering
from xrl_jax.search.run import Reached, Turn
from xrl_jax.search.walk import Phase, Walk


@dataclass(frozen=True)
class Greedy:
    """Search that applies improving candidates, best first, until there are none."""

    descent: Descent = field(default_factory=Descent)
    walk: Walk = field(default_factory=Walk)

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        return self.walk(problem, budget, key, [Phase(self._descend)])

    def _descend(self, turn: Turn) -> list[Reached]:
        return [self.descent(turn, phase="greedy")]


class Local(Greedy):
    """Search that gives each node its best lowering on its own."""

    def _descend(self, turn: Turn) -> list[Reached]:
        return [self.descent(turn, only=chooses_lowering, phase="local")]
