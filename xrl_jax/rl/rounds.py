"""The rounds of a search by a trained policy: what it has met, what it times, what it goes on from.

Rounds that explore follow optimistic estimates of untimed lowerings and time operators; the others
follow pessimistic ones and time programs whole.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

import jax
import numpy as np

from xrl_jax.cost.calibration import pessimistic_costs
from xrl_jax.cost.model import Oracle, price
from xrl_jax.cost.programs import job_or_failure, learn_from, program_key
from xrl_jax.graph.graph import GraphError, bucket_for
from xrl_jax.measure.base import Job
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.timing import Timing
from xrl_jax.program.program import Program
from xrl_jax.rl.env import start_of
from xrl_jax.rl.overrides import OverrideSearch
from xrl_jax.rl.rollouts import Decoder
from xrl_jax.search.base import Found, predicted
from xrl_jax.search.descend import measure_graph
from xrl_jax.search.run import Run
from xrl_jax.search.starting_points import with_layout
from xrl_jax.transform.layout import FEATURES_LAST
from xrl_jax.transform.union import united, united_bucket, united_size

Key = tuple[str, ...]  # see `program_key`


@dataclasses.dataclass(frozen=True)
class RoundsConfig:
    """Hyperparameters of the rounds.

    Attributes:
      start: of the time, at most, for the operators of the original.
      regions: of the time left, at most, for the operators of a round's cheapest programs.
      few: of the timings left, where they are bounded, at most, for the operators of the original
        and of a round's programs: the others are for whole programs.
      timed, whole: programs timed whole in a round: so many, and more while that takes no longer
        than this share of the time left.
      hope: what is timed whole is predicted to take at most so many times what the fastest does.
      better: of the best so far must be left, for a program to be better.
      explores: rounds that explore before one that times programs; all but the last of them begin
        anew.
      untimed: share of the time without such a round after which the next does not explore.
      late: share of the time after which all rounds time programs.
      learns: operators that are timed in a round that explores: these timings calibrate predictions
        for similar operators, so the next rollouts avoid what has disappointed.
      at_once: operators that are timed before programs are ranked anew.
      stalled: rounds without a better program, after which a search ends if no override is untried.
      kept: programs that a search ends with.
      waiting: programs that may be timed whole in a later round.
      drawn: rollouts of a round, at least, that draw their actions; the others have overrides.
    """

    start: float = 0.15
    regions: float = 0.25
    few: float = 0.25
    timed: int = 3
    whole: float = 0.2
    hope: float = 1.2
    better: float = 0.99
    explores: int = 3
    untimed: float = 0.3
    late: float = 0.6
    learns: int = 32
    at_once: int = 8
    stalled: int = 8
    kept: int = 4
    waiting: int = 32
    drawn: int = 4


@dataclasses.dataclass
class Rounds:
    """What a search has met so far, and what it does in a round.

    Attributes:
      how: hyperparameters.
      kept: programs by key.
      waiting: those that were met and not timed whole.
      timings: of programs whole, in turn with the original; by key.
      reference: the original's job, where programs are timed whole.
      slots: of candidates, those that the first round needs: others would have to be compiled.
      overrides: what overrides save, by where rollouts begin.
      timed_at: when a round that timed programs ended, in seconds of the search.
    """

    how: RoundsConfig
    decoder: Decoder
    run: Run
    original: Found
    kept: dict[Key, Found] = dataclasses.field(default_factory=dict)
    waiting: dict[Key, Found] = dataclasses.field(default_factory=dict)
    timings: dict[Key, Timing] = dataclasses.field(default_factory=dict)
    reference: Job | None = None
    slots: int = 0
    overrides: dict[Key, OverrideSearch] = dataclasses.field(default_factory=dict)
    timed_at: float = 0.0

    @property
    def oracle(self) -> Oracle:
        return self.run.problem.oracle

    @functools.cached_property
    def starts(self) -> tuple[Found, ...]:
        """What rounds that begin anew begin from, in turn."""
        last = with_layout(self.original.program, FEATURES_LAST)
        try:
            united_bucket(last.program)
        except GraphError:  # too large with its transposes: the original may fit
            return (self.original,)
        same = last.program is self.original.program
        return (self.original,) if same else (self.original, Found(last.program, 0.0, last.steps))

    @functools.cached_property
    def bucket(self) -> int:
        """Where rollouts are made: another would have to be compiled."""
        return max(united_bucket(start.program) for start in self.starts)

    def to_go_on_from(self) -> Found:
        """The best program so far; the original where none was timed whole, or where it has
        outgrown the bucket.
        """
        best = self.original if not self.kept else self.results()[0]
        fits = bucket_for(united_size(best.program)) <= self.bucket
        return best if fits else self.original

    @property
    def pending(self) -> bool:
        """Whether an override is untried of what rounds begin from; a former best is left."""
        begun = (program_key(f.program) for f in (*self.starts, self.to_go_on_from()))
        return any(self.overrides[key].pending for key in begun if key in self.overrides)

    def measure(
        self, program: Program, clock: Stopwatch, limit: int | None, new: int | None = None
    ) -> int:
        """Time the operators of a program, until so many timings were made in all; how many became
        known.

        Args:
          new: bound for the timings that are made now.
        """
        graph, _ = united(program, bucket=self.bucket)
        priced, _ = price(self.oracle.costs, graph)
        return measure_graph(self.oracle, priced, clock, limit, new)

    def limit_of_regions(self) -> int | None:
        """How many timings may have been made when operators have had their share of those left."""
        limit, spent = self.run.budget.measurements, self.oracle.spending.measurements
        return None if limit is None else spent + math.ceil(self.how.few * max(limit - spent, 0))

    def may_explore(self, explored: int) -> bool:
        """Whether the next round explores, after so many that did: one where timings are bounded,
        which are for programs rather; fewer where they take long, none where it is late; all where
        no program is timed whole.
        """
        if self.reference is None:
            return True
        clock = self.run.clock
        untimed = clock.elapsed - self.timed_at > self.how.untimed * clock.seconds
        late = clock.elapsed > self.how.late * clock.seconds or (explored > 0 and untimed)
        most = self.how.explores if self.run.budget.measurements is None else 1
        return explored < most and not late

    def turn(self, anew: Found | None, key: jax.Array, *, explores: bool) -> bool:
        """One round; whether it has learned anything that another may go by.

        Args:
          anew: what rollouts begin from; None for the best program so far.
          explores: untimed lowerings have an optimistic estimate, and operators are timed; else
            programs are.
        """
        run, before = self.run, self.best()
        if anew is None and not self.kept and run.budget.measurements is None:
            # The best is not known. Timings that are bounded are for what later rounds meet, too.
            self.time_whole()
        begun = self.to_go_on_from() if anew is None else anew
        costs = self.oracle.costs if explores else pessimistic_costs(self.oracle.costs)
        start = start_of(begun.program, self.decoder.rules, costs, bucket=self.bucket)
        self.slots = self.slots or self.decoder.slots_for(start)
        overrides = self.overrides.setdefault(
            program_key(begun.program),
            OverrideSearch(np.random.default_rng(np.asarray(jax.random.key_data(key)))),
        )
        plan = overrides.plan(self.decoder.how.rollouts(self.bucket) - self.how.drawn)
        met = self.decoder.rollouts(
            begun,
            start,
            costs,
            key,
            plan=plan,
            slots=self.slots,
            over=run.out_of_budget,
        )
        overrides.learn(plan, met.outcomes)
        run.candidates += met.candidates
        if met.most > self.slots:
            run.note = f"it saw {self.slots} of up to {met.most} candidates at a step, drawn evenly"
        by_key = {program_key(f.program): f for f in reversed(met.found)}
        new = {k: f for k, f in by_key.items() if k not in self.kept and k not in self.timings}
        learned = (
            self.confirm(new, run.clock.part(self.how.regions), most=self.how.learns)
            if explores
            else 0
        )
        if self.reference is None:
            self.kept |= new
            self.kept = dict(self._ranked(self.kept)[: self.how.kept])
        else:
            self.waiting = dict(
                self._ranked(self.waiting | new, pessimistic=True)[: self.how.waiting]
            )
            if not explores:
                learned += self.confirm(
                    self.waiting, run.clock.part(self.how.regions), pessimistic=True
                )
                self.time_whole()
                self.timed_at = run.clock.elapsed
        return learned > 0 or self.best() < self.how.better * before

    def confirm(
        self,
        found: Mapping[Key, Found],
        clock: Stopwatch,
        *,
        pessimistic: bool = False,
        most: int | None = None,
    ) -> int:
        """Time the operators of programs, those of the cheapest first: what was not timed seems to
        be faster than it is, and which is the cheapest changes with it. How many became known.

        Args:
          pessimistic: see `_ranked`.
          most: operators that are timed.
        """
        learned, limit = 0, self.limit_of_regions()
        while not clock.done and (most is None or learned < most):
            for _, each in self._ranked(found, pessimistic=pessimistic):
                if made := self.measure(each.program, clock, limit, self.how.at_once):
                    learned += made
                    break
            else:
                break
        return learned

    def best(self) -> float:
        """What share of the original's time the best program so far takes."""
        if self.reference is not None:
            return min([1.0, *map(relative, self.timings.values())])
        least = min((f.seconds for _, f in self._ranked(self.kept)), default=math.inf)
        return min(1.0, least / self.predicted())

    def predicted(self) -> float:
        """Seconds of the original under the costs of now."""
        return predicted(self.original.program, self.oracle.costs)

    def results(self) -> list[Found]:
        """The best programs, best first, all predictions under the costs of now; where none was
        timed whole yet, what is to be.
        """
        ranked = self._ranked(self.kept or self.waiting, pessimistic=not self.kept)
        if self.reference is not None and self.kept:
            ranked = sorted(ranked, key=lambda each: relative(self.timings[each[0]]))
        return [f for _, f in ranked[: self.how.kept]]

    def _ranked(
        self, found: Mapping[Key, Found], *, pessimistic: bool = False
    ) -> list[tuple[Key, Found]]:
        """Programs under the costs of now, the cheapest first.

        Args:
          pessimistic: untimed lowerings have a pessimistic estimate.
        """
        costs = self.oracle.costs
        costs = pessimistic_costs(costs) if pessimistic else costs
        priced = [
            (k, dataclasses.replace(f, seconds=predicted(f.program, costs)))
            for k, f in found.items()
        ]
        return sorted(priced, key=lambda each: each[1].seconds)

    def time_whole(self) -> None:
        """Time the most promising of those that wait, in turn with the original, unless that cannot
        be timed; each corrects the costs that the next is chosen by. Every other choice is by
        pessimistic estimates of untimed lowerings, the rest by optimistic ones: where few operators
        were timed, the best have lowerings that were not. Where one way to choose leaves none hope,
        the other is asked.
        """
        if self.reference is None:
            return
        clock = self.run.clock.part(self.how.whole)
        for n in itertools.count():
            if self.run.out_of_budget() or (n >= self.how.timed and clock.done):
                break
            pessimistic = n % 2 == 0
            chosen = self._most_promising(pessimistic=pessimistic) or self._most_promising(
                pessimistic=not pessimistic
            )
            if chosen is None:
                break
            key, found = chosen
            del self.waiting[key]
            job = job_or_failure(found.program, (), constants=self.oracle.constants)
            failed = isinstance(job, Timing)
            timing = job if failed else self.oracle.time_against(job, self.reference)
            self.timings[key] = timing
            if timing.relative is not None:
                self.kept[key] = found
                timed = [(f.program, self.timings[k]) for k, f in self.kept.items()]
                learn_from(self.oracle, timed, self.original.program)

    def _most_promising(self, *, pessimistic: bool) -> tuple[Key, Found] | None:
        """Of the programs that wait the cheapest, unless the fastest timed whole leaves it no hope.

        Args:
          pessimistic: untimed lowerings have a pessimistic estimate.
        """
        waits = self._ranked(self.waiting, pessimistic=pessimistic)
        if not waits or not self.kept:
            return waits[0] if waits else None
        fastest = min(self.kept, key=lambda key: relative(self.timings[key]))
        (_, bound), *_ = self._ranked({fastest: self.kept[fastest]}, pessimistic=pessimistic)
        return waits[0] if waits[0][1].seconds <= self.how.hope * bound.seconds else None


def relative(timing: Timing) -> float:
    """Time in turn with the original, as a share of its; infinite for what failed."""
    return math.inf if timing.relative is None else timing.relative
