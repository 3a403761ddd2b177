"""Each search finds the expected result at made-up costs, keeps to its budget and is correct."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.exhaust import exhaust
from tests.search.fakes import FakeOracle, compiled_rules, made_up
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import nodes_of
from xrl_jax.measure.timing import Timing
from xrl_jax.program.check import check_program
from xrl_jax.program.program import Program
from xrl_jax.rl.strategy import XRLflow
from xrl_jax.search import walk
from xrl_jax.search.backtracking import Taso
from xrl_jax.search.base import (
    Budget,
    Found,
    Problem,
    Progress,
    SearchResult,
    Step,
    StopReason,
    ignore,
)
from xrl_jax.search.descend import Descent
from xrl_jax.search.greedy import Local
from xrl_jax.search.run import Run
from xrl_jax.search.starting_points import StartingPoint
from xrl_jax.search.tensat import Tensat
from xrl_jax.strategies import SEARCHES, find_strategy

KEY = jax.random.key(0)
ENOUGH = Budget(seconds=600.0)
# Random walks never run out of candidates to try, so they are bounded by time.
SECONDS = {"random": 4.0}
# Leaves room for elementwise nodes, priced by the roofline, and for the time that is subtracted
# for wrapping; both are far below the timings.
NEAR: dict[str, Any] = dict(abs=1e-5)


@cache
def rules():
    return compiled_rules()


def network(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
    """Compute two contractions over the first axes, with two transposes that cancel."""
    h = jnp.tanh(jnp.einsum("ki,kj->ij", x, v))
    return jnp.einsum("ki,kj->ij", jnp.transpose(jnp.transpose(h)), w)


ARGS = tuple(jax.random.normal(jax.random.key(i), (6, 6)) for i in range(3))


@cache
def program() -> Program:
    return from_jax(network, *ARGS, weights=(1, 2))


@cache
def looped() -> Program:
    """Return a program with a contraction outside a loop, and one that runs four times inside."""

    def fn(x, v, w):
        def step(c, _):
            return jnp.tanh(jnp.einsum("ki,kj->ij", c, w)), None

        return jax.lax.scan(step, jnp.einsum("ki,kj->ij", x, v), None, length=4)[0]

    return from_jax(fn, *ARGS, weights=(1, 2))


def run(search, *, on=program, budget=None, key=KEY, oracle=None, listener=ignore) -> SearchResult:
    if budget is None:
        budget = Budget(seconds=SECONDS.get(search, 600.0))
    # No timings of whole programs are made up, so the policy relies on predictions.
    if search == "xrlflow":
        search = XRLflow(time_programs=False)
    elif isinstance(search, str):
        search = SEARCHES[search].search()
    return search(Problem(on(), rules(), oracle or FakeOracle(), listener), budget, key)


@pytest.fixture(scope="module", autouse=True)
def compiled_before() -> None:
    """Compile the engine first, so that compiling does not use up short budgets in other tests."""
    run("greedy")


def lowerings(found: SearchResult) -> list[tuple[str, int]]:
    """Return the timed operators of the best program with their lowerings."""
    nodes = [n for g in found.best[0].program.graphs for n in nodes_of(g)[0]]
    return [(n.op, n.lowering) for n in nodes if n.op in ("dot", "transpose")]


def exhausted_optimum() -> float:
    """Return the least cost of all reachable states, by visiting every one of them."""
    return exhaust(Problem(program(), rules(), FakeOracle())).optimum


# What each search finds ---------------------------------------------------------------------------


def test_the_cost_of_the_original_is_the_sum_of_its_timings():
    assert run("local").start_seconds == pytest.approx(2.4e-3, **NEAR)


def test_local_chooses_each_nodes_best_lowering_and_nothing_else():
    found = run("local")
    assert lowerings(found) == [("dot", 3), ("transpose", 0), ("transpose", 0), ("dot", 3)]
    assert found.best[0].seconds == pytest.approx(2.0e-3, **NEAR)
    assert [s.rule for s in found.best[0].steps] == ["lower-swapped"] * 2


def test_greedy_takes_every_gain_and_stops_before_the_trap():
    found = run("greedy")
    assert lowerings(found) == [("dot", 3), ("dot", 3)]
    assert found.best[0].seconds == pytest.approx(1.6e-3, **NEAR)
    rules_fired = sorted(s.rule for s in found.best[0].steps)
    assert rules_fired == ["lower-swapped", "lower-swapped", "turn-not", "turn-twice"]


@pytest.mark.parametrize("search", ["taso", "tensat", "eqsat-mcts"])
def test_a_temporary_loss_leads_to_the_optimum(search):
    found = run(search)
    assert lowerings(found) == [("dot", 2), ("dot", 2)]
    assert found.best[0].seconds == pytest.approx(exhausted_optimum(), rel=1e-3)
    assert found.best[0].seconds == pytest.approx(1.0e-3, **NEAR)


def test_equality_saturation_alone_finds_the_optimum():
    found = run(Tensat(greedy_share=0.0, own_start=True))
    assert lowerings(found) == [("dot", 2), ("dot", 2)]
    assert found.best[0].steps[0].rule == "equality-saturation"


def test_a_lowering_that_lost_at_one_node_is_not_timed_at_the_next():
    v, w = jnp.ones((6, 40)), jnp.ones((40, 6))
    two = from_jax(lambda x, v, w: x @ v @ w, ARGS[0], v, w, weights=(1, 2))

    def price(region):
        seconds = 1.0 if region.node.lowering == 3 else 1e-3
        return Timing(seconds, seconds, seconds, repeats=9)

    oracle = FakeOracle(price)
    run(Local(Descent(at_once=1)), on=lambda: two, oracle=oracle)
    assert [r.node.lowering for r in oracle.timed] == [0, 0, 3]


def test_predictions_that_grow_as_timings_come_in_do_not_end_a_search():
    """Predictions under an older cost table are compared with nothing."""

    class Learning(FakeOracle):
        @property
        def costs(self):
            costs = super().costs
            return replace(costs, scale=costs.scale * (2.0 if len(self.timed) > 2 else 1.0))

    told: list[Progress] = []
    found, usual = run("taso", oracle=Learning(), listener=told.append), run("taso")
    assert lowerings(found) == lowerings(usual)
    share = usual.best[0].seconds / usual.start_seconds
    assert told[-1].best_seconds == pytest.approx(share * told[-1].start_seconds, rel=0.02)


def test_taso_with_alpha_1_admits_no_loss_and_stays_before_the_trap():
    found = run(Taso(alpha=1.0))
    assert found.best[0].seconds == pytest.approx(1.6e-3, **NEAR)


def test_tasos_steps_report_temporary_losses():
    gains = {s.rule: s.gain for s in run("taso").best[0].steps}
    assert gains["trap-in"] == pytest.approx(-0.02e-3, abs=2e-6)
    assert gains["trap-out"] == pytest.approx(0.32e-3, abs=2e-6)


def test_taso_keeps_runners_up_for_the_final_timing():
    found = run("taso")
    assert len(found.best) > 2
    assert [f.seconds for f in found.best] == sorted(f.seconds for f in found.best)


def test_random_search_finds_an_optimum_that_every_walk_reaches():
    found = run("random")
    assert lowerings(found) == [("dot", 2), ("dot", 2)]


def test_the_cost_of_a_loop_body_counts_as_often_as_it_runs():
    found = run("greedy", on=looped)
    assert found.start_seconds == pytest.approx(5e-3, **NEAR)
    assert found.best[0].seconds == pytest.approx(4e-3, **NEAR)
    assert sorted(s.graph for s in found.best[0].steps) == [0, 1]


def test_lowerings_that_cannot_be_timed_are_avoided():
    def price(region):
        failed = region.node.op == "dot" and region.node.lowering == 3
        return made_up(region) if not failed else type(made_up(region)).without("killed", "")

    assert lowerings(run("greedy", oracle=FakeOracle(price))) == [("dot", 0), ("dot", 0)]


# Budgets and interruption -----------------------------------------------------------------------


def test_a_search_that_tried_everything_is_reported_as_exhausted():
    assert run("taso").stop is StopReason.EXHAUSTED


def test_a_search_that_stalls_stops_and_reports_it():
    found = run(Taso(patience=0.0, least_patience=0.0))
    assert found.stop is StopReason.STALLED
    assert found.best[0].seconds == pytest.approx(1.6e-3, **NEAR)  # greedy's result


def test_a_search_out_of_time_is_not_reported_as_stalled():
    done = Run(Problem(program(), rules(), FakeOracle()), Budget(seconds=1e-6))
    assert done.out_of_budget()
    done.stalled()
    assert done.stop is StopReason.SECONDS


def test_a_starting_point_is_timed_even_if_predicted_to_be_slower(monkeypatch):
    slow = from_jax(lambda x, v, w: network(x, v, w) + x @ v @ w, *ARGS, weights=(1, 2))
    led_there = (Step(0, "somehow", "%1", -1.0),)
    begin = [StartingPoint(slow, led_there), StartingPoint(program())]
    monkeypatch.setattr(walk, "starting_points", lambda *_: begin)
    # Without phases a search returns the programs that it begins from.
    problem = Problem(program(), rules(), FakeOracle())
    found = walk.Walk()(problem, ENOUGH, KEY, [], from_starting_points=True)
    assert [f.steps for f in found.best] == [led_there, ()]
    assert found.best[0].seconds > found.start_seconds


def test_the_best_of_each_starting_point_comes_first_then_the_second_of_each():
    def programs(*seconds):
        return [Found(program(), s) for s in seconds]

    turns = walk._interleaved([programs(2.0, 3.0, 7.0), programs(1.0, 4.0), []])
    assert [f.seconds for f in turns] == [1.0, 2.0, 3.0, 4.0, 7.0]
    turns = walk._interleaved([programs(5.0, 6.0), programs(1.0, 2.0)])
    assert [f.seconds for f in turns] == [1.0, 5.0, 2.0, 6.0]


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_measures_no_more_than_its_budget(search):
    oracle = FakeOracle()
    found = run(search, oracle=oracle, budget=Budget(seconds=600.0, measurements=3))
    assert len(oracle.timed) <= 3
    assert found.stop is StopReason.MEASUREMENTS


@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_ends_when_its_time_is_over(search):
    found = run(search, budget=Budget(seconds=1e-6))
    assert found.stop is StopReason.SECONDS
    assert [f.steps for f in found.best] == [()]


@cache
def chain() -> Program:
    """Return a program of ten contractions of ten shapes."""
    widths = range(6, 17)
    ws = [jnp.ones((m, n)) for m, n in itertools.pairwise(widths)]

    def fn(x, *ws):
        for w in ws:
            x = x @ w
        return x

    return from_jax(fn, ARGS[0], *ws, weights=range(1, 11))


def test_timing_the_original_leaves_most_of_the_time_to_the_search():
    run("greedy", on=chain)  # compiles everything
    at_start: list[int] = []

    def price(region):
        time.sleep(0.2)  # all ten would take half of the time
        return made_up(region)

    oracle = FakeOracle(price)

    def listener(progress: Progress) -> None:
        if progress.phase == "measured the original":
            at_start.append(len(oracle.timed))

    run("greedy", on=chain, oracle=oracle, listener=listener, budget=Budget(seconds=4.0))
    assert 1 <= at_start[0] <= 4 < len(oracle.timed)  # at most 15 percent of 4 seconds


class Interrupting:
    """A listener that raises KeyboardInterrupt once, when `phase` is reported for the n-th time."""

    def __init__(self, phase: str, times: int = 1) -> None:
        self.phase, self.times = phase, times

    def __call__(self, progress: Progress) -> None:
        self.times -= progress.phase == self.phase
        if self.times == 0:
            self.times = -1
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("search", "phase", "seconds"),
    [
        ("local", "local", 2.0e-3),
        (
            "greedy",
            "greedy",
            1.8e-3,
        ),  # the transposes become one in the first pass, none in the second
        ("taso", "lowerings", 2.0e-3),
        ("taso", "backtracking", 1.6e-3),
        ("tensat", "saturating", 1.6e-3),
        ("tensat", "extracting", 1.6e-3),
        ("eqsat-mcts", "tree search", 1.6e-3),
        ("random", "random", 1.0e-3),
    ],
)
def test_ctrl_c_keeps_the_best_so_far(search, phase, seconds):
    found = run(search, listener=Interrupting(phase), budget=ENOUGH)
    assert found.stop is StopReason.INTERRUPTED
    assert found.best[0].seconds == pytest.approx(seconds, **NEAR)
    assert found.best[0].steps


def test_ctrl_c_before_the_search_began_gives_the_original():
    found = run("taso", listener=Interrupting("measured the original"))
    assert found.stop is StopReason.INTERRUPTED
    assert [f.program for f in found.best] == [program()]


def raise_ctrl_c() -> None:
    raise KeyboardInterrupt


def raise_ctrl_c_inside_jax() -> None:
    """Raise what JAX raises on Ctrl-C while it compares the static fields of pytrees."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        raise ValueError("Exception raised while checking equality of metadata fields") from error


