"""Refinement: other forms for operators of the fastest program, judged by timing it whole.

A region's own time is not its time in the network: caches are warm or cold, a producer is fused or
not. So, with the time that is left, equal operators change their form together, and what makes the
whole program faster stays. A whole program takes long to compile, so a change is timed in one
neighbourhood first, and what gains there is tried all at once, then by halves. This is coordinate
descent on measured programs, from where the search has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from xrl_jax.cost.ctrl_c import plain_ctrl_c
from xrl_jax.cost.model import Oracle
from xrl_jax.cost.neighbourhood import neighbourhood
from xrl_jax.cost.programs import Timed, program_job
from xrl_jax.cost.timing import Stopwatch, Timing
from xrl_jax.cost.worker import Job
from xrl_jax.graph.graph import nodes_of
from xrl_jax.graph.hash import timing_key
from xrl_jax.graph.program import Program
from xrl_jax.rewrite.rule import Rule
from xrl_jax.search.base import Step
from xrl_jax.search.changes import Change, changed, changes

_GAIN = 0.99  # of the program's time must be left at most, for changes to stay
_TURNS = 100  # a program and its rival are timed for about as many runs each
_SECONDS = (0.3, 3.0)  # least and most for one trial, compiling apart
# A neighbourhood reaches this far up and down: to the next convolution and beyond, with what is
# elementwise between them. Smaller ones are timed with warm caches, and err by more than they gain.
_RADIUS = 4
_NEAR_GAIN = 0.98  # of a neighbourhood's time must be left at most, for a change to be tried whole
_NEAR_SECONDS = 0.3  # for timing one neighbourhood, compiling apart
_NEAR_TIMEOUT = 30.0
_SIEVE_SHARE = 0.5  # of the time left, at most, for neighbourhoods before programs are tried
# Changes that promise less than this share of the gain they need are not tried.
_LEAST_PROMISE = 0.5


class Sieve:
    """Tells which changes are worth a trial, by timing them in a neighbourhood."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._saved: dict[tuple[str, str], float] = {}  # seconds, by the two neighbourhoods' keys

    def gain(self, program: Program, change: Change) -> float:
        """Seconds that a run of the program saves if every place saves what the first does in its
        neighbourhood; 0 where that is too little to be seen, or cannot be timed; minus infinity
        where the worker was lost over it.
        """
        g, slot = change.places[0]
        before, after = (
            neighbourhood(p.graphs[g], slot, _RADIUS) for p in (program, changed(program, [change]))
        )
        if before is None or after is None:
            return 0.0
        nodes = [nodes_of(p.graph)[:2] for p in (before, after)]
        key = timing_key(*nodes[0]), timing_key(*nodes[1])
        if key not in self._saved:
            self._saved[key] = self._timed(after, before)
        places = sum(
            a.lowering != b.lowering for a, b in zip(nodes[0][0], nodes[1][0], strict=True)
        )
        return self._saved[key] / places * sum(program.counts[g] for g, _ in change.places)

    def _timed(self, after: Program, before: Program) -> float:
        jobs = [program_job(p, constants=self._oracle.constants) for p in (after, before)]
        timing = self._oracle.time_against(
            *jobs, seconds_per_job=_NEAR_SECONDS, timeout=_NEAR_TIMEOUT
        )
        if timing.status in ("timeout", "killed"):
            return -math.inf
        if not timing.ok or timing.relative is None or timing.relative > _NEAR_GAIN:
            return 0.0
        return timing.seconds / timing.relative - timing.seconds


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

    Goes through the changes again and again, until none stays that was not tried, or the clock has
    run out. Ctrl-C keeps what has been found.

    Args:
      start: the program, with a timing relative to the original.
      measurements: bound for all that the oracle may measure; None for no bound.
    """
    best, steps = start, []
    if not start.timing.ok or start.timing.relative is None:
        return best, ()
    sieve = Sieve(oracle)
    tried: set[tuple[tuple[tuple[int, int], ...], int]] = set()

    def over(clock: Stopwatch) -> bool:
        return clock.done or (
            measurements is not None and oracle.spending.measurements >= measurements
        )

    def promising() -> list[Change]:
        """Changes of different groups that were not tried, the most promising first."""
        todo = [c for c in changes(oracle, rules, best.program) if c[:2] not in tried]
        part, found = clock.part(_SIEVE_SHARE), []
        for n, change in enumerate(todo):
            if over(part):
                break
            tell(f"refining: looking at change {n + 1} of {len(todo)}")
            gain = sieve.gain(best.program, change)
            found.append(change._replace(gain=gain))
            if gain == -math.inf:  # it would hang in other neighbourhoods as well
                tried.add(change[:2])
        return _best_of_each([c for c in found if c.gain > 0])

    try:
        with plain_ctrl_c():
            incumbent = program_job(best.program, best.options, constants=oracle.constants)
            while batches := [b for b in [promising()] if b]:
                while batches:
                    batch = batches.pop()
                    if over(clock):
                        return best, tuple(steps)
                    promised = sum(c.gain for c in batch)
                    if promised < _LEAST_PROMISE * (1 - _GAIN) * best.timing.seconds:
                        tried.update(c[:2] for c in batch)
                        continue
                    tell(f"refining: trying {len(batch)} changes")
                    after = changed(best.program, batch)
                    job = program_job(after, best.options, constants=oracle.constants)
                    timing = _faster(oracle, job, incumbent, best.timing.seconds)
                    if timing is not None:
                        ratio, before = timing.relative, best.timing
                        saved = before.seconds * (1.0 - ratio)  # type: ignore[operator]
                        relative = before.relative * ratio  # type: ignore[operator]
                        best = replace(
                            best, program=after, timing=replace(timing, relative=relative)
                        )
                        steps += [
                            Step(c.places[0][0], c.rule, c.text, saved * c.gain / promised)
                            for c in batch
                        ]
                        incumbent = job
                        tried.update(c[:2] for c in batch)
                    elif len(batch) == 1:
                        tried.add(batch[0][:2])
                    else:
                        half = (len(batch) + 1) // 2
                        batches += [batch[half:], batch[:half]]
    except KeyboardInterrupt:
        tell("interrupted")
    return best, tuple(steps)
