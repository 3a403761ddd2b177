"""Timing whole programs, at made-up times: which, under which options, and how they are ranked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

from tests.cost.test_programs import MACHINE, X, programs
from xrl_jax.cost.model import Spending
from xrl_jax.cost.programs import program_job
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.timing import Timing
from xrl_jax.program.program import Program
from xrl_jax.search import time_whole as lib
from xrl_jax.search.base import Found, Problem, SearchResult, StopReason
from xrl_jax.search.time_whole import TimeWhole

A, B = (("fast", "a"),), (("fast", "b"),)
LONG = Stopwatch(1e6)  # starts when tests are collected, perhaps an hour before they run


@pytest.fixture(autouse=True)
def two_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lib, "option_sets", lambda target: ((), A, B))


class FakeOracle:
    """Answers `time_job` with the seconds given by (program, options); the reference takes one.

    Attributes:
      asked: the (program, options) timed, in order.
      timeouts: seconds granted to each.
      in_turn: relative time of programs timed in turn, if not the ratio of their times.
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


def timed(
    oracle: Any, given: list[Program], clock: Stopwatch = LONG, most: int | None = None, stop=None
) -> list[Found]:
    best = [Found(p, 1.0) for p in given]
    so_far = SearchResult(tuple(best), 1.0, 1, stop or StopReason.EXHAUSTED)
    problem = Problem(given[-1], None, oracle, found=so_far)  # type: ignore[arg-type]
    return TimeWhole().timed(problem, best, clock, most)


def ranked(given, seconds, clock=LONG, in_turn=None, measurements=None, stop=None, options=()):
    oracle = FakeOracle(given, seconds, in_turn)
    oracle.options = options
    index = {id(p): i for i, p in enumerate(given)}
    found = timed(oracle, given, clock, measurements, stop)
    return [(index[id(f.program)], f.options) for f in found], oracle


def test_all_programs_are_timed_then_the_fastest_under_every_option_set():
    plain = {(0, ()): 0.9, (1, ()): 0.8, (2, ()): 1.0}
    seconds = plain | {(1, A): 0.5, (1, B): 0.7, (3, A): 0.6}
    found, oracle = ranked(programs(4), seconds)
    assert oracle.asked == [(0, ()), (1, ()), (2, ()), (1, A), (1, B), (3, A)]
    assert found == [(1, A), (3, A), (1, B), (1, ()), (0, ()), (2, ())]


def test_where_costs_are_those_under_options_programs_are_timed_under_these():
    seconds = {(0, A): 0.9, (1, A): 0.8, (1, B): 0.79}
    found, oracle = ranked(programs(3), seconds, options=A)
    assert oracle.asked == [(0, A), (1, A), (1, B)]
    assert found == [(1, A), (0, A), (1, B)]  # B gains less than 2 %


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


def test_the_gain_of_options_must_hold_in_alternating_timings():
    seconds = {(0, ()): 0.7, (0, A): 0.5, (0, B): 0.55, (1, A): 0.9}
    found, _ = ranked(programs(2), seconds, in_turn=0.95)
    assert found == [(0, ())]
    found, _ = ranked(programs(2), seconds, in_turn=0.8)
    assert found == [(0, A), (0, B), (0, ()), (1, A)]


def test_the_original_alone_is_timed_under_all_options():
    found, _ = ranked(programs(1), {(0, ()): 1.0, (0, A): 0.5, (0, B): 0.8})
    assert found[0] == (0, A)


def test_without_time_only_the_first_program_is_timed():
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
def test_timings_are_limited_but_the_first_program_is_always_timed(measurements, asked):
    seconds = {(0, ()): 0.9, (1, ()): 0.8, (1, A): 0.7}
    _, oracle = ranked(programs(3), seconds, measurements=measurements)
    assert oracle.asked == asked


def test_if_nothing_is_faster_the_original_comes_first() -> None:
    given = programs(2)
    found = timed(FakeOracle(given, {(0, o): 1.25 for o in ((), A, B)}), given)
    first, second = given
    assert [f.program for f in found] == [second, first, first, first]
    assert [f.options for f in found] == [(), (), A, B]
    timing = found[0].timing
    assert timing is not None and (timing.seconds, timing.relative) == (1.0, 1.0)


@pytest.mark.parametrize("status", ["timeout", "killed"])
def test_a_program_that_hangs_or_crashes_is_tried_once_and_dropped(status):
    seconds = {(0, ()): status, (1, ()): 0.8, (1, A): status}
    found, oracle = ranked(programs(3), seconds)
    assert oracle.asked == [(0, ()), (1, ()), (1, A)]
    assert found == [(1, ())]


def test_a_program_is_dropped_only_under_the_options_that_fail():
    found, _ = ranked(programs(2), {(0, ()): 0.9, (0, A): "failed", (0, B): 0.5, (1, B): 1.0})
    assert found == [(0, B), (0, ()), (1, B)]


def test_if_everything_fails_the_original_is_left():
    found, _ = ranked(programs(3), {(0, ()): "killed", (1, ()): "timeout"})
    assert found == [(2, ())]


def test_ctrl_c_keeps_the_programs_timed_so_far():
    seconds = {(0, ()): 0.9, (1, ()): KeyboardInterrupt()}
    found, _ = ranked(programs(3), seconds)
    assert found == [(0, ())]


def test_ctrl_c_before_anything_was_timed_leaves_the_original():
    found, _ = ranked(programs(3), {(0, ()): KeyboardInterrupt()})
    assert found == [(2, ())]


def test_a_program_that_cannot_be_exported_is_kept_without_a_timing():
    def fn(x):
        jax.debug.print("{}", x)
        return x + 1

    program = from_jax(fn, X)
    found = timed(FakeOracle([], {}), [program])
    assert [f.program for f in found] == [program]
    assert found[0].timing is not None and found[0].timing.status == "failed"


def test_after_ctrl_c_in_the_search_only_the_first_program_is_timed():
    found, oracle = ranked(programs(3), {(0, ()): 0.9}, stop=StopReason.INTERRUPTED)
    assert found == [(0, ())] and oracle.asked == [(0, ())]


def test_a_program_timed_before_is_not_timed_again():
    given = programs(3)
    oracle = FakeOracle(given, {(1, ()): 0.8, (1, A): 0.9, (1, B): 0.9})
    before = Timing(0.9, 0.9, 0.9, relative=0.9)
    best = [Found(given[0], 1.0, timing=before), Found(given[1], 1.0), Found(given[2], 1.0)]
    so_far = SearchResult(tuple(best), 1.0, 1, StopReason.EXHAUSTED)
    problem = Problem(given[2], None, oracle, found=so_far)  # type: ignore[arg-type]
    found = TimeWhole().timed(problem, best, LONG)
    assert [f.program for f in found][:3] == [given[1], given[0], given[1]]
    assert oracle.asked == [(1, ()), (1, A), (1, B)]


def test_relative_time_is_against_the_reference():
    timing = Timing(0.2, 0.2, 0.2, relative=0.7)
    found = Found(programs(1)[0], 1.0, timing=timing)
    assert found.relative == 0.7
    assert replace(found, timing=replace(timing, relative=None)).relative == 0.2
    assert replace(found, timing=Timing.without("failed", "")).relative == float("inf")
    assert replace(found, timing=None).relative == float("inf")
