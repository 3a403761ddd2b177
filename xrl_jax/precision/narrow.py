"""The stage that spends a budget of error: lower precisions, where they save time.

Each product that reads a weight once may read it in float16, bfloat16 or int8; other products and
convolutions may multiply in int16, bfloat16 or int8, where the processor has instructions for that.
What this saves is priced by the cost model, after timing the operators; the error that it causes in
the results is measured on calibration inputs. Precisions are then chosen for several budgets of
error, up to the tolerance, and the programs are timed as wholes: the points of a Pareto frontier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from xrl_jax.libraries.base import Library
from xrl_jax.libraries.registry import calling
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.precision.budget import ErrorBudget
from xrl_jax.precision.choices import Choice, choice_within, worthwhile
from xrl_jax.precision.choose import Option
from xrl_jax.precision.errors import Errors
from xrl_jax.precision.gains import seconds_saved
from xrl_jax.precision.units import measured_units
from xrl_jax.program.host import disassemble, reassemble
from xrl_jax.program.program import Program
from xrl_jax.search.base import (
    Budget,
    Found,
    FrontierPoint,
    Narrowed,
    Problem,
    SearchResult,
    Step,
    frontier,
)
from xrl_jax.search.states import place_text
from xrl_jax.search.time_whole import TimeWhole, ranked
from xrl_jax.transform.narrow import (
    OPERANDS,
    PRECISIONS,
    Site,
    narrowed,
    sites,
    type_of,
)
from xrl_jax.transform.widen import operand_type

_NO_SITES = (
    "the processor has no instructions that multiply in one, and no product of at most 16 rows "
    "reads a weight"
)
_START = (FrontierPoint(1.0, 0.0),)  # the original


@dataclass(frozen=True)
class LowerPrecision:
    """Stage that adds programs of lower precision to the results, up to a tolerance.

    Attributes:
      tolerance: largest error of a result, relative to the largest element of its array; infinite
        where the precisions are those that the program had before the search.
      inputs: flat argument lists on which errors are measured; empty if the tolerance is infinite.
      unusual: others, on which an error as in bfloat16 is allowed as well.
      precisions: those that may be chosen.
      budgets: the shares of the tolerance for which precisions are chosen, largest first.
      timing_share: largest share of the time left that is used for timing operators.
      choice_share: the same for measuring errors, after that.
      same_time: of programs that take longer than the fastest by at most this share, the one with
        the smallest error is preferred.
      negligible: share of the gain of all sites below which the last sites are left out.
      least_seconds: with less time left, nothing is narrowed.
    """

    tolerance: float
    inputs: Sequence[Sequence[Any]] = field(metadata={"setting": False})
    unusual: Sequence[Sequence[Any]] = field(default=(), metadata={"setting": False})
    precisions: tuple[str, ...] = PRECISIONS
    budgets: tuple[float, ...] = (1.0, 0.3, 0.1)
    timing_share: float = 0.3
    choice_share: float = 0.4
    same_time: float = 0.02
    negligible: float = 0.02
    least_seconds: float = 3.0

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        found, clock = problem.so_far, Stopwatch(budget.seconds)
        library = calling(problem.oracle.target.platform)
        if found.interrupted:
            return found
        base = narrowing_starts_from(problem)
        if library is None:
            return _without(found, "no library here has kernels for them")
        places = self.places(base.program, library)
        if not places:
            return _without(found, _NO_SITES)
        if clock.left < self.least_seconds:
            return _without(found, "no time is left for that; give it more")
        problem.phase("timing lower precisions")
        timing = clock.part(self.timing_share)
        gains = seconds_saved(problem.oracle, base.program, places, library, timing)
        if not gains:
            return _without(found, "none saves time")
        problem.phase("measuring the errors of lower precisions")
        choices = self.choices(base.program, gains, clock)
        made = [self._made(base, choice, library) for choice in choices]
        if not made:
            return _without(found, "none saves time within the tolerance")
        original = replace(found.best[-1], program=problem.program, timing=None, options=())
        timed = TimeWhole().timed(problem, [*made, original], clock, budget.measurements)
        own = [f for f in timed if f.narrowed and f.timing is not None and f.timing.ok]
        points = [_point(f) for f in (*own, *found.best) if f.timing is not None and not f.options]
        best = _exact_first(ranked([*own, *found.best]), self.same_time)
        shown = frontier([*points, *_START]) if math.isfinite(self.tolerance) else ()
        return replace(found, best=tuple(best), frontier=shown)

    def places(self, program: Program, library: Library) -> dict[Site, tuple[str, ...]]:
        """Return the sites of a program, each with the precisions that may be chosen for it."""
        found = sites(program, library).items()
        places = {site: tuple(p for p in own if p in self.precisions) for site, own in found}
        return {site: own for site, own in places.items() if own}

    def choices(
        self, program: Program, gains: Mapping[Site, Mapping[str, float]], clock: Stopwatch
    ) -> list[Choice]:
        """Return a choice for each budget of error, among the options that there was time for, the
        largest gains first.
        """
        if math.isinf(self.tolerance):
            best = {s: max(own.items(), key=lambda o: o[1]) for s, own in gains.items()}
            return [Choice({s: Option(*o, 0.0) for s, o in best.items()}, 0.0)]
        gains = worthwhile(gains, self.negligible)
        places = {site: tuple(own) for site, own in gains.items()}
        errors = Errors(program, places, self.inputs, self.unusual)
        units = measured_units(gains, errors, clock.part(self.choice_share))
        found: list[Choice] = []
        for share in self.budgets:
            choice = choice_within(share * self.tolerance, units, errors)
            if choice.options and all(choice.options != known.options for known in found):
                found.append(choice)
        return found

    def _made(self, base: Found, choice: Choice, library: Library) -> Found:
        """Return the program with these precisions, not timed yet."""
        host, steps = disassemble(base.program), []
        for site, o in choice.options.items():
            node = (host.main, *host.bodies)[site.graph].nodes[site.index]
            at = site.index + 1, np.asarray(node.spec.code), np.asarray(node.shape)
            place = place_text(*at, np.asarray(len(node.shape)))
            of_one_run = o.gain / base.program.counts[site.graph]
            steps.append(Step(site.graph, o.name, place, of_one_run, o.error))
        saved = math.fsum(option.gain for option in choice.options.values())
        return replace(
            base,
            program=narrowed(base.program, choice.types, library),
            seconds=base.seconds - saved,
            steps=(*base.steps, *steps),
            timing=None,
            options=(),
            narrowed=Narrowed(base.program, choice.error),
        )


def _exact_first(timed: Sequence[Found], same_time: float) -> list[Found]:
    """Return programs, given fastest first, such that of equally fast ones the most exact leads."""
    first = timed[0]
    alike = [
        f
        for f in timed
        if f.options == first.options and f.relative <= first.relative * (1.0 + same_time)
    ]
    alike.sort(key=lambda f: 0.0 if f.narrowed is None else f.narrowed.error)
    return [*alike, *(f for f in timed if f not in alike)]


def _point(found: Found) -> FrontierPoint:
    rules = [s.rule for s in found.steps]
    types = ", ".join(f"{rules.count(p)} x {p.replace('-', ' ')}" for p in PRECISIONS if p in rules)
    error = 0.0 if found.narrowed is None else found.narrowed.error
    return FrontierPoint(found.relative, error, types)


def without_narrow_types(found: Found) -> Found:
    """Return a program as it was before its types were narrowed, with the steps that led to it."""
    if found.narrowed is None:
        return found
    steps = tuple(s for s in found.steps if s.rule not in PRECISIONS)
    return replace(found, program=found.narrowed.before, steps=steps, narrowed=None)


def narrowing_starts_from(problem: Problem) -> Found:
    """Return the best program that differs from the original, else the original, with its nodes
    numbered as `disassemble` does.
    """
    best = problem.so_far.best
    base = next((f for f in best if f.program is not problem.program), best[0])
    return replace(base, program=reassemble(base.program, disassemble(base.program)))


def _without(found: SearchResult, reason: str) -> SearchResult:
    """Return the results with a note that says why no precision is lower."""
    return found.with_note(f"nothing is in narrower types: {reason}")


def lower_precision(
    original: Program, program: Program, budget: ErrorBudget | None, platform: str
) -> LowerPrecision | None:
    """Return the stage that lowers precisions after a search; None if there is nothing to lower.

    Without a budget of error that is a program which multiplied in a narrow type: it may do so in
    that type, or for bfloat16 in int16, which errs less, where the machine is faster in these.

    Args:
      original: the program as it was traced.
      program: the program that is searched.
      budget: what the user allows.
    """
    if budget is not None:
        return LowerPrecision(budget.tolerance, budget.chosen_on, budget.unusual)
    library, dtype = calling(platform), operand_type(original)
    if library is None or dtype is None:
        return None
    types = (dtype, "int16") if dtype == "bfloat16" else (dtype,)
    own = tuple(p for p in OPERANDS if type_of(p) in types)
    stage = LowerPrecision(math.inf, (), precisions=own)
    return stage if stage.places(program, library) else None
