"""Chains of stages: each gets the results so far and the time left; the result reports Ctrl-C."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from tests.search.fakes import FakeOracle, compiled_rules
from xrl_jax.cost.config import CostConfig
from xrl_jax.cost.roofline import CostTable
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.measure.timing import Timing
from xrl_jax.program.program import Program
from xrl_jax.search import base
from xrl_jax.search.backtracking import Taso
from xrl_jax.search.base import Budget, Found, Problem, SearchResult, Step, StopReason
from xrl_jax.search.chain import alone, chain, changed_settings, name_of, pipeline, settings
from xrl_jax.search.refine import Refine
from xrl_jax.search.stages import Recall, Search

KEY = jax.random.key(0)


@cache
def program() -> Program:
    return from_jax(jnp.tanh, jnp.ones(3))


def found(name: str) -> Found:
    """Return a program that is not the original, with one step that identifies it."""
    return Found(program().with_graphs(program().graphs), 1.0, (Step(0, name, "%1", 0.0),))


def problem(recalled: Found | None = None) -> Problem:
    oracle = FakeOracle(lambda region: Timing(1e-3, 1e-3, 1e-3))
    return Problem(program(), compiled_rules(), oracle, recalled=recalled)


def names(result: SearchResult) -> list[str]:
    """Return the first rule of each program; "" for the original."""
    return [f.steps[0].rule if f.steps else "" for f in result.best]


@dataclass(frozen=True)
class Adds:
    """A stage that puts a program first."""

    name: str

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        so_far = problem.so_far
        return replace(so_far, best=(found(self.name), *so_far.best))


def interrupts(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    raise KeyboardInterrupt


def searches(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    """Return a result as a search does; assert that the search sees no earlier results."""
    assert problem.found is None and problem.recalled is None
    best = (found("searched"), Found(problem.program, 2.0))
    return SearchResult(best, 2.0, 1, StopReason.EXHAUSTED)


def test_a_stage_gets_the_results_of_earlier_stages() -> None:
    result = chain(Adds("a"), Adds("b"))(problem(), Budget(), KEY)
    assert names(result) == ["b", "a", ""]


def test_a_chain_is_a_stage() -> None:
    result = chain(Adds("a"), chain(Adds("b"), Adds("c")))(problem(), Budget(), KEY)
    assert names(result) == ["c", "b", "a", ""]


def test_a_stage_gets_the_remaining_time() -> None:
    given: list[float] = []

    def asks(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        given.append(budget.seconds)
        return problem.so_far

    chain(asks, asks)(problem(), Budget(seconds=1e-9), KEY)
    chain(asks, asks)(problem(), Budget(seconds=9.0), KEY)
    assert given[:2] == [1e-3, 1e-3]  # no time is left: the stages return at once
    assert 9.0 >= given[2] > given[3] > 8.0


def test_ctrl_c_ends_one_stage_and_is_reported() -> None:
    result = chain(Adds("a"), interrupts, Adds("b"))(problem(), Budget(), KEY)
    assert names(result) == ["b", "a", ""]
    assert result.stop is StopReason.INTERRUPTED and result.interrupted


def test_ctrl_c_while_the_original_is_priced_leaves_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pressed(program: Program, costs: CostTable) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(base, "predicted", pressed)
    result = chain(Recall(), Refine())(problem(), Budget(), KEY)
    assert names(result) == [""] and result.interrupted


def test_after_ctrl_c_nothing_is_searched_or_refined() -> None:
    def never(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        raise AssertionError("it was interrupted")

    result = chain(interrupts, Search(never), Refine())(problem(), Budget(), KEY)
    assert names(result) == [""]


def test_recalled_results_come_before_search_results() -> None:
    stages = chain(Recall(), Search(searches, uses_engine=False))
    result = stages(problem(found("recalled")), Budget(seconds=600.0), KEY)
    assert names(result) == ["recalled", "searched", ""]


def test_one_search_can_follow_another() -> None:
    def other(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        best = (found("other"), Found(problem.program, 2.0))
        return SearchResult(best, 2.0, 1, StopReason.EXHAUSTED)

    both = (Search(s, uses_engine=False) for s in (searches, other))
    result = chain(*both)(problem(), Budget(seconds=600.0), KEY)
    assert names(result) == ["searched", "other", ""]


def test_with_a_recalled_result_and_little_time_nothing_is_searched() -> None:
    stages = chain(Recall(), Search(searches, uses_engine=False))
    result = stages(problem(found("recalled")), Budget(seconds=19.0), KEY)
    assert names(result) == ["recalled", ""] and result.stop is StopReason.SECONDS
    result = stages(problem(), Budget(seconds=19.0), KEY)
    assert names(result) == ["searched", ""]


def test_reports_name_a_chain_after_its_search() -> None:
    assert name_of(pipeline(Taso())) == name_of(alone(Taso())) == name_of(Taso()) == "taso"
    assert name_of(pipeline(searches)) == name_of(searches) == "searches"


def test_hyperparameters_of_all_stages_are_listed() -> None:
    listed = settings(pipeline(Taso(alpha=1.0)))
    assert listed["Taso.alpha"] == 1.0 and listed["Walk.most_slowdown"] == 1.1
    assert listed["Search.share"] == 0.5 and listed["Refine.radius"] == 4
    assert changed_settings(pipeline(Taso(alpha=1.0))) == ("Taso.alpha",)
    assert changed_settings(alone(Taso(), uses_engine=False)) == ()


def test_hyperparameters_of_the_cost_model_are_listed_beside_those_of_a_search():
    assert settings(Taso(), CostConfig())["CostConfig.weight_only"] == 1e-3
    assert changed_settings(Taso(), CostConfig(weight_only=0.0)) == ("CostConfig.weight_only",)
