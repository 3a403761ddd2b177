"""Search by a trained policy: rollouts under predicted costs, whose best programs are timed.

Each round follows the policy, by its most probable actions, by these but for one decision
(`rl.edits`), and by actions drawn.
Up to three rounds explore, fewer where these take long: forms that were not timed have the benefit
of the doubt, and some operators of the programs that are met are timed, those of what is the
cheapest by now first, a few at a time. In the next what was not timed is dear, and of the programs
met so far the cheapest are timed whole, in turn with the original; each corrects the costs that the
next is chosen by. This one goes on from the best program so far, as the third that explores, and
the first that does times what was met before so that there is one; the other two begin from the
original, since what was learned may make another way the better one, and every other time from the
original with images features last where they cross the borders of folded bodies, where no rewrite
can turn them. Nothing else is tried: what this finds, the policy has found. What its steps gain is
told as it was predicted when they were made.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

import jax
import numpy as np

from xrl_jax.cost.calibration import sceptical
from xrl_jax.cost.model import Oracle, price
from xrl_jax.cost.programs import job_or_failure, learn_from, program_key
from xrl_jax.graph.graph import GraphError, bucket_for
from xrl_jax.measure.base import Job
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.timing import Timing
from xrl_jax.program.program import Program
from xrl_jax.rl.edits import Edited
from xrl_jax.rl.env import start_of
from xrl_jax.rl.finetune import finetuned
from xrl_jax.rl.policy import Policy, load_policy
from xrl_jax.rl.rollouts import Decoder, at_once
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.search.base import (
    Budget,
    Found,
    Problem,
    Run,
    SearchResult,
    StopReason,
    Strategy,
    predicted,
    without_engine,
)
from xrl_jax.search.descend import measure_graph
from xrl_jax.search.openings import turned
from xrl_jax.transform.layout import FEATURES_LAST
from xrl_jax.transform.union import united, united_bucket, united_size

_START = 0.15  # of the time, at most, for the operators of the original
_REGIONS = 0.25  # of the time left, at most, for the operators of a round's cheapest programs
# Of the timings left, where they are bounded, at most, for the operators of the original and of a
# round's programs: the others are for whole programs.
_FEW = 0.25
# Programs timed whole in a round: so many, and more while that takes no longer than this share of
# the time left; predicted to take at most so many times what the fastest is.
_TIMED, _WHOLE, _HOPE = 3, 0.2, 1.2
_BETTER = 0.99  # of the best so far must be left, for a program to be better
# Rounds that explore before one that times programs, all but the last of them begin anew, the
# share of the time after which the second or third does not begin, and that after which all rounds
# time programs.
_EXPLORES, _UNTIMED, _LATE = 3, 0.3, 0.6
# Operators that are timed in a round that explores: what they take says what their forms are worth
# elsewhere, and the next rollouts do not go by what has disappointed.
_LEARNS = 32
_AT_ONCE = 8  # operators that are timed before programs are ranked anew
_STALLED = 8  # rounds without a better program, after which a search ends if no edit is untried
_KEPT = 4  # programs that a search ends with
_WAITING = 32  # programs that may be timed whole in a later round
_DRAWN = 4  # rollouts of a round, at least, that draw their actions; the others have edits

Key = tuple[str, ...]  # see `program_key`


def by_policy(policy: Policy, *, finetune: bool = False, whole: bool = True) -> Strategy:
    """A strategy that follows this policy.

    Args:
      finetune: train it further on the program first, for half of the time (`rl.finetune`).
      whole: programs are timed whole; else the search goes by predictions alone.
    """

    @without_engine  # `rl.rollouts` has its own
    def strategy(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        config, weights = policy.fitted(problem.rules)
        notes = [f"the policy was trained on {policy.trained or 'what its file does not say'}"]
        to_tune, key = jax.random.split(key)
        if finetune:
            clock = Stopwatch(budget.seconds)
            weights, updates = finetuned(config, weights, problem, budget, to_tune)
            notes.append(f"then on this program, {updates} updates")
            budget = dataclasses.replace(budget, seconds=max(clock.left, 1e-3))
        run, decoder = Run(problem, budget), Decoder(config, weights, problem.rules)
        best = _followed(_Search(decoder, run, Found(problem.program, 0.0)), key, whole=whole)
        note = "; ".join(filter(None, (*notes, run.note)))
        original, history = best[-1].seconds, tuple(run.history)
        return SearchResult(best, original, run.candidates, run.stop, history, note)

    strategy.__name__ = "xrlflow"  # as reports call it
    return strategy


def xrlflow(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    """Rollouts of the policy that comes with the package.

    Raises:
      PolicyError: it does not fit this version.
    """
    return by_policy(load_policy())(problem, budget, key)


@dataclasses.dataclass
class _Search:
    """What a search has met so far.

    Attributes:
      kept: programs by key.
      waiting: those that were met and not timed whole.
      timings: of programs whole, in turn with the original; by key.
      reference: the original's job, where programs are timed whole.
      slots: of candidates, those that the first round needs: others would have to be compiled.
      edited: what edits save, by where rollouts begin.
      timed_at: when a round that timed programs ended, in seconds of the search.
    """

    decoder: Decoder
    run: Run
    original: Found
    kept: dict[Key, Found] = dataclasses.field(default_factory=dict)
    waiting: dict[Key, Found] = dataclasses.field(default_factory=dict)
    timings: dict[Key, Timing] = dataclasses.field(default_factory=dict)
    reference: Job | None = None
    slots: int = 0
    edited: dict[Key, Edited] = dataclasses.field(default_factory=dict)
    timed_at: float = 0.0

    @property
    def oracle(self) -> Oracle:
        return self.run.problem.oracle

    @functools.cached_property
    def starts(self) -> tuple[Found, ...]:
        """What rounds that begin anew begin from, in turn: forms of the original."""
        last = turned(self.original.program, FEATURES_LAST)
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
        """Whether an edit is untried of what rounds begin from; a former best is left behind."""
        begun = (program_key(f.program) for f in (*self.starts, self.to_go_on_from()))
        return any(self.edited[key].pending for key in begun if key in self.edited)

    def measure(
        self, program: Program, clock: Stopwatch, limit: int | None, new: int | None = None
    ) -> int:
        """Time the operators of a program, until so many timings were made in all; how many became
        known.

        Args:
          new: bound for the timings that are made now.
        """
        graph, _ = united(program, bucket=self.bucket)
        priced, _ = price(self.oracle.table(), graph)
        return measure_graph(self.oracle, priced, clock, limit, new)

    def limit_of_regions(self) -> int | None:
        """How many timings may have been made when operators have had their share of those left."""
        limit, spent = self.run.budget.measurements, self.oracle.spending.measurements
        return None if limit is None else spent + math.ceil(_FEW * max(limit - spent, 0))

    def may_explore(self, explored: int) -> bool:
        """Whether the next round explores, after so many that did: one where timings are bounded,
        which are for programs rather; fewer where they take long, none where it is late; all where
        no program is timed whole.
        """
        if self.reference is None:
            return True
        clock = self.run.clock
        untimed = clock.elapsed - self.timed_at > _UNTIMED * clock.seconds
        late = clock.elapsed > _LATE * clock.seconds or (explored > 0 and untimed)
        most = _EXPLORES if self.run.budget.measurements is None else 1
        return explored < most and not late

    def turn(self, anew: Found | None, key: jax.Array, *, explores: bool) -> bool:
        """One round; whether it has learned anything that another may go by.

        Args:
          anew: what rollouts begin from; None for the best program so far.
          explores: what was not timed has the benefit of the doubt, and operators are timed; else
            programs are.
        """
        run, before = self.run, self.best()
        if anew is None and not self.kept and run.budget.measurements is None:
            # The best is not known. Timings that are bounded are for what later rounds meet, too.
            self.time_whole()
        begun = self.to_go_on_from() if anew is None else anew
        costs = self.oracle.table() if explores else sceptical(self.oracle.table())
        start = start_of(begun.program, self.decoder.rules, costs, bucket=self.bucket)
        self.slots = self.slots or self.decoder.slots_for(start)
        edits = self.edited.setdefault(
            program_key(begun.program),
            Edited(np.random.default_rng(np.asarray(jax.random.key_data(key)))),
        )
        plan = edits.plan(at_once(self.bucket) - _DRAWN)
        met = self.decoder.rollouts(
            begun,
            start,
            costs,
            key,
            plan=plan,
            slots=self.slots,
            over=run.out_of_budget,
        )
        edits.learn(plan, met.told)
        run.candidates += met.candidates
        if met.most > self.slots:
            run.note = f"it saw {self.slots} of up to {met.most} candidates at a step, drawn evenly"
        by_key = {program_key(f.program): f for f in reversed(met.found)}
        new = {k: f for k, f in by_key.items() if k not in self.kept and k not in self.timings}
        learned = self.confirm(new, run.clock.part(_REGIONS), most=_LEARNS) if explores else 0
        if self.reference is None:
            self.kept |= new
            self.kept = dict(self._ranked(self.kept)[:_KEPT])
        else:
            self.waiting = dict(self._ranked(self.waiting | new, doubted=True)[:_WAITING])
            if not explores:
                learned += self.confirm(self.waiting, run.clock.part(_REGIONS), doubted=True)
                self.time_whole()
                self.timed_at = run.clock.elapsed
        return learned > 0 or self.best() < _BETTER * before

    def confirm(
        self,
        found: Mapping[Key, Found],
        clock: Stopwatch,
        *,
        doubted: bool = False,
        most: int | None = None,
    ) -> int:
        """Time the operators of programs, those of the cheapest first: what was not timed seems to
        be faster than it is, and which is the cheapest changes with it. How many became known.

        Args:
          doubted: what was not timed is dear (`_ranked`).
          most: operators that are timed.
        """
        learned, limit = 0, self.limit_of_regions()
        while not clock.done and (most is None or learned < most):
            for _, each in self._ranked(found, doubted=doubted):
                if made := self.measure(each.program, clock, limit, _AT_ONCE):
                    learned += made
                    break
            else:
                break
        return learned

    def best(self) -> float:
        """What share of the original's time the best program so far takes."""
        if self.reference is not None:
            return min([1.0, *map(_relative, self.timings.values())])
        least = min((f.seconds for _, f in self._ranked(self.kept)), default=math.inf)
        return min(1.0, least / self.predicted())

    def predicted(self) -> float:
        """Seconds of the original under the costs of now."""
        return predicted(self.original.program, self.oracle.table())

    def results(self) -> list[Found]:
        """The best programs, best first, all predictions under the costs of now; where none was
        timed whole yet, what is to be.
        """
        ranked = self._ranked(self.kept or self.waiting, doubted=not self.kept)
        if self.reference is not None and self.kept:
            ranked = sorted(ranked, key=lambda each: _relative(self.timings[each[0]]))
        return [f for _, f in ranked[:_KEPT]]

    def _ranked(
        self, found: Mapping[Key, Found], *, doubted: bool = False
    ) -> list[tuple[Key, Found]]:
        """Programs under the costs of now, the cheapest first.

        Args:
          doubted: what was not timed is dear.
        """
        costs = self.oracle.table()
        costs = sceptical(costs) if doubted else costs
        priced = [
            (k, dataclasses.replace(f, seconds=predicted(f.program, costs)))
            for k, f in found.items()
        ]
        return sorted(priced, key=lambda each: each[1].seconds)

    def time_whole(self) -> None:
        """Time the most promising of those that wait, in turn with the original, unless that cannot
        be timed; each corrects the costs that the next is chosen by. What was not timed is dear to
        every other choice and has the benefit of the doubt in the rest: where few operators were
        timed, the best have forms that were not. Where one way to choose leaves none hope, the
        other is asked.
        """
        if self.reference is None:
            return
        clock = self.run.clock.part(_WHOLE)
        for n in itertools.count():
            if self.run.out_of_budget() or (n >= _TIMED and clock.done):
                break
            doubted = n % 2 == 0
            chosen = self._most_promising(doubted=doubted) or self._most_promising(
                doubted=not doubted
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

    def _most_promising(self, *, doubted: bool) -> tuple[Key, Found] | None:
        """Of the programs that wait the cheapest, unless the fastest timed whole leaves it no hope.

        Args:
          doubted: what was not timed is dear.
        """
        waits = self._ranked(self.waiting, doubted=doubted)
        if not waits or not self.kept:
            return waits[0] if waits else None
        fastest = min(self.kept, key=lambda key: _relative(self.timings[key]))
        (_, bound), *_ = self._ranked({fastest: self.kept[fastest]}, doubted=doubted)
        return waits[0] if waits[0][1].seconds <= _HOPE * bound.seconds else None


def _relative(timing: Timing) -> float:
    """Of what failed, infinite."""
    return math.inf if timing.relative is None else timing.relative


def _followed(search: _Search, key: jax.Array, *, whole: bool) -> tuple[Found, ...]:
    """The best programs that rounds have met, the original the last."""
    run, original = search.run, search.original
    since = 0
    try:
        with plain_ctrl_c():
            search.measure(original.program, run.clock.part(_START), search.limit_of_regions())
            run.start((1.0,), (search.predicted(),))
            run.report("measured the original")
            if whole:
                job = job_or_failure(original.program, (), constants=search.oracle.constants)
                search.reference = job if isinstance(job, Job) else None
            explored, anew = 0, itertools.cycle(search.starts)
            while not run.out_of_budget():
                key, now = jax.random.split(key)
                explores = search.may_explore(explored)
                begins_anew = explores and explored % _EXPLORES + 1 < _EXPLORES
                begun = next(anew) if begins_anew else None
                learned = search.turn(begun, now, explores=explores)
                explored = explored + 1 if explores else 0
                since = 0 if learned else since + 1
                run.parts[0] = search.best() * search.predicted()
                run.report("xrlflow")
                if since >= _STALLED and not search.pending:
                    run.stalled()
                    break
    except GraphError as error:
        run.note = f"nothing was tried: {error}"
    except KeyboardInterrupt:
        run.stop = StopReason.INTERRUPTED
    return (*search.results(), dataclasses.replace(original, seconds=search.predicted()))
