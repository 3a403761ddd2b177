"""Search by a policy: a trained policy accepts a temporary loss at which greedy search stops."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl.trap import SIZES, blank, trained
from tests.search.fakes import FakeOracle
from tests.search.test_strategies import ARGS, ENOUGH, KEY, exhausted_optimum, program, rules, run
from tests.transform.test_layout import traced as with_a_body
from xrl_jax.cost.programs import program_job, program_key
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import GraphError, build, nodes_of
from xrl_jax.measure.base import Job
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.timing import Timing
from xrl_jax.program.program import Program
from xrl_jax.rl.finetune import FineTune
from xrl_jax.rl.overrides import OverrideSearch, RolloutOutcome
from xrl_jax.rl.policy import Policy
from xrl_jax.rl.rollouts import Decoder, RolloutConfig, RolloutResults
from xrl_jax.rl.rounds import Rounds, RoundsConfig
from xrl_jax.rl.strategy import XRLflow
from xrl_jax.search.base import Budget, Found, Problem, SearchResult, StopReason
from xrl_jax.search.run import Run
from xrl_jax.transform.union import united_bucket


def found(
    budget: Budget = ENOUGH,
    oracle: FakeOracle | None = None,
    policy: Policy | None = None,
    **how: Any,
) -> SearchResult:
    problem = Problem(program(), rules(), oracle or FakeOracle())
    return XRLflow(policy or trained(), **{"time_programs": False, **how})(problem, budget, KEY)


@pytest.mark.slow
def test_a_temporary_loss_is_accepted_for_a_better_result() -> None:
    best = exhausted_optimum()
    assert run("greedy").best[0].seconds > 1.2 * best
    result = found()
    assert result.best[0].seconds == pytest.approx(best, rel=1e-3)
    assert any(s.rule == "trap-in" for s in result.best[0].steps)  # 0.80 ms -> 0.82 -> 0.50


def test_small_graphs_have_more_parallel_rollouts() -> None:
    rollouts = RolloutConfig(nodes=4096, fewest=8, most=16).rollouts
    assert [rollouts(n) for n in (128, 256, 512, 2048)] == [16, 16, 8, 8]


def test_rollouts_fill_their_batches() -> None:
    assert RolloutConfig(nodes=3000, batch=4).rollouts(256) == 8  # there is room for eleven


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"batch": 3}, "multiples of batch"),
        ({"fewest": 16, "most": 8}, "fewest not more than most"),
        ({"steps": 8}, "steps .8. must be at least check_every"),
        ({"horizon": 0, "patience": -1}, "horizon, patience must be positive"),
    ],
)
def test_inconsistent_rollout_settings_are_named_in_the_error(
    how: dict[str, int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        RolloutConfig(**how)


def test_large_graphs_have_more_rewrites_per_step() -> None:
    rewrites = RolloutConfig(bucket_share=1 / 64, least_rewrites=8, most_rewrites=32).rewrites
    assert [rewrites(n) for n in (256, 1024, 2048, 4096)] == [8, 16, 32, 32]


def test_the_policy_gets_the_smallest_sufficient_number_of_slots() -> None:
    slots = RolloutConfig(few_slots=16, some_slots=64, most_slots=128).slots
    assert [slots(n) for n in (16, 17, 64, 65, 1000)] == [16, 64, 64, 128, 128]


@pytest.mark.slow
def test_rollouts_do_not_depend_on_the_number_of_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = found(policy=blank())
    monkeypatch.setattr("xrl_jax.rl.rollouts.usable_cores", lambda: 1)
    assert [b.steps for b in found(policy=blank()).best] == [b.steps for b in several.best]


@pytest.mark.slow
def test_rollouts_continue_from_the_best_program_so_far() -> None:
    """Two actions are enough to get past one trap, but there are two traps, and two transposes."""
    result = found(rollouts=RolloutConfig(horizon=2))
    assert result.best[0].seconds == pytest.approx(exhausted_optimum(), rel=1e-3)


class WholeProgramOracle(FakeOracle):
    """An oracle that times whole programs by `whole`, relative to the original's time of 1.

    Attributes:
      asked: keys of the programs timed, in order.
    """

    def __init__(self, whole: Callable[[Job], float]) -> None:
        super().__init__()
        self.whole = whole
        self.asked: list[str] = []

    def time_against(self, job: Job, reference: Job, **how: Any) -> Timing:
        self.asked.append(job.key)
        self.spending.measurements += 1
        relative = self.whole(job)
        return Timing(relative, relative, relative, repeats=9, relative=relative)


def test_the_fastest_program_timed_whole_is_the_result() -> None:
    """Each whole program takes longer than those timed before it."""
    taken: dict[str, float] = {}

    def whole(job: Job) -> float:
        return taken.setdefault(job.key, 0.9 + 0.01 * len(taken))  # the first is the fastest

    oracle = WholeProgramOracle(whole)
    result = found(ENOUGH, oracle, blank(), time_programs=True, rounds=RoundsConfig(hope=math.inf))
    first = program_job(result.best[0].program)
    assert taken[first.key] == 0.9 and len(oracle.asked) == len(taken) > 1


def test_without_whole_program_timings_the_best_prediction_is_the_result() -> None:
    """The two timings are spent on an operator of the original and one of a program found."""
    oracle = WholeProgramOracle(lambda job: 0.9)
    result = found(Budget(seconds=600.0, measurements=2), oracle, blank(), time_programs=True)
    assert oracle.asked == []
    assert result.best[0].seconds < result.best[-1].seconds == pytest.approx(result.start_seconds)


def test_part_of_a_small_timing_budget_is_for_whole_programs() -> None:
    """Two timings are for operators of the original, one for an operator of the programs found, the
    others for whole programs.
    """
    oracle = WholeProgramOracle(lambda job: 0.9)
    result = found(Budget(seconds=600.0, measurements=6), oracle, blank(), time_programs=True)
    assert result.stop is StopReason.MEASUREMENTS
    assert len(oracle.asked) >= 2 and len(oracle.asked) + len(oracle.timed) == 6


UNTIMED = Job("a program that nobody times", b"")


class Round(NamedTuple):
    explores: bool
    begin_from: Found | None  # None: it begins from the best program
    original: Found


def six_rounds(monkeypatch: pytest.MonkeyPatch, searched: Program) -> list[Round]:
    """Return the first six rounds of a search, in which no round does anything."""
    rounds: list[Round] = []
    monkeypatch.setattr("xrl_jax.rl.strategy.job_or_failure", lambda *_, **__: UNTIMED)

    def run_round(
        search: Rounds, begin_from: Found | None, key: jax.Array, *, explores: bool
    ) -> bool:
        if len(rounds) == 6:
            raise KeyboardInterrupt
        rounds.append(Round(explores, begin_from, search.original))
        return True

    monkeypatch.setattr(Rounds, "run_round", run_round)
    monkeypatch.setattr(Rounds, "measure", lambda *_: 0)
    problem = Problem(searched, rules(), FakeOracle())
    XRLflow(blank())(problem, ENOUGH, KEY)
    return rounds


def test_three_exploring_rounds_precede_each_timing_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two exploring rounds begin from the original, the third from the best program, like the round
    that times programs.
    """
    rounds = six_rounds(monkeypatch, program())
    four = [(True, True), (True, True), (True, False), (False, False)]
    assert [(r.explores, r.begin_from is r.original) for r in rounds] == [
        *four,
        (True, True),
        (True, True),
    ]


