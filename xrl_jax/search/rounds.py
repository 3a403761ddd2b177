"""Search, time the best programs whole, let that correct the cost table, and search again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from xrl_jax.cost.programs import Timed, constants_pay, ranked, shares, time_programs
from xrl_jax.cost.timing import Stopwatch
from xrl_jax.search.base import (
    Budget,
    Found,
    Problem,
    SearchResult,
    StopReason,
    Strategy,
)

_ROUNDS = 2
_SEARCH_SHARE = 0.55  # of the time that is left goes to a round's search
_TIMING_SHARE = 0.5  # of what is left then, to timing its best programs whole
_ENOUGH = 0.3  # of the whole budget must be left for another round


def search_in_rounds(
    strategy: Strategy,
    problem: Problem,
    budget: Budget,
    key: jax.Array,
    clock: Stopwatch,
    tell: Callable[[str], Any],
) -> tuple[SearchResult, list[Timed]]:
    """The programs of all rounds and their whole-program timings, fastest first.

    `Timed.index` counts through the programs of the result. A round that was interrupted or has too
    little time behind it is the last.
    """
    result: SearchResult | None = None
    timed: list[Timed] = []
    try:
        problem.oracle.constants = constants_pay(problem.oracle, problem.program)
    except KeyboardInterrupt:
        clock = Stopwatch(0.0)
        strategy = _interrupted
    for subkey in jax.random.split(key, _ROUNDS):
        share = replace(budget, seconds=max(_SEARCH_SHARE * clock.left, 1e-3))
        found = _guarded(strategy, problem, share, subkey)
        interrupted = found.stop is StopReason.INTERRUPTED
        rest = Stopwatch(0.0) if interrupted else clock.part(_TIMING_SHARE)
        programs = [f.program for f in found.best]
        offset = 0 if result is None else len(result.best)
        timings = time_programs(problem.oracle, programs, rest, tell=tell)
        timed += [replace(t, index=t.index + offset) for t in timings]
        result = found if result is None else _joined(result, found)
        if interrupted or clock.left < _ENOUGH * budget.seconds:
            break
        plain = [t for t in timings if t.timing.ok and not t.options]
        problem.oracle.correct(
            [shares(t.program) for t in plain], [t.timing.seconds for t in plain]
        )
    assert result is not None
    return result, ranked(timed)


def _interrupted(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    """The result of a search that was stopped before it began: the original."""
    nothing = (Found(problem.program, float("inf")),)
    return SearchResult(nothing, float("inf"), 0, StopReason.INTERRUPTED)


def _guarded(strategy: Strategy, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    try:
        return strategy(problem, budget, key)
    except KeyboardInterrupt:  # not the first: strategies keep what they have at that one
        return _interrupted(problem, budget, key)


def _joined(first: SearchResult, second: SearchResult) -> SearchResult:
    """Both rounds' programs in order; predictions are those of their own round."""
    best = second.history[-1][1] if second.history else float("inf")
    known = first.history[-1][1] if first.history else float("inf")
    return SearchResult(
        (*first.best, *second.best),
        first.start_seconds,
        first.candidates + second.candidates,
        second.stop,
        first.history if known <= best else (*first.history, *second.history),
    )