@pytest.mark.parametrize("press", [raise_ctrl_c, raise_ctrl_c_inside_jax])
def test_ctrl_c_while_a_region_is_timed_keeps_the_best_so_far(press):
    def price(region):
        if region.node.lowering == 1:
            press()
        return made_up(region)

    found = run("taso", oracle=FakeOracle(price))
    assert found.stop is StopReason.INTERRUPTED
    assert found.best[0].seconds < found.start_seconds


def test_progress_reports_a_better_program_before_the_graph_is_finished():
    told: list[Progress] = []
    run("greedy", listener=told.append)
    first = next(p for p in told if p.phase == "greedy")
    assert first.best_seconds < first.start_seconds == pytest.approx(2.4e-3, **NEAR)


# Properties of every search ----------------------------------------------------------------------


@pytest.mark.parametrize("on", [program, looped])
@pytest.mark.parametrize("search", SEARCHES)
def test_results_are_valid_equal_and_never_predicted_to_be_slower(search, on):
    found = run(search, on=on)
    assert found.best[-1].program == on() or found.best[-1].steps == ()
    expected = on()(*ARGS)
    for result in found.best:
        assert result.seconds <= found.start_seconds
        check_program(result.program)
        np.testing.assert_allclose(result.program(*ARGS), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("search", SEARCHES)
def test_the_costs_in_the_history_never_increase(search):
    seconds = [s for _, s in run(search).history]
    assert seconds == sorted(seconds, reverse=True) and len(seconds) >= 2


@pytest.mark.parametrize("search", SEARCHES)
def test_the_same_key_and_timings_give_the_same_result(search):
    a, b = run(search), run(search)
    assert a.best[0].seconds == b.best[0].seconds
    assert a.best[0].steps == b.best[0].steps


def test_an_unknown_search_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="no search 'tasso'.*did you mean 'taso'"):
        find_strategy("tasso")


@pytest.mark.parametrize(("field", "value"), [("seconds", 0.0), ("measurements", -1)])
def test_an_invalid_budget_is_refused(field, value):
    with pytest.raises(ValueError, match=f"Budget.{field} must"):
        Budget(**{field: value})
