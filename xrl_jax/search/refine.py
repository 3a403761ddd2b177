"""Refinement: coordinate descent over the lowerings of the fastest program, judged by timing it
whole.

A region's time on its own is not its time in the network: caches are warm or cold, a producer is
fused or not. So the time left after a search is used to change the lowering of equal operators
together and to keep the changes that make the whole program faster. A whole program takes long to
compile, so a move is first probed in one neighbourhood; the moves that gain there are tried all at
once, then by halves. Before that, each lowering that many operators may take is tried for all of
them at once.
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

_LEAST_SHARE = 1e-9  # seconds; least weight of a move when a gain is divided among moves


@dataclass(frozen=True)
class Refine:
    """Stage that makes the fastest program faster by moves: other lowerings for equal operators.

    It tries the moves that gain in a neighbourhood, round after round, until every one has been
    tried; then, one by one, the moves that may gain only in the whole program, where caches and
    threads behave differently. Compile options are the last resort: their gain is judged after
    refining without them. Ctrl-C keeps the best program so far.

    Attributes:
      share: share of the time left; the rest is for the check.
      check_compiles: number of programs that the check compiles, for which time must remain.
      gain: moves stay if the program then takes at most this share of its time before.
      runs: a program and the best so far are timed for about this many runs each.
      least_seconds, most_seconds: bounds on the time of one trial, compiling apart.
      radius: how far a neighbourhood reaches up and down: to the next convolution and beyond, with
        the elementwise operators between them. Smaller ones are timed with warm caches, and err by
        more than moves gain.
      probe_gain: a move is tried with the others if its neighbourhood then takes at most this share
        of its time before.
      probe_hope: the same for a move to be tried in the time that remains in the end.
      probe_seconds: seconds for timing one neighbourhood, compiling apart.
      probe_timeout: seconds after which a neighbourhood is abandoned.
      probe_share: largest share of the time left for probing before programs are tried.
      least_promise: moves that promise less than this share of the gain they need are not tried.
      together_least: a lowering is tried for all operators at once if at least this many groups of
        equal operators may take it.
      together_ratio: such a group takes at most this share of its time then, by the cost model.
      together_most: largest number of such lowerings.
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
        start = next((f for f in timed if f.options == problem.oracle.options), timed[0])
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
        """Return the program after all moves that make it faster, with its timing and with these
        moves among its steps; `start` itself where no move does.

        Args:
          start: a program with a timing relative to the original.
          most: bound on the total number of the oracle's measurements.
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
    """The effect of a move in a neighbourhood."""

    # Seconds saved in a run of the program, if every place saves as much as the first; minus
    # infinity where the worker hung or died.
    saved: float
    ratio: float  # time after the move / time before; infinite where it cannot be timed


_NOTHING = Probe(0.0, math.inf)


class Screening:
    """Selects the moves that are worth a trial, by timing them in a neighbourhood."""

    def __init__(self, config: Refine, oracle: Oracle) -> None:
        self._config, self._oracle = config, oracle
        self._probes: dict[tuple[str, str], Probe] = {}  # by keys before and after the move

    def probe(self, program: Program, move: Move) -> Probe:
        """Return the effect of the move in the neighbourhood of its first place."""
        g, slot = move.places[0]
        before, after = (
            neighbourhood(p.graphs[g], slot, self._config.radius)
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
        how = {"options": self._oracle.options, "constants": self._oracle.constants}
        jobs = [program_job(p, **how) for p in (after, before)]
        timing = self._oracle.time_against(
            *jobs,
            seconds_per_job=self._config.probe_seconds,
            timeout=self._config.probe_timeout,
        )
        if timing.status in ("timeout", "killed"):
            return Probe(-math.inf, math.inf)
        if not timing.ok or timing.relative is None:
            return _NOTHING
        return Probe(timing.seconds / timing.relative - timing.seconds, timing.relative)


def _best_of_each(found: Sequence[Move]) -> list[Move]:
    """Return the move with the largest gain for each group of operators, largest gain first."""
    best: dict[tuple[tuple[int, int], ...], Move] = {}
    for move in sorted(found, key=lambda m: -m.gain):
        best.setdefault(move.places, move)
    return list(best.values())


@dataclass
class _Descent:
    """The state of a running refinement.

    Attributes:
      tried: moves, by places and lowering, that need no other trial.
      hopeful: moves that did not gain in a neighbourhood, but may gain in the whole program.
    """

    config: Refine
    problem: Problem
    clock: Stopwatch
    most: int | None
    best: Found
    incumbent: Job | None = None  # the job of `best`
    tried: set[tuple[tuple[tuple[int, int], ...], int]] = field(default_factory=set)
    hopeful: list[Move] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.screening = Screening(self.config, self.problem.oracle)

    def run(self) -> None:
        config = self.config
        for batch in by_lowering(
            self._moves(), least=config.together_least, ratio=config.together_ratio
        )[: config.together_most]:
            if self._no_time_for_trial():
                break
            self._try_moves(batch)
        while batch := self._promising():
            if not self._by_halves(batch):
                return
        for move in sorted(self.hopeful, key=lambda m: -m.gain):
            if self._no_time_for_trial():
                break
            self._try_moves([move])

    def _moves(self) -> list[Move]:
        return moves_of(self.problem.oracle, self.problem.rules.rules, self.best.program)

    def _by_halves(self, batch: list[Move]) -> bool:
        """Try moves all at once, then by halves if they do not stay; return whether there was time
        for that.
        """
        batches = [batch]
        while batches:
            batch = batches.pop()
            if self._no_time_for_trial():
                return False
            promised = sum(m.gain for m in batch)
            least = self.config.least_promise * (1 - self.config.gain) * self._timing.seconds
            if promised < least or self._try_moves(batch) or len(batch) == 1:
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

    def _no_time_for_trial(self) -> bool:
        """Return whether another trial could not end in time."""
        return self._over(self.clock) or self.clock.left < self._timing.compile_seconds

    def _promising(self) -> list[Move]:
        """Return one gaining move for each group, by its probe, the most promising first."""
        todo = [m for m in self._moves() if m[:2] not in self.tried]
        part, found = self.clock.part(self.config.probe_share), []
        self.hopeful.clear()
        for n, move in enumerate(todo):
            if self._over(part):
                break
            self.problem.phase(f"refining: probing move {n + 1} of {len(todo)}")
            probe = self.screening.probe(self.best.program, move)
            move = move._replace(gain=probe.saved)
            if probe.saved == -math.inf:  # it would fail in other neighbourhoods as well
                self.tried.add(move[:2])
            elif probe.ratio <= self.config.probe_gain:
                found.append(move)
            elif probe.ratio <= self.config.probe_hope:
                self.hopeful.append(move)
        return _best_of_each(found)

    def _try_moves(self, batch: Sequence[Move]) -> bool:
        """Return whether the program is faster after these moves; it then becomes the best one."""
        self.problem.phase(f"refining: trying {len(batch)} moves")
        best, before = self.best, self._timing
        program = moved(best.program, batch)
        job, self.incumbent = self._job(program), self.incumbent or self._job(best.program)
        timing = self._timing_if_faster(job, self.incumbent)
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

    def _timing_if_faster(self, job: Job, incumbent: Job) -> Timing | None:
        """Return the job's timing against the incumbent if it gains, else None.

        It must gain again when timed for longer: of many moves that gain nothing, some seem to.
        """
        config, timing = self.config, None
        once = 2 * config.runs * self._timing.seconds
        once = float(np.clip(once, config.least_seconds, config.most_seconds))
        for turn in range(2):
            timing = self.problem.oracle.time_against(
                job, incumbent, turn=turn, seconds_per_job=(1 + turn) * once, timeout=60.0
            )
            if not timing.ok or timing.relative is None or timing.relative > config.gain:
                return None
        return timing
