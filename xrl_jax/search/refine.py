"""Refinement: other forms for operators of the fastest program, judged by timing it whole.

A region's own time is not its time in the network: caches are warm or cold, a producer is fused or
not. So, with the time that is left, equal operators change their form together, and what makes the
whole program faster stays. A whole program takes long to compile, so a change is timed in one
neighbourhood first, and what gains there is tried all at once, then by halves. Before that, forms
that many operators may take are tried for all of these at once. This is coordinate descent on
measured programs, from where the search has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from xrl_jax.cost.model import Oracle
from xrl_jax.cost.neighbourhood import neighbourhood
from xrl_jax.cost.programs import Timed, program_job
from xrl_jax.graph.graph import nodes_of
from xrl_jax.graph.hash import timing_key
from xrl_jax.language.rule import Rule
from xrl_jax.measure.base import Job
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.timing import Timing
from xrl_jax.program.program import Program
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.search.base import Step
from xrl_jax.search.changes import Change, by_form, changed, changes

_GAIN = 0.99  # of the program's time must be left at most, for changes to stay
_TURNS = 100  # a program and its rival are timed for about as many runs each
_SECONDS = (0.3, 3.0)  # least and most for one trial, compiling apart
# A neighbourhood reaches this far up and down: to the next convolution and beyond, with what is
# elementwise between them. Smaller ones are timed with warm caches, and err by more than they gain.
_RADIUS = 4
_NEAR_GAIN = 0.98  # of a neighbourhood's time may be left, for a change to be tried at once
_NEAR_HOPE = 1.05  # the same for it to be tried in what time is left in the end
_NEAR_SECONDS = 0.3  # for timing one neighbourhood, compiling apart
_NEAR_TIMEOUT = 30.0
_SIEVE_SHARE = 0.5  # of the time left, at most, for neighbourhoods before programs are tried
# Changes that promise less than this share of the gain they need are not tried.
_LEAST_PROMISE = 0.5
# A form is tried for all at once that so many groups of operators may take; so much of their time
# may be left by the model; and so many forms are tried.
_WIDE_LEAST, _WIDE_RATIO, _WIDE_TRIED = 4, 1.15, 4
_LEAST_SHARE = 1e-9  # seconds that a change counts for at least where a gain is shared out


class Look(NamedTuple):
    """What a change does in a neighbourhood."""

    # Seconds of a run of the program, if every place saves what the first does; minus infinity
    # where the worker was lost over it.
    saved: float
    ratio: float  # of the neighbourhood's time that is left; infinite where it cannot be timed


_NOTHING = Look(0.0, math.inf)


class Sieve:
    """Tells which changes are worth a trial, by timing them in a neighbourhood."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._looks: dict[tuple[str, str], Look] = {}  # by the two neighbourhoods' keys

    def look(self, program: Program, change: Change) -> Look:
        """What the change does in the neighbourhood of its first place."""
        g, slot = change.places[0]
        before, after = (
            neighbourhood(p.graphs[g], slot, _RADIUS) for p in (program, changed(program, [change]))
        )
        if before is None or after is None:
            return _NOTHING
        nodes = [nodes_of(p.graph)[:2] for p in (before, after)]
        key = timing_key(*nodes[0]), timing_key(*nodes[1])
        if key not in self._looks:
            self._looks[key] = self._timed(after, before)
        places = sum(
            a.lowering != b.lowering for a, b in zip(nodes[0][0], nodes[1][0], strict=True)
        )
        look = self._looks[key]
        runs = sum(program.counts[g] for g, _ in change.places)
        return look._replace(saved=look.saved / places * runs)

    def _timed(self, after: Program, before: Program) -> Look:
        jobs = [program_job(p, constants=self._oracle.constants) for p in (after, before)]
        timing = self._oracle.time_against(
            *jobs, seconds_per_job=_NEAR_SECONDS, timeout=_NEAR_TIMEOUT
        )
        if timing.status in ("timeout", "killed"):
            return Look(-math.inf, math.inf)
        if not timing.ok or timing.relative is None:
            return _NOTHING
        return Look(timing.seconds / timing.relative - timing.seconds, timing.relative)


def _best_of_each(found: Sequence[Change]) -> list[Change]:
    """The change of every group that gains most, most first."""
    best: dict[tuple[tuple[int, int], ...], Change] = {}
    for change in sorted(found, key=lambda c: -c.gain):
        best.setdefault(change.places, change)
    return list(best.values())


