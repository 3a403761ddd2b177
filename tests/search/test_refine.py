"""Refinement at made-up times: moves that gain in a neighbourhood are tried, and those that make
the whole program faster are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.search.fakes import FakeOracle
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import nodes_of
from xrl_jax.language.rule import Rule
from xrl_jax.language.rule_parser import parse_rules
from xrl_jax.language.table import compile_rules
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.measure.timing import Timing
from xrl_jax.program.program import Program
from xrl_jax.search import moves as moves_lib
from xrl_jax.search import refine as lib
from xrl_jax.search.base import Found, Problem, Step
from xrl_jax.search.moves import Move
from xrl_jax.search.refine import Refine, Screening

PLAIN, TRANSPOSED, SWAPPED = 0, 2, 3
RULES = parse_rules(
    """
(rule swapped (family lowering-dot) (source "test")
  (lhs (dot ?x ?w :as d)) (when (= (lowering d) 0)) (rhs (dot ?x ?w :like d :lowering swapped)))
(rule transposed (family lowering-dot) (source "test")
  (lhs (dot ?x ?w :as d)) (when (= (lowering d) 0)) (rhs (dot ?x ?w :like d :lowering transposed)))
"""
)[0]
ARGS = tuple(jax.random.normal(jax.random.key(i), (4, 4)) for i in range(3))
LONG = Stopwatch(1e6)  # starts when tests are collected, perhaps an hour before they run


def network(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
    """Compute two equal contractions."""
    return jnp.tanh(x @ v) @ w


def lowerings(program: Program) -> tuple[int, ...]:
    return tuple(n.lowering for n in nodes_of(program.graph)[0] if n.op == "dot")


Seconds = Callable[[tuple[int, ...]], float]


class Timer(FakeOracle):
    """An oracle that times a program, or a neighbourhood, by the lowerings of its contractions.

    Attributes:
      asked: the lowerings of the whole programs timed, in order.
      near: the lowerings of the neighbourhoods timed, in order.
    """

    def __init__(self, whole: Seconds, monkeypatch, *, near: Seconds | None = None) -> None:
        super().__init__()
        self.whole, self.nearby = whole, near or whole
        self.asked: list[tuple[int, ...]] = []
        self.near: list[tuple[int, ...]] = []
        # A whole program was traced from a function, a neighbourhood was not.
        monkeypatch.setattr(
            lib, "program_job", lambda p, *_, **__: (p.fn is not None, lowerings(p))
        )

    def time_against(self, job, reference, *, turn=0, **_):
        is_whole, lowerings_of_job = job
        (self.asked if is_whole else self.near).extend([lowerings_of_job] * (turn == 0))
        self.spending.measurements += 1
        seconds = self.whole if is_whole else self.nearby
        t = seconds(lowerings_of_job)
        return Timing(t, t, t, relative=t / seconds(reference[1]))


def refined(
    oracle: FakeOracle,
    rules: Sequence[Rule],
    start: Found,
    clock: Stopwatch = LONG,
    most: int | None = None,
    **how: float,
) -> tuple[Found, tuple[Step, ...]]:
    """Return the program after refinement, and its steps."""
    problem = Problem(start.program, compile_rules(rules), oracle)
    best = Refine(**how).refined(problem, start, clock, most)  # type: ignore[arg-type]
    return best, best.steps


def started(fn: Callable[..., jax.Array], *args: jax.Array) -> Found:
    """Return the program with a timing; all arguments but the first are weights."""
    program = from_jax(fn, *args, weights=tuple(range(1, len(args))))
    return Found(program, 1.0, timing=Timing(1.0, 1.0, 1.0, relative=0.8))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Found:
    # No lowering is ruled out by its predicted cost, so all are probed.
    monkeypatch.setattr(moves_lib, "_HOPE", 1e9)
    return started(network, *ARGS)


@pytest.fixture
def uneven(start) -> Found:
    """Return a program of two unequal contractions, too far apart to share a neighbourhood."""

    def fn(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(jnp.cos(jnp.sin(jnp.tanh(x @ v)))) @ w

    return started(fn, ARGS[0], ARGS[1], jnp.ones((4, 8)))


def test_equal_operators_change_together_and_the_fastest_lowering_is_kept(
    start, monkeypatch
) -> None:
    times = {PLAIN: 1.0, TRANSPOSED: 0.5, SWAPPED: 0.9}
    oracle = Timer(lambda f: max(times[i] for i in f), monkeypatch)
    best, steps = refined(oracle, RULES, start)
    assert lowerings(best.program) == (TRANSPOSED, TRANSPOSED)
    assert oracle.asked == [(TRANSPOSED, TRANSPOSED)]
    assert best.relative == pytest.approx(0.8 * 0.5)
    assert [(s.rule, s.gain) for s in steps] == [("transposed", pytest.approx(0.5))]
    np.testing.assert_allclose(best.program(*ARGS), network(*ARGS), rtol=1e-5)


def test_a_change_slower_in_its_neighbourhood_is_not_tried_on_the_program(
    start, monkeypatch
) -> None:
    times = {PLAIN: 1.0, TRANSPOSED: 1.06, SWAPPED: 1.2}
    oracle = Timer(lambda f: 0.5, monkeypatch, near=lambda f: times[f[0]])
    best, steps = refined(oracle, RULES, start)
    assert best is start and steps == ()
    assert sorted(oracle.near) == [(TRANSPOSED,) * 2, (SWAPPED,) * 2] and oracle.asked == []


def test_changes_slightly_slower_nearby_are_tried_last_and_one_by_one(uneven, monkeypatch) -> None:
    near = {PLAIN: 1.0, TRANSPOSED: 1.04, SWAPPED: 1.02}
    whole: dict[tuple[int, ...], float] = {(SWAPPED, PLAIN): 0.9, (SWAPPED, TRANSPOSED): 0.8}
    oracle = Timer(lambda f: whole.get(f, 1.0), monkeypatch, near=lambda f: near[f[0]])
    best, steps = refined(oracle, RULES, uneven)
    assert set(oracle.asked[:2]) == {(PLAIN, SWAPPED), (SWAPPED, PLAIN)}
    assert lowerings(best.program) == (SWAPPED, TRANSPOSED)
    assert [(s.rule, s.gain) for s in steps] == [
        ("swapped", pytest.approx(0.1)),
        ("transposed", pytest.approx(0.1)),
    ]


def test_a_lowering_of_many_operators_is_tried_for_all_even_if_slower_nearby(
    uneven, monkeypatch
) -> None:
    near = {PLAIN: 1.0, TRANSPOSED: 1.2, SWAPPED: 1.2}
    whole: dict[tuple[int, ...], float] = {(TRANSPOSED, TRANSPOSED): 0.7}
    oracle = Timer(lambda f: whole.get(f, 1.0), monkeypatch, near=lambda f: near[f[0]])
    best, _ = refined(oracle, RULES, uneven, together_least=2)
    assert lowerings(best.program) == (TRANSPOSED, TRANSPOSED)
    assert set(oracle.asked[:2]) == {(TRANSPOSED,) * 2, (SWAPPED,) * 2}


def test_by_lowering_groups_moves_that_are_many_and_not_much_slower() -> None:
    def move(rule: str, place: int, gain: float, ratio: float) -> Move:
        return Move(((0, place),), 1, rule, "dot[4,4]", gain, ratio)

    a, b, c = move("a", 1, 0.1, 0.9), move("a", 2, -0.01, 1.1), move("a", 3, -0.3, 1.3)
    d, e, alone = move("b", 1, 0.3, 0.5), move("b", 2, 0.1, 0.9), move("c", 1, 0.9, 0.1)
    together = moves_lib.by_lowering([a, b, c, d, e, alone], least=2, ratio=1.15)
    assert together == [[d, e], [a, b]]


def test_a_gain_below_one_per_cent_is_rejected(start, monkeypatch) -> None:
    times = {PLAIN: 1.0, TRANSPOSED: 0.995, SWAPPED: 1.2}
    near = {PLAIN: 1.0, TRANSPOSED: 0.8, SWAPPED: 0.9}
    oracle = Timer(lambda f: times[f[0]], monkeypatch, near=lambda f: near[f[0]])
    best, steps = refined(oracle, RULES, start)
    assert best is start and steps == ()
    assert oracle.asked == [(TRANSPOSED,) * 2, (SWAPPED,) * 2]


def test_small_gains_are_accepted_together(uneven, monkeypatch) -> None:
    oracle = Timer(
        lambda f: 1.0 - 0.006 * sum(i == SWAPPED for i in f),
        monkeypatch,
        near=lambda f: 0.9 if SWAPPED in f else 1.0,
    )
    best, steps = refined(oracle, RULES, uneven)
    assert oracle.asked == [(SWAPPED, SWAPPED)] and lowerings(best.program) == (SWAPPED, SWAPPED)
    assert [s.rule for s in steps] == ["swapped", "swapped"]
    assert sum(s.gain for s in steps) == pytest.approx(0.012)


def test_if_all_changes_together_gain_nothing_halves_are_tried(uneven, monkeypatch) -> None:
    times: dict[tuple[int, ...], float] = {
        (PLAIN, PLAIN): 1.0,
        (SWAPPED, SWAPPED): 1.1,
        (SWAPPED, PLAIN): 0.9,
    }
    oracle = Timer(
        lambda f: times.get(f, 1.3), monkeypatch, near=lambda f: 0.9 if SWAPPED in f else 1.0
    )
    best, _ = refined(oracle, RULES[:1], uneven)
    assert lowerings(best.program) == (SWAPPED, PLAIN)
    assert oracle.asked[0] == (SWAPPED, SWAPPED) and (SWAPPED, PLAIN) in oracle.asked


def test_a_change_predicted_to_gain_under_half_of_the_minimum_is_not_tried(
    start, monkeypatch
) -> None:
    times = {PLAIN: 1.0e-3, TRANSPOSED: 1.2e-3, SWAPPED: 0.9e-3}
    oracle = Timer(lambda f: 0.5, monkeypatch, near=lambda f: times[f[0]])
    best, steps = refined(oracle, RULES, start)
    assert oracle.asked == [] and best == start and steps == ()


def test_the_gain_in_a_neighbourhood_is_multiplied_by_places_and_runs(monkeypatch) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w), None

        return jax.lax.scan(body, x, None, length=4)[0] @ w

    program = started(fn, *ARGS[:2]).program
    places = []
    for g, graph in enumerate(program.graphs):
        nodes, _, slots = nodes_of(graph)
        places += [(g, s) for n, s in zip(nodes, slots, strict=True) if n.op == "dot"]
    assert len(places) == 2
    move = Move(tuple(places), SWAPPED, "swapped", "", 0.0, 1.0)
    oracle = Timer(lambda f: 0.0, monkeypatch, near=lambda f: 0.9 if SWAPPED in f else 1.0)
    screening = Screening(Refine(), oracle)
    assert screening.probe(program, move) == pytest.approx(((1 + 4) * 0.1, 0.9))
    assert screening.probe(program, move) == pytest.approx(((1 + 4) * 0.1, 0.9))
    assert oracle.near == [(SWAPPED,)]  # timed once


def test_a_gain_must_be_confirmed_by_a_second_timing(start, monkeypatch) -> None:
    class Lucky(Timer):
        def time_against(self, job, reference, *, turn=0, **options):
            t = 0.9 if turn == 0 else 1.0
            return Timing(t, t, t, relative=t)

    best, steps = refined(Lucky(lambda f: 1.0, monkeypatch), RULES, start)
    assert best is start and steps == ()


def test_only_lowerings_that_a_rule_chooses_are_tried(start, monkeypatch) -> None:
    oracle = Timer(lambda f: 1.0 if f[0] == PLAIN else 0.5, monkeypatch)
    refined(oracle, RULES[:1], start)
    assert oracle.asked == [(SWAPPED, SWAPPED)]


def test_the_plain_lowering_is_tried_if_a_rule_chooses_it(start, monkeypatch) -> None:
    back = parse_rules(
        """(rule plain (family lowering-dot) (source "test")
             (lhs (dot ?x ?w :as d)) (when (/= (lowering d) 0))
             (rhs (dot ?x ?w :like d :lowering plain)))"""
    )[0]
    nodes = start.program.graph.nodes
    swapped = start.program.with_graphs(
        [start.program.graph._replace(nodes=nodes._replace(lowering=nodes.op * 0 + SWAPPED))]
    )
    oracle = Timer(lambda f: 0.5 if f[0] == PLAIN else 1.0, monkeypatch)
    best, steps = refined(oracle, back, replace(start, program=swapped))
    assert lowerings(best.program) == (PLAIN, PLAIN) and [s.rule for s in steps] == ["plain"]


def test_refinement_respects_the_limits_of_timings_and_time(start, monkeypatch) -> None:
    oracle = Timer(lambda f: 1.0 if f[0] == PLAIN else 0.5, monkeypatch)
    refined(oracle, RULES, start, most=1)
    assert len(oracle.near) == 1 and oracle.asked == []
    refined(oracle, RULES, start, Stopwatch(0.0))
    assert len(oracle.near) == 1


def test_a_change_that_hangs_the_worker_is_not_tried_in_other_neighbourhoods(
    uneven, monkeypatch
) -> None:
    # The neighbourhoods overlap, so a change of one contraction changes the other's neighbourhood.

    class Hanging(Timer):
        def time_against(self, job, reference, **options):
            timing = super().time_against(job, reference, **options)
            return Timing.without("timeout", "no") if job[1][1] == SWAPPED else timing

    oracle = Hanging(lambda f: 0.5 if f[0] == SWAPPED else 1.0, monkeypatch)
    best, _ = refined(oracle, RULES[:1], uneven, radius=6)
    assert lowerings(best.program) == (SWAPPED, PLAIN)
    assert sorted(oracle.near) == [(PLAIN, SWAPPED), (SWAPPED, PLAIN)]
    assert oracle.asked == [(SWAPPED, PLAIN)]


def test_ctrl_c_keeps_the_gains_so_far(start, monkeypatch) -> None:
    def seconds(f: tuple[int, ...]) -> float:
        if f[0] == SWAPPED:
            raise KeyboardInterrupt
        return 1.0 if f[0] == PLAIN else 0.5

    times = {PLAIN: 1.0, TRANSPOSED: 0.5, SWAPPED: 0.4}
    oracle = Timer(seconds, monkeypatch, near=lambda f: times[f[0]])
    best, steps = refined(oracle, RULES[1:], start)
    assert lowerings(best.program) == (TRANSPOSED,) * 2
    again, _ = refined(oracle, RULES, best)
    assert again is best
    assert [s.rule for s in steps] == ["transposed"] and isinstance(steps[0], Step)


def test_lowerings_predicted_to_be_far_too_slow_are_not_tried(start, monkeypatch) -> None:
    monkeypatch.setattr(moves_lib, "_HOPE", 0.0)
    oracle = Timer(lambda f: 0.5, monkeypatch)
    refined(oracle, RULES, start)
    assert oracle.asked == [] and oracle.near == []