def test_every_other_fresh_round_starts_with_features_last_at_body_boundaries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No rewrite can transpose values at the boundary of a body, so every other round that begins
    anew starts from a program where they are.
    """
    rounds = six_rounds(monkeypatch, with_a_body())
    bodies = [body for r in rounds if r.begin_from for body in r.begin_from.program.bodies]
    crossing = [min(a.shape for a in b.in_avals) for b in bodies]  # not the kernel, [3, 3, 1, 1]
    assert crossing == [(1, 3, 4, 5), (1, 4, 5, 3), (1, 3, 4, 5), (1, 4, 5, 3)]


def test_if_the_features_last_program_is_too_large_rounds_start_from_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bucket(program: Program) -> int:
        if any(min(a.shape for a in b.in_avals) == (1, 4, 5, 3) for b in program.bodies):
            raise GraphError("a graph of 9999 nodes exceeds the largest bucket")
        return united_bucket(program)

    monkeypatch.setattr("xrl_jax.rl.rounds.united_bucket", bucket)
    rounds = six_rounds(monkeypatch, with_a_body())
    assert [r.begin_from is r.original for r in rounds] == [True, True, False, False, True, True]


def test_without_whole_program_timings_all_rounds_explore() -> None:
    search = searching(FakeOracle())
    assert [search.may_explore(n) for n in range(5)] == [True] * 5


def test_untried_overrides_of_a_former_best_are_not_pending() -> None:
    search, former, best = searching(FakeOracle()), with_lowering(1), with_lowering(3)
    search.kept = {program_key(best.program): best}
    untried, tried = (OverrideSearch(np.random.default_rng(0), untried=u) for u in (None, ()))
    search.overrides = {
        program_key(search.original.program): tried,
        program_key(former.program): untried,
        program_key(best.program): tried,
    }
    assert untried.pending and not search.pending
    search.overrides[program_key(best.program)] = untried
    assert search.pending


def test_late_in_its_budget_a_search_times_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Problem(program(), rules(), FakeOracle()), Budget(seconds=100.0))
    search = Rounds(RoundsConfig(), Decoder(SIZES, None, rules()), run, Found(program(), 0.0))
    search.reference = UNTIMED
    assert search.may_explore(0)
    monkeypatch.setattr(Stopwatch, "elapsed", 61.0)
    assert not search.may_explore(0)


def test_fewer_rounds_explore_if_rounds_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least one round explores; a further one does only if a program was timed in the last 30 of
    the 100 seconds.
    """
    run = Run(Problem(program(), rules(), FakeOracle()), Budget(seconds=100.0))
    search = Rounds(RoundsConfig(), Decoder(SIZES, None, rules()), run, Found(program(), 0.0))
    search.reference = UNTIMED
    monkeypatch.setattr(Stopwatch, "elapsed", 29.0)
    assert search.may_explore(1)
    monkeypatch.setattr(Stopwatch, "elapsed", 31.0)
    assert search.may_explore(0) and not search.may_explore(1)
    search.timed_at = 2.0
    assert search.may_explore(1) and search.may_explore(2) and not search.may_explore(3)


