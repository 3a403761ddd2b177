"""A new search needs code in one place: a function, or a class with its hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import xrl_jax
from xrl_jax.search.base import Budget, Problem, SearchResult
from xrl_jax.search.chain import alone
from xrl_jax.search.run import Reached, Turn
from xrl_jax.search.walk import Phase, Walk


@dataclass(frozen=True)
class FirstFew:
    """A search that applies the cheapest candidate `steps` times, whatever it costs."""

    steps: int = 2
    walk: Walk = field(default_factory=Walk)

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        return self.walk(problem, budget, key, [Phase(self._of_graph)])

    def _of_graph(self, turn: Turn) -> list[Reached]:
        costs = turn.run.problem.oracle.costs
        state, steps = turn.reached[0]
        for _ in range(self.steps):
            found = turn.space.candidates(state, costs)
            if not len(found.variant):
                break
            best = int(found.variant[0]), int(found.root[0]), int(found.partner[0])
            state = turn.space.step(state, costs, *best) or state
        return [(state, steps)]


def test_a_new_search_is_used_and_its_hyperparameters_are_reported(tmp_path: Path) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) + 0.0

    x = jnp.arange(4.0)
    fast = xrl_jax.optimize(
        fn,
        x,
        search=alone(FirstFew(steps=1)),
        rules=["add-zero"],
        budget=Budget(seconds=20.0),
        cache_dir=tmp_path,
        progress=False,
    )
    np.testing.assert_array_equal(fast(x), fn(x))
    report = fast.report
    assert report.search == "firstfew"
    assert report.settings["FirstFew.steps"] == 1
    assert "FirstFew.steps=1" in str(report)
