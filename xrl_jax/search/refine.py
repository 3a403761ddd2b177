"""Refinement: coordinate descent over the lowerings of the fastest program, judged by timing it
whole.

A region's own time is not its time in the network: caches are warm or cold, a producer is fused or
not. So, with the time that is left, equal operators change their lowering together, and what makes
the whole program faster stays. A whole program takes long to compile, so a move is probed in one
neighbourhood first, and what gains there is tried all at once, then by halves. Before that,
lowerings that many operators may take are tried for all of these at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import numpy as np

from xrl_jax.cost.model import Oracle
from xrl_jax.cost.neighbourhood import neighbourhood
from xrl_jax.cost.programs import learn_from, program_job
from xrl_jax.graph.graph import nodes_of
from xrl_jax.graph.hash import timing_key
from xrl_jax.measure.base import Job
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.timing import Timing
from xrl_jax.program.program import Program
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.search.base import Budget, Found, Problem, SearchResult, Step, predicted
from xrl_jax.search.moves import Move, by_lowering, moved, moves_of
from xrl_jax.search.time_whole import ranked

_LEAST_SHARE = 1e-9  # seconds that a move counts for at least where a gain is shared out


@dataclass(frozen=True)
class Refine:
    """Make the fastest program faster by moves: another lowering for operators that are equal.

    Goes through the moves that gain in a neighbourhood again and again, until none is left that was
    not tried; then, one by one, through those that may gain only in the whole, where caches and
    threads are otherwise. Compile options are the last resort: what they gain is judged after
    refining without them. Ctrl-C keeps what has been found.

    Attributes:
      share: of the time left; the rest is for the check.
      check_compiles: programs that the check compiles; it must not begin too late for that.
      gain: what share of the program's time must be left at most, for moves to stay.
      runs: a program and the best so far are timed for about as many runs each.
      least_seconds, most_seconds: for one trial, compiling apart.
      radius: a neighbourhood reaches this far up and down: to the next convolution and beyond, with
        what is elementwise between them. Smaller ones are timed with warm caches, and err by more
        than they gain.
      probe_gain: of a neighbourhood's time that may be left, for a move to be tried at once.
      probe_hope: the same for it to be tried in what time is left in the end.
      probe_seconds: for timing one neighbourhood, compiling apart.
      probe_timeout: seconds until a neighbourhood is given up.
      probe_share: of the time left, at most, for neighbourhoods before programs are tried.
      least_promise: moves that promise less than this share of the gain they need are not tried.
      together_least: so many groups of operators may take a lowering that is tried for all at once.
      together_ratio: of their time that may be left by the model.
      together_most: lowerings that are tried so.
    """

    share: float = 0.7
    check_compiles: int = 5
    gain: float = 0.99
    runs: int = 100
    least_seconds: float = 0.3
    most_seconds: float = 3.0
    radius: int = 4
    probe_gain: float = 0.98
    probe_hope: float = 1.05
    probe_seconds: float = 0.3
    probe_timeout: float = 30.0
    probe_share: float = 0.5
    least_promise: float = 0.5
    together_least: int = 4
    together_ratio: float = 1.15
    together_most: int = 4

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        found = problem.so_far
        timed = [f for f in found.best if f.timing is not None]
        if found.interrupted or not timed:
            return found
        start = next((f for f in timed if not f.options), timed[0])
        assert start.timing is not None
        compiling = self.check_compiles * start.timing.compile_seconds
        seconds = min(self.share * budget.seconds, budget.seconds - compiling)
        best = self.refined(problem, start, Stopwatch(seconds), budget.measurements)
        if best is start:
            return found
        oracle = problem.oracle
        learn_from(oracle, [(best.program, best.timing)], problem.program)
        best = replace(best, seconds=predicted(best.program, oracle.costs))
        return replace(found, best=tuple(ranked([best, *found.best])))

    def refined(
        self, problem: Problem, start: Found, clock: Stopwatch, most: int | None = None
    ) -> Found:
        """The program after all moves that make it faster, with its timing and these moves among
        its steps; `start` itself where none does.

        Args:
          start: a program with a timing relative to the original.
          most: bound for all that the oracle may measure.
        """
        timing = start.timing
        if timing is None or not timing.ok or timing.relative is None:
            return start
        descent = _Descent(self, problem, clock, most, start)
        try:
            with plain_ctrl_c():
                descent.run()
        except KeyboardInterrupt:
            problem.phase("interrupted")
        return descent.best


class Probe(NamedTuple):
    """What a move does in a neighbourhood."""

    # Seconds of a run of the program, if every place saves what the first does; minus infinity
    # where the worker was lost over it.
    saved: float
    ratio: float  # of the neighbourhood's time that is left; infinite where it cannot be timed


_NOTHING = Probe(0.0, math.inf)


class Screening:
    """Tells which moves are worth a trial, by timing them in a neighbourhood."""

    def __init__(self, how: Refine, oracle: Oracle) -> None:
        self._how, self._oracle = how, oracle
        self._probes: dict[tuple[str, str], Probe] = {}  # by the two neighbourhoods' keys

    def probe(self, program: Program, move: Move) -> Probe:
        """What the move does in the neighbourhood of its first place."""
        g, slot = move.places[0]
        before, after = (
            neighbourhood(p.graphs[g], slot, self._how.radius)
            for p in (program, moved(program, [move]))
        )
        if before is None or after is None:
            return _NOTHING
        nodes = [nodes_of(p.graph)[:2] for p in (before, after)]
        key = timing_key(*nodes[0]), timing_key(*nodes[1])
        if key not in self._probes:
            self._probes[key] = self._timed(after, before)
        places = sum(
            a.lowering != b.lowering for a, b in zip(nodes[0][0], nodes[1][0], strict=True)
        )
        probe = self._probes[key]
        runs = sum(program.counts[g] for g, _ in move.places)
        return probe._replace(saved=probe.saved / places * runs)

    def _timed(self, after: Program, before: Program) -> Probe:
        jobs = [program_job(p, constants=self._oracle.constants) for p in (after, before)]
        timing = self._oracle.time_against(
            *jobs,
            seconds_per_job=self._how.probe_seconds,
            timeout=self._how.probe_timeout,
        )
        if timing.status in ("timeout", "killed"):
            return Probe(-math.inf, math.inf)
        if not timing.ok or timing.relative is None:
            return _NOTHING
        return Probe(timing.seconds / timing.relative - timing.seconds, timing.relative)


def _best_of_each(found: Sequence[Move]) -> list[Move]:
    """The move of every group that gains most, most first."""
    best: dict[tuple[tuple[int, int], ...], Move] = {}
    for move in sorted(found, key=lambda m: -m.gain):
        best.setdefault(move.places, move)
    return list(best.values())


@dataclass
class _Descent:
    """One refinement in its course.

    Attributes:
      tried: moves, by place and lowering, that need no other trial.
      hopeful: moves that were not seen to gain in a neighbourhood, and may in the whole.
    """

    how: Refine
    problem: Problem
    clock: Stopwatch
    most: int | None
    best: Found
    incumbent: Job | None = None  # of the best
    tried: set[tuple[tuple[tuple[int, int], ...], int]] = field(default_factory=set)
    hopeful: list[Move] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.screening = Screening(self.how, self.problem.oracle)

    def run(self) -> None:
        how = self.how
        for batch in by_lowering(self._moves(), least=how.together_least, ratio=how.together_ratio)[
            : how.together_most
        ]:
            if self._late():
                break
            self._stays(batch)
        while batch := self._promising():
            if not self._by_halves(batch):
                return
        for move in sorted(self.hopeful, key=lambda m: -m.gain):
            if self._late():
                break
            self._stays([move])

    def _moves(self) -> list[Move]:
        return moves_of(self.problem.oracle, self.problem.rules.rules, self.best.program)

    def _by_halves(self, batch: list[Move]) -> bool:
        """Try moves all at once, and by halves what does not stay; whether there was time."""
        batches = [batch]
        while batches:
            batch = batches.pop()
            if self._late():
                return False
            promised = sum(m.gain for m in batch)
            least = self.how.least_promise * (1 - self.how.gain) * self._timing.seconds
            if promised < least or self._stays(batch) or len(batch) == 1:
                self.tried.update(m[:2] for m in batch)
            else:
                half = (len(batch) + 1) // 2
                batches += [batch[half:], batch[:half]]
        return True

    @property
    def _timing(self) -> Timing:
        assert self.best.timing is not None
        return self.best.timing

    def _over(self, clock: Stopwatch) -> bool:
        spent = self.problem.oracle.spending.measurements
        return clock.done or (self.most is not None and spent >= self.most)

    def _late(self) -> bool:
        """Whether a trial could not end in time."""
        return self._over(self.clock) or self.clock.left < self._timing.compile_seconds

    def _promising(self) -> list[Move]:
        """Moves of different groups that gain in a neighbourhood, the most promising first."""
        todo = [m for m in self._moves() if m[:2] not in self.tried]
        part, found = self.clock.part(self.how.probe_share), []
        self.hopeful.clear()
        for n, move in enumerate(todo):
            if self._over(part):
                break
            self.problem.phase(f"refining: probing move {n + 1} of {len(todo)}")
            probe = self.screening.probe(self.best.program, move)
            move = move._replace(gain=probe.saved)
            if probe.saved == -math.inf:  # it would hang in other neighbourhoods as well
                self.tried.add(move[:2])
            elif probe.ratio <= self.how.probe_gain:
                found.append(move)
            elif probe.ratio <= self.how.probe_hope:
                self.hopeful.append(move)
        return _best_of_each(found)

    def _stays(self, batch: Sequence[Move]) -> bool:
        """Whether the program is faster after these moves; it is the best from now on if so."""
        self.problem.phase(f"refining: trying {len(batch)} moves")
        best, before = self.best, self._timing
        program = moved(best.program, batch)
        job, self.incumbent = self._job(program), self.incumbent or self._job(best.program)
        timing = self._faster(job, self.incumbent)
        if timing is None or timing.relative is None or before.relative is None:
            return False
        saved = before.seconds * (1.0 - timing.relative)
        shares = [max(m.gain, _LEAST_SHARE) for m in batch]
        steps = [
            Step(m.places[0][0], m.rule, m.text, saved * share / sum(shares))
            for m, share in zip(batch, shares, strict=True)
        ]
        timing = replace(timing, relative=before.relative * timing.relative)
        self.best = replace(best, program=program, timing=timing, steps=(*best.steps, *steps))
        self.incumbent = job
        return True

    def _job(self, program: Program) -> Job:
        return program_job(program, self.best.options, constants=self.problem.oracle.constants)

    def _faster(self, job: Job, incumbent: Job) -> Timing | None:
        """The job's timing against the incumbent if it gains, and does so again when timed for
        longer: of many moves that gain nothing, some seem to.
        """
        how, timing = self.how, None
        once = 2 * how.runs * self._timing.seconds
        once = float(np.clip(once, how.least_seconds, how.most_seconds))
        for turn in range(2):
            timing = self.problem.oracle.time_against(
                job, incumbent, turn=turn, seconds_per_job=(1 + turn) * once, timeout=60.0
            )
            if not timing.ok or timing.relative is None or timing.relative > how.gain:
                return None
        return timing
