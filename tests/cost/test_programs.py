"""Whole programs: their jobs, the options tried, and which is chosen, at made-up timings."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax

from xrl_jax.cost import programs as lib
from xrl_jax.cost.model import Oracle, Spending
from xrl_jax.cost.programs import (
    Timed,
    constants_pay,
    learn_from,
    program_job,
    relative,
    shares,
    time_programs,
)
from xrl_jax.cost.roofline import cost_table
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.store import TimingStore
from xrl_jax.measure.target import Target
from xrl_jax.measure.timing import Timing
from xrl_jax.measure.worker import Worker
from xrl_jax.program.program import Program

A, B = (("fast", "a"),), (("fast", "b"),)
LONG = Stopwatch(1e6)  # begins when the tests are collected, perhaps an hour before they run
W, X = jnp.ones((3, 2)), jnp.ones((4, 3))
MACHINE = Target("cpu", "made up", 1, "jax 0", "")


def programs(n: int) -> list[Program]:
    """n programs, told apart by how often they add."""

    def fn(times):
        return lambda w, x: x @ (w * 2.0) + sum([x[0, 0]] * times)

    return [from_jax(fn(i + 1), W, X, weights=(0,)) for i in range(n)]


@pytest.fixture(autouse=True)
def two_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lib, "option_sets", lambda target: ((), A, B))


class FakeOracle:
    """Answers time_job with seconds by (program, options); the reference takes one.

    Attributes:
      asked: what was timed, in order.
      timeouts: seconds granted to each.
      in_turn: what two programs take in turn, where it is not as when timed one by one.
    """

    target = MACHINE

    def __init__(self, given: list[Program], seconds: dict, in_turn: float | None = None) -> None:
        self.in_turn = in_turn
        self.spending = Spending()
        self.options, self.constants = (), False
        self.n = len(given)
        self.keys = {program_job(p, o).key: i for i, p in enumerate(given) for o in ((), A, B)}
        self.seconds = seconds
        self.asked: list[tuple[int, tuple]] = []
        self.timeouts: list[float] = []

    def time_job(self, job, *, reference=None, timeout=300.0, **_):
        index = self.keys[job.key]
        self.asked.append((index, job.options))
        self.timeouts.append(timeout)
        self.spending.measurements += 1
        if reference is not None:
            assert self.keys[reference.key] == self.n - 1
        answer = self.seconds[index, job.options]
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, str):
            return Timing.without(answer, "no")
        return Timing(answer, answer, answer, relative=answer)

    def time_against(self, job, reference, **_):
        mine, other = (self.seconds[self.keys[j.key], j.options] for j in (job, reference))
        return Timing(mine, mine, mine, relative=self.in_turn or mine / other)


def ranked(given, seconds, clock=LONG, in_turn=None, measurements=None):
    oracle = FakeOracle(given, seconds, in_turn)
    found = time_programs(oracle, given, clock, measurements=measurements)  # type: ignore[arg-type]
    return [(t.index, t.options) for t in found], oracle


def test_all_are_timed_plain_and_the_fastest_under_all_options_and_then_the_original():
    plain = {(0, ()): 0.9, (1, ()): 0.8, (2, ()): 1.0}
    seconds = plain | {(1, A): 0.5, (1, B): 0.7, (3, A): 0.6}
    found, oracle = ranked(programs(4), seconds)
    assert oracle.asked == [(0, ()), (1, ()), (2, ()), (1, A), (1, B), (3, A)]
    assert found == [(1, A), (3, A), (1, B), (1, ()), (0, ()), (2, ())]


def test_options_that_do_not_win_are_not_tried_on_the_original():
    _, oracle = ranked(programs(2), {(0, ()): 0.5, (0, A): 0.45, (0, B): 0.5})
    assert oracle.asked == [(0, ()), (0, A), (0, B)]


def test_the_original_under_the_best_options_may_win():
    found, _ = ranked(programs(2), {(0, ()): 0.9, (0, A): 0.5, (0, B): 0.8, (1, A): 0.45})
    assert found == [(1, A), (0, A), (0, B), (0, ())]


def test_options_must_gain_fifteen_per_cent():
    rest = {(0, A): 0.5, (0, B): 0.8, (1, A): 0.9}
    found, _ = ranked(programs(2), {(0, ()): 0.57} | rest)
    assert found[0] == (0, ())
    found, _ = ranked(programs(2), {(0, ()): 0.58} | rest)
    assert found[0] == (0, A)


def test_options_must_gain_as_much_in_turn_with_the_fastest_program_without():
    seconds = {(0, ()): 0.7, (0, A): 0.5, (0, B): 0.55, (1, A): 0.9}
    found, _ = ranked(programs(2), seconds, in_turn=0.95)
    assert found == [(0, ())]
    found, _ = ranked(programs(2), seconds, in_turn=0.8)
    assert found == [(0, A), (0, B), (0, ()), (1, A)]


def test_the_original_alone_is_timed_under_all_options():
    found, _ = ranked(programs(1), {(0, ()): 1.0, (0, A): 0.5, (0, B): 0.8})
    assert found[0] == (0, A)


def test_without_time_only_the_first_is_timed_once():
    found, oracle = ranked(programs(3), {(0, ()): 0.9}, Stopwatch(0.0))
    assert found == [(0, ())] and oracle.asked == [(0, ())]
    assert oracle.timeouts == [120.0]


@pytest.mark.parametrize(
    ("measurements", "asked"),
    [
        (0, [(0, ())]),
        (2, [(0, ()), (1, ())]),
        (3, [(0, ()), (1, ()), (1, A)]),
    ],
)
def test_no_more_is_timed_than_may_be_but_for_the_first(measurements, asked):
    seconds = {(0, ()): 0.9, (1, ()): 0.8, (1, A): 0.7}
    _, oracle = ranked(programs(3), seconds, measurements=measurements)
    assert oracle.asked == asked


def test_where_nothing_is_faster_the_original_leads() -> None:
    given = programs(2)
    found = time_programs(
        FakeOracle(given, {(0, o): 1.25 for o in ((), A, B)}),  # type: ignore[arg-type]
        given,
        LONG,
    )
    assert [(t.index, t.options) for t in found] == [(1, ()), (0, ()), (0, A), (0, B)]
    assert (found[0].timing.seconds, found[0].timing.relative) == (1.0, 1.0)


@pytest.mark.parametrize("status", ["timeout", "killed"])
def test_what_hangs_or_crashes_is_tried_once_and_dropped(status):
    seconds = {(0, ()): status, (1, ()): 0.8, (1, A): status}
    found, oracle = ranked(programs(3), seconds)
    assert oracle.asked == [(0, ()), (1, ()), (1, A)]
    assert found == [(1, ())]


def test_what_fails_under_some_options_is_dropped_under_these():
    found, _ = ranked(programs(2), {(0, ()): 0.9, (0, A): "failed", (0, B): 0.5, (1, B): 1.0})
    assert found == [(0, B), (0, ()), (1, B)]


def test_where_everything_fails_the_original_is_left():
    found, _ = ranked(programs(3), {(0, ()): "killed", (1, ()): "timeout"})
    assert found == [(2, ())]


def test_ctrl_c_keeps_what_was_timed():
    seconds = {(0, ()): 0.9, (1, ()): KeyboardInterrupt()}
    found, _ = ranked(programs(3), seconds)
    assert found == [(0, ())]


def test_ctrl_c_before_anything_was_timed_leaves_the_original():
    found, _ = ranked(programs(3), {(0, ()): KeyboardInterrupt()})
    assert found == [(2, ())]


def test_what_cannot_be_exported_is_kept_without_a_timing():
    def fn(x):
        jax.debug.print("{}", x)
        return x + 1

    program = from_jax(fn, X)
    found = time_programs(FakeOracle([], {}), [program], LONG)  # type: ignore[arg-type]
    assert [t.program for t in found] == [program]
    assert found[0].timing.status == "failed"


class Pair(Oracle):
    """Answers the question whether constants pay: seconds without them, against one with them, so
    that the worker keeps these.
    """

    def __init__(self, relative: float | None) -> None:
        super().__init__(TimingStore(None, target=MACHINE), Worker())
        self.relative, self.asked = relative, 0

    def time_job(self, job, *, reference=None, **_):
        assert reference is not None
        assert job.constants == 0 and reference.constants > 0
        self.asked += 1
        return Timing(1.0, 1.0, 1.0, relative=self.relative)


def convolution(w, x):
    names = ("NCHW", "OIHW", "NCHW")
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=names)


CONVOLUTION = from_jax(convolution, jnp.ones((2, 3, 1, 1)), jnp.ones((1, 3, 4, 4)), weights=(0,))


@pytest.mark.parametrize(("relative", "pays"), [(1.06, True), (1.05, False), (None, False)])
def test_constants_must_gain_five_per_cent(relative, pays):
    assert constants_pay(Pair(relative), CONVOLUTION) is pays


def test_whether_constants_pay_is_remembered():
    pair = Pair(1.1)
    first = constants_pay(pair, CONVOLUTION)
    pair.relative = 1.0
    assert constants_pay(pair, CONVOLUTION) is first
    assert pair.asked == 1 and pair.spending.from_store == 1


def test_without_weights_constants_are_not_tried():
    without = from_jax(convolution, jnp.ones((2, 3, 1, 1)), jnp.ones((1, 3, 4, 4)))
    assert not constants_pay(Pair(9.0), without)


def test_products_do_not_gain_by_constants_and_are_not_asked():
    pair = Pair(9.0)
    assert not constants_pay(pair, programs(1)[0]) and pair.asked == 0


def test_a_job_has_the_weights_prepared_and_only_inputs_left():
    job = program_job(programs(1)[0])
    exported = jax.export.deserialize(bytearray(job.artifact))
    assert [a.shape for a in exported.in_avals] == [(3, 2), (4, 3)]
    assert "multiply" not in exported.mlir_module()  # w * 2 was done before


def test_jobs_of_different_options_have_different_keys():
    (program,) = programs(1)
    assert program_job(program).key != program_job(program, A).key


def test_relative_time_is_against_the_reference():
    timing = Timing(0.2, 0.2, 0.2, relative=0.7)
    timed = Timed(programs(1)[0], (), timing, 0)
    assert relative(timed) == 0.7
    assert relative(replace(timed, timing=replace(timing, relative=None))) == 0.2
    assert relative(replace(timed, timing=Timing.without("failed", ""))) == float("inf")


def test_programs_timed_whole_and_the_original_correct_the_table(monkeypatch):
    faster, failed, original = programs(3)
    asked = []
    monkeypatch.setattr(Oracle, "correct", lambda _, *given: asked.append(given))
    oracle = Oracle(TimingStore(None, target=MACHINE), Worker())
    timing = Timing(2e-3, 2e-3, 2e-3, relative=0.5)
    learn_from(oracle, [(faster, timing), (failed, Timing.without("failed", "no"))], original)
    costs = oracle.table()
    assert asked == [([shares(faster, costs), shares(original, costs)], [2e-3, 4e-3])]


def test_shares_count_a_body_as_often_as_it_runs():
    def fn(x):
        return jax.lax.scan(lambda c, _: (jnp.transpose(c) + c, None), x, None, length=5)[0]

    program = from_jax(fn, jnp.ones((4, 4)))
    table = cost_table({})
    found = shares(program, table)
    once = {c: s / 5 for c, s in found.items()}
    assert set(found) == {"movement", "elementwise"}
    # At 15 GB/s: 64 bytes read and written; 64 read, for the transpose is in the sum's loop.
    assert once["movement"] == pytest.approx(1e-6 + 128 / 1.5e10, rel=1e-5)
    assert once["elementwise"] == pytest.approx(2e-7 + 16 / 5e10 + 64 / 1.5e10, rel=1e-5)
