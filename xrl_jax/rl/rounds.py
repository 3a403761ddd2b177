"""The rounds of a search by a trained policy: where they begin, what they time and what they keep.

Rounds that explore use optimistic estimates of untimed lowerings and time operators; the others
use pessimistic estimates and time whole programs.
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
      start_share: share of the time, at most, for timing the operators of the original.
      operators_share: share of the time left, at most, for timing the operators of a round's
        cheapest programs.
      timings_share: share of the timings left, if these are bounded, at most, for the operators of
        the original and of a round's programs; the others are for whole programs.
      n_whole, whole_share: `n_whole` programs are timed whole in a round, and more while that takes
        no longer than the share `whole_share` of the time left.
      hope: a program is timed whole only if its predicted time is at most this multiple of the
        prediction for the fastest.
      better: a program is better if it takes less than this share of the best so far.
      n_exploring: number of exploring rounds before one that times programs; all but the last of
        them begin anew.
      untimed_share: share of the time without timed programs after which the next round does not
        explore.
      late_share: share of the time after which all rounds time programs.
      n_operators: operators timed in an exploring round; these timings calibrate predictions for
        similar operators, so the next rollouts avoid rewrites that have disappointed.
      at_once: operators that are timed before programs are ranked again.
      patience: rounds in a row that learned nothing (`Rounds.run_round`) after which a search ends
        if no override is untried.
      n_kept: number of programs that a search returns.
      n_waiting: number of programs that may be timed whole in a later round.
      least_sampled: least number of rollouts of a round that sample their actions; the others have
        overrides.
    """

    start_share: float = 0.15
    operators_share: float = 0.25
    timings_share: float = 0.25
    n_whole: int = 3
    whole_share: float = 0.2
    hope: float = 1.2
    better: float = 0.99
    n_exploring: int = 3
    untimed_share: float = 0.3
    late_share: float = 0.6
    n_operators: int = 32
    at_once: int = 8
    patience: int = 8
    n_kept: int = 4
    n_waiting: int = 32
    least_sampled: int = 4