def one_product() -> Program:
    return from_jax(lambda w, x: x @ w, jnp.ones((64, 64)), jnp.ones((8, 64)), weights=(0,))


def with_lowering(lowering: int) -> Found:
    """Return the product with this lowering: 0 plain, 1 flat, 2 transposed, 3 swapped."""
    nodes, outputs, _ = nodes_of(one_product().graph)
    lowerings = [dataclasses.replace(n, lowering=lowering * (n.op == "dot")) for n in nodes]
    return Found(one_product().with_graphs([build(lowerings, outputs)]), math.inf)


def searching(oracle: FakeOracle) -> Rounds:
    """Return a search of one product that has found nothing yet."""
    run = Run(Problem(one_product(), rules(), oracle), ENOUGH)
    return Rounds(
        RoundsConfig(), Decoder(SIZES, None, rules()), run, Found(one_product(), math.inf)
    )


def nothing_met(*_: Any, plan: Sequence[Any], **__: Any) -> RolloutResults:
    """Stand in for rollouts that find nothing."""
    return RolloutResults([], [RolloutOutcome(1.0, 0, 1.0, tuple) for _ in plan], 0, 0)


def two_waiting(oracle: FakeOracle, seconds: dict[int, float]) -> Rounds:
    """Return a search that may time the product whole with two lowerings: flat and swapped.

    Args:
      seconds: time of the product on its own, by its lowering.
    """
    oracle.price = lambda r: Timing(*3 * [seconds[r.node.lowering]], repeats=9)
    search = searching(oracle)
    search.reference = program_job(one_product())
    search.waiting = {("flat",): with_lowering(1), ("swapped",): with_lowering(3)}
    return search


def test_operators_of_the_cheapest_program_are_timed_first() -> None:
    """Of two untimed lowerings of a product, the one with the lower prediction is timed first."""
    oracle = FakeOracle(lambda region: Timing(1e-6, 1e-6, 1e-6, repeats=9))
    search, both = searching(oracle), {("swapped",): with_lowering(3), ("flat",): with_lowering(1)}
    cheapest = search._ranked(both)[0][1].program
    assert search.confirm(both, Stopwatch(60.0)) == len(oracle.timed) == 2
    first = [n.lowering for n in nodes_of(cheapest.graph)[0] if n.op == "dot"]
    assert [oracle.timed[0].node.lowering] == first
    assert search.confirm(both, Stopwatch(60.0)) == 0


