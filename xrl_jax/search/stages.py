"""Stages before and around a search: what is known without it, and the search with its share of the
time.

A stage gets what the stages before it have found in `Problem.found` and returns what is known after
it (`search.chain`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax

from xrl_jax.cost.programs import choose_constants
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

_LEAST_SECONDS = 1e-3  # of a search for which no time is left: it returns the original


def _with_first(found: SearchResult, first: Found) -> SearchResult:
    return replace(found, best=(first, *found.best))


def _known(problem: Problem) -> list[Found]:
    """What was found besides the original."""
    return [f for f in problem.so_far.best if f.program is not problem.program]


@dataclass(frozen=True)
class Recall:
    """Begin with what an earlier search of the same program has ended with."""

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        found = problem.so_far
        return found if problem.recalled is None else _with_first(found, problem.recalled)


@dataclass(frozen=True)
class KernelsInLibrary:
    """Where nothing is known, begin with all kernels in the library whose kernels share calls."""

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        found = problem.so_far
        if _known(problem) or found.interrupted:
            return found
        library = calling(problem.oracle.target.platform)
        program, steps = in_library(problem.program, problem.rules.rules, library)
        return _with_first(found, Found(program, float("inf"), steps)) if steps else found


@dataclass(frozen=True)
class WeightsAsConstants:
    """Decide whether weights are constants of compiled code, by timing the original both ways.

    Attributes:
      least_seconds: with less the original is not timed, but for a recalled result, whose timings
        are in the store.
    """

    least_seconds: float = 5.0

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        found = problem.so_far
        short = budget.seconds < self.least_seconds and _known(problem)
        if not found.interrupted and (not short or problem.recalled is not None):
            choose_constants(problem.oracle, problem.program)
        return found


@dataclass(frozen=True)
class Search:
    """A search with its share of the time; what was known before it comes first in the result.

    What has to be compiled before any search is no part of the search's time. Where time is short
    for that, or something is known and time is short, there is no search.

    Attributes:
      search: knows nothing of what came before it.
      share: of the time left.
      uses_engine: whether it calls the engine of `search.states`, which is then compiled first.
      least_seconds: for a search where something is known without.
      least_cold_seconds: for a search whose engine has to be compiled.
      finalists: timings kept for its best programs, or half of all where there are few.
    """

    search: Strategy
    share: float = 0.5
    uses_engine: bool = field(default=True, metadata={"setting": False})  # not a choice
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
        own = Budget(seconds, self._of_measurements(budget.measurements))
        found = self.search(replace(problem, found=None, recalled=None), own, key)
        costs = problem.oracle.costs
        known = [replace(f, seconds=predicted(f.program, costs)) for f in _known(problem)]
        return replace(found, best=(*known, *found.best))

    def _compile(self, problem: Problem, cold: bool) -> None:
        once = f", once on this machine: some {COLD_SECONDS:.0f} s" if cold else ""
        problem.phase(f"compiling the engine{once}")
        compile_engine(problem.program, problem.rules, problem.oracle.costs)

    def _of_measurements(self, most: int | None) -> int | None:
        """How many timings may have been made when the search ends."""
        return None if most is None else most - min(self.finalists, most // 2)


@dataclass(frozen=True)
class SearchAlone(Search):
    """A search with nothing beside it: only its programs are timed after it."""

    share: float = 0.8