def _faster(oracle: Oracle, job: Job, incumbent: Job, run_seconds: float) -> Timing | None:
    """The job's timing against the incumbent if it gains, and does so again when timed for longer:
    of many changes that gain nothing, some seem to.
    """
    once = float(np.clip(2 * _TURNS * run_seconds, *_SECONDS))
    timing = None
    for turn in range(2):
        timing = oracle.time_against(
            job, incumbent, turn=turn, seconds_per_job=(1 + turn) * once, timeout=60.0
        )
        if not timing.ok or timing.relative is None or timing.relative > _GAIN:
            return None
    return timing


def refine(
    oracle: Oracle,
    rules: Sequence[Rule],
    start: Timed,
    clock: Stopwatch,
    *,
    measurements: int | None = None,
    tell: Callable[[str], Any] = lambda _: None,
) -> tuple[Timed, tuple[Step, ...]]:
    """The program after all changes that make it faster, with its timing, and these changes.

    Goes through the changes that gain nearby again and again, until none is left that was not
    tried; then, one by one, through those that may gain only in the whole, where caches and threads
    are otherwise. Ends when the clock has run out. Ctrl-C keeps what has been found.

    Args:
      start: the program, with a timing relative to the original.
      measurements: bound for all that the oracle may measure; None for no bound.
    """
    best, steps = start, []
    if not start.timing.ok or start.timing.relative is None:
        return best, ()
    sieve = Sieve(oracle)
    tried: set[tuple[tuple[tuple[int, int], ...], int]] = set()
    hopeful: list[Change] = []  # that were not seen to gain nearby, and may

    def over(clock: Stopwatch) -> bool:
        return clock.done or (
            measurements is not None and oracle.spending.measurements >= measurements
        )

    def late() -> bool:
        """Whether a trial could not end in time."""
        return over(clock) or clock.left < best.timing.compile_seconds

    def promising() -> list[Change]:
        """Changes of different groups that gain nearby, the most promising first."""
        todo = [c for c in changes(oracle, rules, best.program) if c[:2] not in tried]
        part, found = clock.part(_SIEVE_SHARE), []
        hopeful.clear()
        for n, change in enumerate(todo):
            if over(part):
                break
            tell(f"refining: looking at change {n + 1} of {len(todo)}")
            look = sieve.look(best.program, change)
            change = change._replace(gain=look.saved)
            if look.saved == -math.inf:  # it would hang in other neighbourhoods as well
                tried.add(change[:2])
            elif look.ratio <= _NEAR_GAIN:
                found.append(change)
            elif look.ratio <= _NEAR_HOPE:
                hopeful.append(change)
        return _best_of_each(found)

    def stays(batch: Sequence[Change]) -> bool:
        """Whether the program is faster with these changes; it has them from now on if so."""
        nonlocal best, incumbent
        tell(f"refining: trying {len(batch)} changes")
        after = changed(best.program, batch)
        job = program_job(after, best.options, constants=oracle.constants)
        timing = _faster(oracle, job, incumbent, best.timing.seconds)
        if timing is None or timing.relative is None or best.timing.relative is None:
            return False
        saved = best.timing.seconds * (1.0 - timing.relative)
        relative = best.timing.relative * timing.relative
        best = replace(best, program=after, timing=replace(timing, relative=relative))
        shares = [max(c.gain, _LEAST_SHARE) for c in batch]
        for c, share in zip(batch, shares, strict=True):
            steps.append(Step(c.places[0][0], c.rule, c.text, saved * share / sum(shares)))
        incumbent = job
        return True

    try:
        with plain_ctrl_c():
            incumbent = program_job(best.program, best.options, constants=oracle.constants)
            found = changes(oracle, rules, best.program)
            for batch in by_form(found, least=_WIDE_LEAST, ratio=_WIDE_RATIO)[:_WIDE_TRIED]:
                if late():
                    break
                stays(batch)
            while batches := [b for b in [promising()] if b]:
                while batches:
                    batch = batches.pop()
                    if late():
                        return best, tuple(steps)
                    promised = sum(c.gain for c in batch)
                    least = _LEAST_PROMISE * (1 - _GAIN) * best.timing.seconds
                    if promised < least or stays(batch) or len(batch) == 1:
                        tried.update(c[:2] for c in batch)
                    else:
                        half = (len(batch) + 1) // 2
                        batches += [batch[half:], batch[:half]]
            for change in sorted(hopeful, key=lambda c: -c.gain):
                if late():
                    break
                stays([change])
    except KeyboardInterrupt:
        tell("interrupted")
    return best, tuple(steps)