def test_a_round_times_at_most_the_given_number_of_operators() -> None:
    oracle = FakeOracle(lambda region: Timing(1e-6, 1e-6, 1e-6, repeats=9))
    search, both = searching(oracle), {("swapped",): with_lowering(3), ("flat",): with_lowering(1)}
    assert search.confirm(both, Stopwatch(60.0), most=1) == len(oracle.timed) == 1


def test_every_round_has_as_many_candidate_slots_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With another number of candidates, rollouts would have to be compiled again."""

    def rollouts(*_: Any, plan: Sequence[Any], slots: int, **__: Any) -> RolloutResults:
        seen.append(slots)
        return nothing_met(plan=plan)

    seen: list[int] = []
    wanted = iter((16, 64))
    monkeypatch.setattr(Decoder, "slots_for", lambda *_: next(wanted))
    monkeypatch.setattr(Decoder, "rollouts", rollouts)
    search = searching(FakeOracle())
    search.run_round(search.original, KEY, explores=True)
    search.run_round(search.original, KEY, explores=True)
    assert seen == [16, 16]


def test_a_lowering_that_was_slow_once_is_timed_last_elsewhere() -> None:
    """Flat has the lower prediction but takes a second, so after one such timing swapped is timed
    for both products first.
    """
    args = jnp.ones((64, 64)), jnp.ones((64, 32)), jnp.ones((8, 64))
    two = from_jax(lambda w, v, x: (x @ w) @ v, *args, weights=(0, 1))
    nodes, outputs, _ = nodes_of(two.graph)

    def both(lowering: int) -> Found:
        lowerings = [dataclasses.replace(n, lowering=lowering * (n.op == "dot")) for n in nodes]
        return Found(two.with_graphs([build(lowerings, outputs)]), math.inf)

    oracle = FakeOracle(lambda r: Timing(*3 * [1.0 if r.node.lowering == 1 else 1e-6], repeats=9))
    search = Rounds(
        RoundsConfig(at_once=1),
        Decoder(SIZES, None, rules()),
        Run(Problem(two, rules(), oracle), ENOUGH),
        both(0),
    )
    assert search.confirm({("flat",): both(1), ("swapped",): both(3)}, Stopwatch(60.0)) == 4
    assert [r.node.lowering for r in oracle.timed] == [1, 3, 3, 1]


def test_operators_are_timed_before_a_program_is_timed_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flat has the lower prediction but takes a thousand times as long as swapped, so only swapped
    is timed whole.
    """
    oracle = WholeProgramOracle(lambda job: 0.9)
    search = two_waiting(oracle, {0: 1e-6, 1: 1e-3, 3: 1e-6})
    assert search._ranked(search.waiting, pessimistic=True)[0][0] == ("flat",)
    monkeypatch.setattr(Decoder, "rollouts", nothing_met)
    assert search.run_round(search.original, KEY, explores=False)
    assert oracle.asked == [program_job(with_lowering(3).program).key]


@pytest.mark.parametrize(("measurements", "goes_on"), [(None, 3), (16, 0)])
def test_rollouts_continue_from_the_fastest_waiting_program(
    monkeypatch: pytest.MonkeyPatch, measurements: int | None, goes_on: int
) -> None:
    """Swapped takes the least time and becomes the starting program. If timings are bounded, none
    is spent on this, and rollouts begin from the original.
    """
    takes = {program_job(with_lowering(k).program).key: t for k, t in ((1, 0.9), (3, 0.5))}
    oracle = WholeProgramOracle(lambda job: takes[job.key])
    search = two_waiting(oracle, {0: 1e-3, 1: 1e-3, 3: 1e-3})
    search.confirm(search.waiting, Stopwatch(60.0))
    search.run.budget = Budget(ENOUGH.seconds, measurements)

    def rollouts(_: Any, begun: Found, *__: Any, plan: Sequence[Any], **___: Any) -> RolloutResults:
        begins.extend(n.lowering for n in nodes_of(begun.program.graph)[0] if n.op == "dot")
        return nothing_met(plan=plan)

    begins: list[int] = []
    monkeypatch.setattr(Decoder, "rollouts", rollouts)
    search.run_round(None, KEY, explores=True)
    assert begins == [goes_on]