@dataclasses.dataclass
class Rounds:
    """The state of a search, and the steps of a round.

    Attributes:
      config: hyperparameters.
      kept: programs that may be returned, by key; if programs are timed whole, only timed ones.
      waiting: programs that were found but not timed whole, by key.
      timings: of whole programs, interleaved with the original, by key.
      reference: the original's job; None if programs are not timed whole.
      slots: number of candidates that the policy sees, fixed by the first round, because another
        number would have to be compiled.
      overrides: a search for overrides for each program that rollouts have begun from.
      timed_at: when the last round that timed programs ended, in seconds of the search.
    """

    config: RoundsConfig
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
        """The programs to begin anew from, used in turn by the rounds that do so."""
        last = with_layout(self.original.program, FEATURES_LAST)
        try:
            united_bucket(last.program)
        except GraphError:  # its transposes make it too large; the original may fit
            return (self.original,)
        same = last.program is self.original.program
        return (self.original,) if same else (self.original, Found(last.program, 0.0, last.steps))

    @functools.cached_property
    def bucket(self) -> int:
        """The bucket of all rollouts, because another one would have to be compiled."""
        return max(united_bucket(start.program) for start in self.starts)

    def current_best(self) -> Found:
        """Return the best program so far; the original if none is kept, or if it has outgrown the
        bucket.
        """
        best = self.original if not self.kept else self.results()[0]
        fits = bucket_for(united_size(best.program)) <= self.bucket
        return best if fits else self.original

    @property
    def pending(self) -> bool:
        """Whether an override is untried for a program that rounds begin from; those of a former
        best program are ignored.
        """
        begun = (program_key(f.program) for f in (*self.starts, self.current_best()))
        return any(self.overrides[key].pending for key in begun if key in self.overrides)

    def measure(
        self, program: Program, clock: Stopwatch, limit: int | None, new: int | None = None
    ) -> int:
        """Time the operators of a program; return how many became known.

        Args:
          limit: bound on the timings made in the whole search.
          new: bound on the timings made by this call.
        """
        graph, _ = united(program, bucket=self.bucket)
        priced, _ = price(self.oracle.costs, graph)
        return measure_graph(self.oracle, priced, clock, limit, new)

    def limit_of_regions(self) -> int | None:
        """Return how many timings the whole search may have made once operators have used their
        share of those left; None for no bound.
        """
        limit, spent = self.run.budget.measurements, self.oracle.spending.measurements
        if limit is None:
            return None
        return spent + math.ceil(self.config.timings_share * max(limit - spent, 0))

    def may_explore(self, explored: int) -> bool:
        """Return whether the next round explores, after `explored` rounds in a row that did.

        If timings are bounded, one round explores, because they are rather meant for programs.
        Fewer explore if they take long, none if it is late, and all if no program is timed whole.
        """
        if self.reference is None:
            return True
        clock = self.run.clock
        untimed = clock.elapsed - self.timed_at > self.config.untimed_share * clock.seconds
        late = clock.elapsed > self.config.late_share * clock.seconds or (explored > 0 and untimed)
        most = self.config.n_exploring if self.run.budget.measurements is None else 1
        return explored < most and not late

    def run_round(self, begin_from: Found | None, key: jax.Array, *, explores: bool) -> bool:
        """Run one round; return whether it learned anything that another round may use.

        Args:
          begin_from: the program that rollouts begin from; None for the best so far.
          explores: untimed lowerings have an optimistic estimate, and operators are timed; else
            they have a pessimistic one, and programs are timed, too.
        """
        run, before = self.run, self.best()
        if begin_from is None and not self.kept and run.budget.measurements is None:
            # No program was timed, so the best is unknown. Bounded timings are not spent here,
            # because they are for the programs of later rounds, too.
            self.time_whole()
        begun = self.current_best() if begin_from is None else begin_from
        costs = self.oracle.costs if explores else pessimistic_costs(self.oracle.costs)
        start = start_of(begun.program, self.decoder.rules, costs, bucket=self.bucket)
        self.slots = self.slots or self.decoder.slots_for(start)
        overrides = self.overrides.setdefault(
            program_key(begun.program),
            OverrideSearch(np.random.default_rng(np.asarray(jax.random.key_data(key)))),
        )
        plan = overrides.plan(self.decoder.config.rollouts(self.bucket) - self.config.least_sampled)
        results = self.decoder.rollouts(
            begun,
            start,
            costs,
            key,
            plan=plan,
            slots=self.slots,
            must_end=run.out_of_budget,
        )
        overrides.learn(plan, results.outcomes)
        run.candidates += results.candidates
        most = results.most_candidates
        if most > self.slots:
            run.note = (
                f"it saw {self.slots} of up to {most} candidates at a step, sampled uniformly"
            )
        by_key = {program_key(f.program): f for f in reversed(results.found)}
        new = {k: f for k, f in by_key.items() if k not in self.kept and k not in self.timings}
        learned = 0
        if explores:
            clock = run.clock.part(self.config.operators_share)
            learned = self.confirm(new, clock, most=self.config.n_operators)
        if self.reference is None:
            self.kept |= new
            self.kept = dict(self._ranked(self.kept)[: self.config.n_kept])
        else:
            self.waiting = dict(
                self._ranked(self.waiting | new, pessimistic=True)[: self.config.n_waiting]
            )
            if not explores:
                learned += self.confirm(
                    self.waiting, run.clock.part(self.config.operators_share), pessimistic=True
                )
                self.time_whole()
                self.timed_at = run.clock.elapsed
        return learned > 0 or self.best() < self.config.better * before

    def confirm(
        self,
        found: Mapping[Key, Found],
        clock: Stopwatch,
        *,
        pessimistic: bool = False,
        most: int | None = None,
    ) -> int:
        """Time the operators of programs, those of the cheapest first; return how many became
        known. Programs are ranked again after a few timings, because an untimed operator seems to
        be faster than it is, and its timing may change which program is the cheapest.

        Args:
          pessimistic: see `_ranked`.
          most: number of operators after which this ends.
        """
        learned, limit = 0, self.limit_of_regions()
        while not clock.done and (most is None or learned < most):
            for _, each in self._ranked(found, pessimistic=pessimistic):
                if made := self.measure(each.program, clock, limit, self.config.at_once):
                    learned += made
                    break
            else:
                break
        return learned

    def best(self) -> float:
        """Return the time of the best program so far as a share of the original's."""
        if self.reference is not None:
            return min([1.0, *map(relative, self.timings.values())])
        least = min((f.seconds for _, f in self._ranked(self.kept)), default=math.inf)
        return min(1.0, least / self.predicted())

    def predicted(self) -> float:
        """Return the predicted seconds of the original under the current costs."""
        return predicted(self.original.program, self.oracle.costs)

    def results(self) -> list[Found]:
        """Return the best programs, best first, with predictions under the current costs; if none
        is kept yet, the cheapest of those that wait to be timed whole.
        """
        ranked = self._ranked(self.kept or self.waiting, pessimistic=not self.kept)
        if self.reference is not None and self.kept:
            ranked = sorted(ranked, key=lambda each: relative(self.timings[each[0]]))
        return [f for _, f in ranked[: self.config.n_kept]]

    def _ranked(
        self, found: Mapping[Key, Found], *, pessimistic: bool = False
    ) -> list[tuple[Key, Found]]:
        """Return programs with predictions under the current costs, the cheapest first.

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
        """Time the most promising of the waiting programs whole, interleaved with the original,
        unless that cannot be timed.

        Each timing corrects the costs by which the next program is chosen. Choices alternate
        between pessimistic and optimistic estimates of untimed lowerings: where few operators were
        timed, the best programs have lowerings that were not. If one kind of estimate leaves no
        program with hope, the other is used.
        """
        if self.reference is None:
            return
        clock = self.run.clock.part(self.config.whole_share)
        for n in itertools.count():
            if self.run.out_of_budget() or (n >= self.config.n_whole and clock.done):
                break
            pessimistic = n % 2 == 0
            chosen = self._most_promising(pessimistic=pessimistic) or self._most_promising(
                pessimistic=not pessimistic
            )
            if chosen is None:
                break
            key, found = chosen
            del self.waiting[key]
            oracle = self.oracle
            job = job_or_failure(found.program, oracle.options, constants=oracle.constants)
            failed = isinstance(job, Timing)
            timing = job if failed else self.oracle.time_against(job, self.reference)
            self.timings[key] = timing
            if timing.relative is not None:
                self.kept[key] = found
                timed = [(f.program, self.timings[k]) for k, f in self.kept.items()]
                learn_from(self.oracle, timed, self.original.program)

    def _most_promising(self, *, pessimistic: bool) -> tuple[Key, Found] | None:
        """Return the cheapest waiting program; None if there is none, or if its prediction is too
        far above that of the fastest program timed whole (`RoundsConfig.hope`).

        Args:
          pessimistic: untimed lowerings have a pessimistic estimate.
        """
        waits = self._ranked(self.waiting, pessimistic=pessimistic)
        if not waits or not self.kept:
            return waits[0] if waits else None
        fastest = min(self.kept, key=lambda key: relative(self.timings[key]))
        (_, bound), *_ = self._ranked({fastest: self.kept[fastest]}, pessimistic=pessimistic)
        return waits[0] if waits[0][1].seconds <= self.config.hope * bound.seconds else None


def relative(timing: Timing) -> float:
    """Return the time as a share of the original's, timed interleaved; infinite if it failed."""
    return math.inf if timing.relative is None else timing.relative
