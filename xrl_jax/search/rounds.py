"""Search, time the best programs whole, let that correct the cost table, and refine the fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from xrl_jax.cost.programs import Timed, constants_pay, learn_from, ranked, time_programs
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.timing import Timing
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.search.base import (
    Alone,
    Budget,
    Found,
    Problem,
    SearchResult,
    StopReason,
    Strategy,
    calls_engine,
    predicted,
)
from xrl_jax.search.engine import COLD_SECONDS, compile_engine, is_compiled
from xrl_jax.search.in_library import in_library
from xrl_jax.search.refine import refine

_SEARCH_SHARE = 0.5  # of the time goes to the search
_ALONE_SHARE = 0.8  # of the time to one that is alone
_TIMING_SHARE = 0.3  # of what is left then, to timing its best programs whole
_REFINE_SHARE = 0.7  # of what is left then, to refining the fastest; the rest is for the check
_CHOICE = 6  # timings kept for its best programs, or half of all where there are few
# Seconds, at least, for a search where something is known without, and where its engine has to be
# compiled first.
_SEARCH_WORTH, _COMPILING_WORTH = 20.0, 35.0
_TIMING_WORTH = 5.0  # seconds, at least, for any timing before the check, which times the result
_CHECK_COMPILES = 5  # programs that the check compiles here; it must not begin too late for that


def search_in_rounds(
    strategy: Strategy,
    problem: Problem,
    budget: Budget,
    key: jax.Array,
    clock: Stopwatch,
    tell: Callable[[str], Any],
) -> tuple[SearchResult, list[Timed]]:
    """All programs found and their whole-program timings, fastest first.

    What is known from an earlier search, or where nothing is, the program with all its kernels in
    the library, is the first to be timed, and all there is where time is short: the former, and
    with hardly any time the latter, is not timed then, because the final check does that. What has
    to be compiled before any search is no part of the strategy's time.

    The first round is the strategy's: what it finds is timed whole, and corrects the cost table.
    The second refines the fastest. A strategy that is `Alone` has the first, and its own programs.
    `Timed.index` counts through the programs of the result. A round that was interrupted is the
    last.
    """
    oracle, alone = problem.oracle, isinstance(strategy, Alone)
    recalled = None if alone else problem.known
    if alone:
        problem = replace(problem, known=None)
    elif recalled is None:
        handed, steps = in_library(problem.program, problem.rules.rules)
        problem = replace(problem, known=Found(handed, float("inf"), steps) if steps else None)
    untimed = recalled is not None
    try:
        with plain_ctrl_c():
            if recalled is None and problem.known is not None and clock.left < _TIMING_WORTH:
                untimed = True
            else:  # read from the store for what is recalled
                oracle.constants = constants_pay(oracle, problem.program)
            cold = calls_engine(strategy) and not is_compiled(problem.program, problem.rules)
            least = _COMPILING_WORTH if cold else _SEARCH_WORTH
            if problem.known is not None and clock.left < least:
                strategy = _nothing_new
            elif not clock.done:
                oracle.measure_loops()
                if calls_engine(strategy):
                    once = f", once on this machine: some {COLD_SECONDS:.0f} s" if cold else ""
                    tell(f"compiling the engine{once}")
                    compile_engine(problem.program, problem.rules, oracle.table())
    except KeyboardInterrupt:
        clock = Stopwatch(0.0)
        strategy = _interrupted
    share = (_ALONE_SHARE if alone else _SEARCH_SHARE) * clock.left
    share = replace(budget, seconds=max(share, 1e-3), measurements=_of_a_search(budget))
    found = _guarded(strategy, problem, share, key)
    if problem.known is not None:
        known = problem.known
        known = replace(known, seconds=predicted(known.program, oracle.table()))
        found = replace(found, best=(known, *found.best))
    if untimed and problem.known is not None and strategy is _nothing_new:
        unknown = Timing.without("failed", "interrupted before it was timed")
        return found, [Timed(problem.known.program, (), unknown, 0)]
    interrupted = found.stop is StopReason.INTERRUPTED
    part = _REFINE_SHARE if strategy is _nothing_new else _TIMING_SHARE
    rest = Stopwatch(0.0) if interrupted else clock.part(part)
    timed = time_programs(
        oracle,
        [f.program for f in found.best],
        rest,
        measurements=budget.measurements,
        tell=tell,
    )
    if interrupted or clock.left <= 0:  # not `done`: Ctrl-C is dealt with in what follows
        return found, timed
    plain = [(t.program, t.timing) for t in timed if not t.options]
    learn_from(oracle, plain, problem.program)
    if alone:
        return found, timed
    # Options are the last resort: what they gain is judged after refining without them.
    start = next((t for t in timed if not t.options), timed[0])
    compiling = start.timing.compile_seconds
    best, steps = refine(
        oracle,
        problem.rules.rules,
        start,
        Stopwatch(min(_REFINE_SHARE * clock.left, clock.left - _CHECK_COMPILES * compiling)),
        measurements=budget.measurements,
        tell=tell,
    )
    if not steps:
        return found, timed
    learn_from(oracle, [(best.program, best.timing)], problem.program)
    before = found.best[start.index]
    refined = Found(best.program, predicted(best.program, oracle.table()), (*before.steps, *steps))
    refined_at = len(found.best)
    found = replace(found, best=(*found.best, refined, found.best[-1]))
    return found, ranked([replace(best, index=refined_at), *timed])


def _of_a_search(budget: Budget) -> int | None:
    """How many timings may have been made when a search ends, of those of the budget."""
    most = budget.measurements
    return None if most is None else most - min(_CHOICE, most // 2)


def _nothing_new(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    """The result of a search for which there is no time: the original."""
    seconds = predicted(problem.program, problem.oracle.table())
    return SearchResult((Found(problem.program, seconds),), seconds, 0, StopReason.SECONDS)


def _interrupted(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    """The result of a search that was stopped before it began: the original."""
    nothing = (Found(problem.program, float("inf")),)
    return SearchResult(nothing, float("inf"), 0, StopReason.INTERRUPTED)


def _guarded(strategy: Strategy, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    try:
        with plain_ctrl_c():
            return strategy(problem, budget, key)
    except KeyboardInterrupt:  # not the first: strategies keep what they have at that one
        return _interrupted(problem, budget, key)
