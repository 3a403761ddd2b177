"""Stages that find programs without a search, and the stage that runs a search.

A stage gets the results of the stages before it in `Problem.found` and returns the results known
after it (`search.chain`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import jax

from xrl_jax.cost.programs import choose_constants, choose_options
from xrl_jax.libraries.registry import calling
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.search.base import (
    Budget,
    Found,
    Problem,
    SearchResult,
    StopReason,
    Strategy,
    predicted,
)
from xrl_jax.search.engine import COLD_SECONDS, compile_engine, is_compiled
from xrl_jax.search.in_library import in_library

_LEAST_SECONDS = 1e-3  # for a search when no time is left: it returns the original


def _with_first(found: SearchResult, first: Found) -> SearchResult:
    return replace(found, best=(first, *found.best))


def _known(problem: Problem) -> list[Found]:
    """Return the programs found so far, without the original."""
    return [f for f in problem.so_far.best if f.program is not problem.program]


@dataclass(frozen=True)
class Recall:
    """Stage that puts first the result of an earlier search of the same program."""

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        found = problem.so_far
        return found if problem.recalled is None else _with_first(found, problem.recalled)


@dataclass(frozen=True)
class KernelsInLibrary:
    """Stage that puts first the program with all kernels in the library whose kernels share calls,
    unless another program than the original is known already.
    """

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        found = problem.so_far
        if _known(problem) or found.interrupted:
            return found
        library = calling(problem.oracle.target.platform)
        program, steps = in_library(problem.program, problem.rules.rules, library)
        return _with_first(found, Found(program, float("inf"), steps)) if steps else found


@dataclass(frozen=True)
class HowToCompile:
    """Stage that decides whether weights are constants of compiled code, and under which compile
    options operators are priced, by timing the original in each way.

    Attributes:
      least_seconds: with less time the original is not timed if another program is known, except
        where that is a recalled result, whose timings are in the store.
    """

    least_seconds: float = 5.0

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        found = problem.so_far
        short = budget.seconds < self.least_seconds and _known(problem)
        if not found.interrupted and (not short or problem.recalled is not None):
            choose_constants(problem.oracle, problem.program)
            choose_options(problem.oracle, problem.program)
        return found


@runtime_checkable
class Compiled(Protocol):
    """A search with functions of its own to be compiled before its time begins."""

    def compile(self, problem: Problem) -> None: ...


def compile_search(search: Strategy, problem: Problem) -> None:
    """Compile the functions of a search that has some of its own."""
    if isinstance(search, Compiled):
        search.compile(problem)


@dataclass(frozen=True)
class Search:
    """Stage that runs a search; programs known before it come first in the result.

    The search's time starts after the engine has been compiled. There is no search if too little
    time is left to compile the engine, or if little is left and another program is known already.

    Attributes:
      search: the strategy; it is not passed the results of earlier stages.
      share: share of the time left that the search gets.
      uses_engine: whether it calls the engine of `search.states`, which is then compiled first.
      least_seconds: least time for a search where another program is known.
      least_cold_seconds: least time for a search whose engine has to be compiled.
      finalists: measurements reserved for timing its best programs, but at most half of all.
    """

    search: Strategy
    share: float = 0.5
    uses_engine: bool = field(default=True, metadata={"setting": False})  # not a hyperparameter
    least_seconds: float = 20.0
    least_cold_seconds: float = 35.0
    finalists: int = 6

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        before, clock = problem.so_far, Stopwatch(budget.seconds)
        if before.interrupted:
            return before
        cold = self.uses_engine and not is_compiled(problem.program, problem.rules)
        least = self.least_cold_seconds if cold else self.least_seconds
        if clock.left < least and (cold or _known(problem)):
            return replace(before, stop=StopReason.COLD if cold else StopReason.SECONDS)
        if not clock.done:
            problem.oracle.measure_loops()
            if self.uses_engine:
                self._compile(problem, cold)
        seconds = max(self.share * clock.left, _LEAST_SECONDS)
        own = Budget(seconds, self._search_measurements(budget.measurements))
        found = self.search(replace(problem, found=None, recalled=None), own, key)
        costs = problem.oracle.costs
        known = [replace(f, seconds=predicted(f.program, costs)) for f in _known(problem)]
        return replace(found, best=(*known, *found.best))

    def _compile(self, problem: Problem, cold: bool) -> None:
        once = f" (once per machine, about {COLD_SECONDS:.0f} s)" if cold else ""
        problem.phase(f"compiling the engine{once}")
        compile_engine(problem.program, problem.rules, problem.oracle.costs)
        compile_search(self.search, problem)

    def _search_measurements(self, most: int | None) -> int | None:
        """Return how many measurements may have been made when the search ends."""
        return None if most is None else most - min(self.finalists, most // 2)


@dataclass(frozen=True)
class SearchAlone(Search):
    """Stage that runs a search on its own: after it, only the search's programs are timed."""

    share: float = 0.8