def test_untimed_lowerings_have_a_pessimistic_and_an_optimistic_estimate() -> None:
    """Swapped takes 0.9 of the plain lowering's time; flat was not timed and usually takes less."""
    search = two_waiting(FakeOracle(), {0: 1e-3, 3: 9e-4})
    search.confirm({("plain",): with_lowering(0), ("swapped",): with_lowering(3)}, Stopwatch(60.0))
    pessimistic, optimistic = (search._most_promising(pessimistic=d) for d in (True, False))
    assert pessimistic is not None and pessimistic[0] == ("swapped",)
    assert optimistic is not None and optimistic[0] == ("flat",)


@pytest.mark.parametrize(("seconds", "hopeful"), [(1.1e-3, True), (1.3e-3, False)])
def test_a_program_is_promising_only_if_predicted_close_to_the_fastest_timed(
    seconds: float, hopeful: bool
) -> None:
    """The fastest program timed whole has the plain lowering, at 1 ms. The transposed one takes
    less on its own, but the whole program was slower.
    """
    search = two_waiting(FakeOracle(), {0: 1e-3, 2: 1e-4, 3: seconds})
    del search.waiting["flat",]
    search.kept = {("plain",): with_lowering(0), ("transposed",): with_lowering(2)}
    whole = {("plain",): 0.9, ("transposed",): 2.0}
    search.timings = {k: Timing(1e-3, 1e-3, 1e-3, relative=r) for k, r in whole.items()}
    search.confirm(search.kept | search.waiting, Stopwatch(60.0))
    assert (search._most_promising(pessimistic=True) is not None) == hopeful


def test_each_whole_program_timing_corrects_the_choice_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If one kind of estimate leaves no program with hope, the other kind is used."""
    done: list[str] = []

    def choose(self: Rounds, *, pessimistic: bool) -> tuple[Any, Found] | None:
        done.append("pessimistic" if pessimistic else "optimistic")
        return None if done == ["pessimistic"] else next(iter(self.waiting.items()), None)

    def whole(job: Job) -> float:
        done.append("timed")
        return 0.9

    search = two_waiting(WholeProgramOracle(whole), {})
    monkeypatch.setattr(Rounds, "_most_promising", choose)
    monkeypatch.setattr("xrl_jax.rl.rounds.learn_from", lambda *_: done.append("learned"))
    search.time_whole()
    one = ["timed", "learned"]
    assert done == [
        "pessimistic",
        "optimistic",
        *one,
        "optimistic",
        *one,
        "pessimistic",
        "optimistic",
    ]


def test_a_program_that_is_slower_when_timed_whole_is_not_better() -> None:
    result = found(ENOUGH, WholeProgramOracle(lambda job: 1.5), blank(), time_programs=True)
    assert result.stop is StopReason.STALLED
    assert min(seconds for _, seconds in result.history) == result.history[0][1]


@pytest.mark.slow
def test_the_gains_of_the_steps_add_up() -> None:
    oracle = FakeOracle()
    run("taso", oracle=oracle)  # times all lowerings, so that predictions do not change
    result = found(oracle=oracle)
    gained = sum(s.gain for s in result.best[0].steps)
    assert gained == pytest.approx(result.start_seconds - result.best[0].seconds, rel=1e-3)
    assert all(s.place.startswith("%") for s in result.best[0].steps)


def test_an_untrained_policy_finds_improvements_by_sampling() -> None:
    result = found(policy=blank())
    assert result.best[0].seconds < result.start_seconds
    np.testing.assert_allclose(
        result.best[0].program(*ARGS), program()(*ARGS), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_the_result_notes_that_the_policy_saw_only_some_candidates() -> None:
    two = RolloutConfig(few_slots=2, some_slots=2, most_slots=2)
    assert found(rollouts=two).note == (
        "the policy was trained on the trap; it saw 2 of up to 3 candidates at a step, "
        "sampled uniformly"
    )


@pytest.mark.slow
def test_a_policy_can_be_fine_tuned_on_the_program_first() -> None:
    search = XRLflow(blank(), FineTune(), time_programs=False)
    result = search(Problem(program(), rules(), FakeOracle()), Budget(seconds=120.0), KEY)
    assert "the policy was trained on nothing; then on this program for " in result.note
    assert result.best[0].seconds < run("greedy").best[0].seconds


def test_the_search_stops_when_it_stalls() -> None:
    assert found(policy=blank()).stop is StopReason.STALLED
