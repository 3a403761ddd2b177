"""Refinement at made-up times of whole programs: what gains stays, for all equal operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.search.fakes import FakeOracle
from xrl_jax.cost.programs import Timed
from xrl_jax.cost.timing import Stopwatch, Timing
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import nodes_of
from xrl_jax.graph.program import Program
from xrl_jax.rewrite.rule import parse_rules
from xrl_jax.search import refine as lib
from xrl_jax.search.base import Step

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
LONG = Stopwatch(600.0)


def network(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
    """Two equal contractions."""
    return jnp.tanh(x @ v) @ w


def forms(program: Program) -> tuple[int, ...]:
    return tuple(n.lowering for n in nodes_of(program.graph)[0] if n.op == "dot")


class Timer(FakeOracle):
    """An oracle that times a program by the forms of its contractions.

    Attributes:
      asked: the forms timed, in order.
    """

    def __init__(self, seconds: Callable[[tuple[int, ...]], float], monkeypatch) -> None:
        super().__init__()
        self.seconds, self.asked = seconds, []
        monkeypatch.setattr(lib, "program_job", lambda p, *_, **__: forms(p))

    def time_against(self, job, reference, *, turn, **_):
        self.asked += [job] * (turn == 0)
        self.spending.measurements += 1
        t = self.seconds(job)
        return Timing(t, t, t, relative=t / self.seconds(reference))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Timed:
    # Every form costs the same by the model: all are worth a trial.
    monkeypatch.setattr(lib, "_HOPE", 1e9)
    program = from_jax(network, *ARGS, weights=(1, 2))
    return Timed(program, (), Timing(1.0, 1.0, 1.0, relative=0.8), 3)


def test_equal_operators_change_together_and_the_fastest_form_stays(start, monkeypatch) -> None:
    times = {PLAIN: 1.0, TRANSPOSED: 0.5, SWAPPED: 0.9}
    oracle = Timer(lambda f: max(times[i] for i in f), monkeypatch)
    best, steps = lib.refine(oracle, RULES, start, LONG)
    assert forms(best.program) == (TRANSPOSED, TRANSPOSED)
    assert all(a == b for a, b in oracle.asked)
    assert best.timing.relative == pytest.approx(0.8 * 0.5)
    assert best.index == 3
    assert steps[-1].rule == "transposed"
    np.testing.assert_allclose(best.program(*ARGS), network(*ARGS), rtol=1e-5)


def test_what_gains_less_than_a_hundredth_does_not_stay(start, monkeypatch) -> None:
    times = {PLAIN: 1.0, TRANSPOSED: 0.995, SWAPPED: 1.2}
    oracle = Timer(lambda f: times[f[0]], monkeypatch)
    best, steps = lib.refine(oracle, RULES, start, LONG)
    assert best == start and steps == ()
    assert sorted(set(oracle.asked)) == [(TRANSPOSED,) * 2, (SWAPPED,) * 2]


def test_a_gain_must_be_seen_twice(start, monkeypatch) -> None:
    class Lucky(Timer):
        def time_against(self, job, reference, *, turn, **options):
            t = 0.9 if turn == 0 else 1.0
            return Timing(t, t, t, relative=t)

    best, steps = lib.refine(Lucky(lambda f: 1.0, monkeypatch), RULES, start, LONG)
    assert best == start and steps == ()


def test_only_forms_that_a_rule_chooses_are_tried(start, monkeypatch) -> None:
    oracle = Timer(lambda f: 1.0 if f[0] == PLAIN else 0.5, monkeypatch)
    lib.refine(oracle, RULES[:1], start, LONG)
    assert oracle.asked == [(SWAPPED, SWAPPED)]


def test_the_plain_form_is_tried_where_a_rule_leads_back_to_it(start, monkeypatch) -> None:
    back = parse_rules(
        """(rule plain (family lowering-dot) (source "test")
             (lhs (dot ?x ?w :as d)) (when (/= (lowering d) 0)) (rhs (dot ?x ?w :like d)))"""
    )[0]
    nodes = start.program.graph.nodes
    swapped = start.program.with_graphs(
        [start.program.graph._replace(nodes=nodes._replace(lowering=nodes.op * 0 + SWAPPED))]
    )
    oracle = Timer(lambda f: 0.5 if f[0] == PLAIN else 1.0, monkeypatch)
    best, steps = lib.refine(oracle, back, replace(start, program=swapped), LONG)
    assert forms(best.program) == (PLAIN, PLAIN) and [s.rule for s in steps] == ["plain"]


def test_no_more_is_timed_than_allowed(start, monkeypatch) -> None:
    oracle = Timer(lambda f: 1.0, monkeypatch)
    lib.refine(oracle, RULES, start, LONG, measurements=1)
    assert len(oracle.asked) == 1
    lib.refine(oracle, RULES, start, Stopwatch(0.0))
    assert len(oracle.asked) == 1


def test_ctrl_c_keeps_what_was_gained(start, monkeypatch) -> None:
    def seconds(f: tuple[int, ...]) -> float:
        if f[0] not in (PLAIN, first[0]):
            raise KeyboardInterrupt
        return 1.0 if f[0] == PLAIN else 0.5

    first = [c.lowering for c in lib.changes(FakeOracle(), RULES, start.program)]
    oracle = Timer(seconds, monkeypatch)
    best, steps = lib.refine(oracle, RULES, start, LONG)
    assert forms(best.program) == (first[0],) * 2
    assert [s.rule for s in steps] == [steps[0].rule] and isinstance(steps[0], Step)


def test_forms_that_the_model_thinks_hopeless_are_not_tried(start, monkeypatch) -> None:
    monkeypatch.setattr(lib, "_HOPE", 0.0)
    oracle = Timer(lambda f: 0.5, monkeypatch)
    lib.refine(oracle, RULES, start, LONG)
    assert oracle.asked == []
