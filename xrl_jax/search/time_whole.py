"""Timing of a search's best programs as wholes, interleaved with the original: predictions are sums
over operators, but a user runs whole programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax

from xrl_jax.cost.programs import (
    Options,
    job_or_failure,
    learn_from,
    option_sets,
    program_job,
)
from xrl_jax.measure.base import Job
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.timing import Timing
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.search.base import Budget, Found, Problem, SearchResult

OPTION_GAIN = 0.15


@dataclass(frozen=True)
class TimeWhole:
    """Stage that times programs, the most promising first, and returns those timed, fastest first.

    All programs but the last, the original, are timed without compile options (or, where costs are
    those under options, as in `Oracle.options`, under these), then the fastest under every other
    set of compile options. Where these win, the original is timed under them as well, and then the
    fastest program interleaved with the fastest without options, which decides. The
    original is the reference of all timings, and comes first in the result where no program takes
    less time. Programs for which no time or measurement is left are dropped, except the first;
    Ctrl-C drops those that were not timed yet. Programs that failed in the worker are dropped as
    well, since they must not run in this process; those that cannot be sent to the worker (host
    callbacks) are kept with a timing that says so. If none is left, the result is the original. The
    timings correct the cost table. A program that has a timing already is not timed again.

    Attributes:
      share: share of the time left.
      share_without_search: the same where nothing was searched.
      least_seconds: where nothing was searched, the final check alone times the known programs if
        less time than this is left, or if the first of them is a recalled result.
      option_gain: the share that compile options must gain over none, because they are lost where
        the result is called inside another jit, and are one more thing that can change under the
        user's feet.
      more_option_gain: the same where costs are those under options already.
      confirm_seconds: seconds for the interleaved timing that decides on options.
      least_timeout: seconds a program is given to compile and run, even when the time runs out.
    """

    share: float = 0.3
    share_without_search: float = 0.7
    least_seconds: float = 5.0
    option_gain: float = OPTION_GAIN
    more_option_gain: float = 0.02
    confirm_seconds: float = 3.0
    least_timeout: float = 120.0

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        found, clock = problem.so_far, Stopwatch(budget.seconds)
        untimed = [f for f in found.best[:-1] or found.best if f.timing is None]
        if not untimed or self._final_check_suffices(problem, budget):
            return found
        share = self.share if found.candidates else self.share_without_search
        timed = self.timed(problem, found.best, clock.part(share), budget.measurements)
        if not found.interrupted and clock.left > 0:  # not `done`: later stages handle Ctrl-C
            base = problem.oracle.options
            plain = [(f.program, f.timing) for f in timed if f.options == base]
            learn_from(problem.oracle, plain, problem.program)
        return replace(found, best=tuple(timed))

    def _final_check_suffices(self, problem: Problem, budget: Budget) -> bool:
        found = problem.so_far
        if found.interrupted or found.candidates or len(found.best) == 1:
            return False
        recalled = problem.recalled
        is_recalled = recalled is not None and found.best[0].program is recalled.program
        return is_recalled or budget.seconds < self.least_seconds

    def timed(
        self, problem: Problem, best: Sequence[Found], clock: Stopwatch, most: int | None = None
    ) -> list[Found]:
        """Return the programs with their timings, fastest first.

        Args:
          best: the programs, the original last.
          most: bound on the total number of the oracle's measurements.
        """
        timing = _Timing(self, problem, best, clock, most)
        try:
            timing.run()
        except KeyboardInterrupt:
            problem.phase("interrupted")
        if not timing.found:
            lost = Timing.without("failed", "no program could be timed")
            return [replace(best[-1], timing=lost)]
        base = problem.oracle.options
        order = ranked(timing.found, self.gain(base), base)
        return self._original_first(order, best, base)

    def gain(self, base: Options) -> float:
        """Return the share that other compile options must gain over `base`."""
        return self.more_option_gain if base else self.option_gain

    def _original_first(
        self, timed: list[Found], best: Sequence[Found], base: Options
    ) -> list[Found]:
        """Return the programs, led by the original where none takes less time than it.

        The search's original was made from the user's function and may be faster than that: with
        loop steps unrolled, or the products of all steps merged into one.
        """
        first = timed[0].timing
        if len(best) == 1 or first is None or first.relative is None or first.relative < 1.0:
            return timed
        seconds = first.seconds / first.relative
        timing = replace(first, seconds=seconds, low=seconds, high=seconds, relative=1.0)
        return [replace(best[-1], timing=timing, options=base), *timed]


def ranked(
    timed: Sequence[Found], option_gain: float = OPTION_GAIN, base: Options = ()
) -> list[Found]:
    """Return programs fastest first, but those with other compile options than `base` last where
    these gain too little.
    """
    order = sorted(timed, key=lambda f: f.relative)
    plain = [f for f in order if f.options == base]
    least = 1 + option_gain
    if plain and order[0].options != base and plain[0].relative <= order[0].relative * least:
        return [*plain, *(f for f in order if f.options != base)]
    return order


@dataclass
class _Timing:
    """The state of a running timing of programs; `found` holds those timed so far."""

    config: TimeWhole
    problem: Problem
    best: Sequence[Found]
    clock: Stopwatch
    most: int | None
    found: list[Found] = field(default_factory=list)
    reference: Job | Timing | None = None

    def run(self) -> None:
        problem, original = self.problem, self.best[-1]
        constants = problem.oracle.constants
        self.reference = job_or_failure(original.program, self.base, constants=constants)
        for n, each in enumerate(self.best[:-1] or self.best):
            if each.timing is not None:
                self.found.append(each)
                continue
            if n and self._over():
                break
            problem.phase(f"timing program {n + 1}")
            self._time(each, self.base)
        fastest = next((f for f in self._ranked() if f.timing is not None and f.timing.ok), None)
        for options in option_sets(problem.oracle.target):
            if options in ((), self.base):
                continue
            if fastest is None or self._over():
                break
            problem.phase("timing the fastest program under compile options")
            if not self._time(fastest, options):
                break
        best_options = self._ranked()[0].options if self.found else self.base
        other = best_options != self.base
        is_original = fastest is not None and fastest.program is original.program
        if other and not is_original and not self._over():
            # Options may be the only gain: the original under them is a candidate like any other.
            problem.phase("timing the original under compile options")
            self._time(original, best_options)
        if other and not self._over():
            problem.phase("timing with and without compile options")
            self._confirm_options()

    def _ranked(self) -> list[Found]:
        return ranked(self.found, self.config.gain(self.base), self.base)

    @property
    def base(self) -> Options:
        """The compile options that costs are for."""
        return self.problem.oracle.options

    def _over(self) -> bool:
        spent = self.problem.oracle.spending.measurements
        over = self.most is not None and spent >= self.most
        return self.problem.so_far.interrupted or self.clock.done or over

    @plain_ctrl_c()
    def _time(self, each: Found, options: Options) -> bool:
        """Time a program; return whether other options are worth trying on it."""
        oracle = self.problem.oracle
        job = job_or_failure(each.program, options, constants=oracle.constants)
        if isinstance(job, Timing):
            self.found.append(replace(each, options=options, timing=job))
            return False
        timing = oracle.time_job(
            job,
            reference=self.reference if isinstance(self.reference, Job) else None,
            timeout=max(self.clock.left, self.config.least_timeout),
        )
        if timing.ok:
            self.found.append(replace(each, options=options, timing=timing))
        return timing.status not in ("timeout", "killed")

    def _confirm_options(self) -> None:
        """Drop all programs under compile options where the fastest of these does not gain enough,
        timed interleaved with the fastest without: each was timed against the original, at another
        time, and the quotient of two such ratios is not a comparison.
        """
        first, oracle = self._ranked()[0], self.problem.oracle
        plain = next(
            (f for f in self._ranked() if f.options == self.base and f.relative < math.inf), None
        )
        if first.options == self.base or plain is None:
            return
        jobs = [
            program_job(f.program, f.options, constants=oracle.constants) for f in (first, plain)
        ]
        timing = oracle.time_against(
            *jobs,
            seconds_per_job=self.config.confirm_seconds,
            timeout=max(self.clock.left, self.config.least_timeout),
        )
        if timing.relative is None or timing.relative * (1 + self.config.gain(self.base)) >= 1:
            self.found = [f for f in self.found if f.options == self.base]
