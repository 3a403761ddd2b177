"""The table of rules: what a walk records of each rule, and the verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.rules_table import Row, Seen, record, small_graphs
from xrl_jax.language.rule_files import load_rules
from xrl_jax.language.table import compile_rules

RULES = compile_rules(
    load_rules("""
    (rule opens (source "test") (lhs (exp ?x)) (rhs (copy ?x)))
    (rule closes (source "test") (lhs (sin ?x)) (rhs (copy ?x)))
    (rule saves (source "test") (lhs (cos ?x)) (rhs (copy ?x)))
    """)
)
OPENS, CLOSES, SAVES = 0, 1, 2


def walked(*states: tuple[float, dict[int, float]], taken: tuple[int, ...]) -> list[Row]:
    """Return the rows after a walk through states (seconds, change by rule), by the rules in
    `taken`.
    """
    rows = [Row(r.name, r.family, r.evidence) for r in RULES.rules]
    width = max(len(changes) for _, changes in states)
    shape = (len(states), width)
    entry, delta = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    for t, (_, changes) in enumerate(states):
        entry[t, : len(changes)] = list(changes)
        delta[t, : len(changes)] = list(changes.values())
    chosen = [list(changes).index(r) for (_, changes), r in zip(states, taken, strict=False)]
    n_left = len(states) - len(taken)
    seen = Seen(
        entry,  # type: ignore[arg-type]
        np.tile(np.arange(1, width + 1), (len(states), 1)),  # type: ignore[arg-type]
        np.zeros(shape, np.int32),  # type: ignore[arg-type]
        delta,  # type: ignore[arg-type]
        np.array([s for s, _ in states], np.float32),  # type: ignore[arg-type]
        np.array(chosen + [0] * n_left),  # type: ignore[arg-type]
        np.array([True] * len(taken) + [False] * n_left),  # type: ignore[arg-type]
    )
    record(RULES, rows, "net", seen, first=True)
    return rows


def test_a_rule_pays_if_it_leads_below_the_cost_of_all_earlier_graphs() -> None:
    rows = walked((1.0, {SAVES: -0.25}), taken=())
    assert rows[SAVES].verdict == "pays" and rows[SAVES].start == {"net": 1}
    assert rows[SAVES].gain["net"] == pytest.approx(0.25, rel=1e-4)
    assert rows[OPENS].verdict == "not seen"


def test_undoing_a_loss_does_not_pay() -> None:
    rows = walked((1.0, {OPENS: 0.5}), (1.5, {CLOSES: -0.5}), taken=(OPENS,))
    assert [rows[r].verdict for r in (OPENS, CLOSES)] == ["fires", "fires"]
    assert rows[CLOSES].start == {} and rows[CLOSES].most == {"net": 1}


def test_a_loss_that_makes_a_greater_gain_possible_enables_it() -> None:
    rows = walked((1.0, {OPENS: 0.5}), (1.5, {SAVES: -0.75}), taken=(OPENS,))
    assert rows[OPENS].verdict == "enables" and rows[OPENS].enables == ["saves"]
    assert rows[SAVES].gain["net"] == pytest.approx(0.25, rel=1e-4)


def test_a_step_does_not_enable_a_gain_that_was_possible_before() -> None:
    rows = walked((1.0, {OPENS: 0.0, SAVES: -0.5}), (1.0, {SAVES: -0.5}), taken=(OPENS,))
    assert rows[OPENS].verdict == "fires" and rows[OPENS].enables == []


def test_verdicts_from_timed_results_and_from_small_graphs() -> None:
    def verdict(**known: object) -> str:
        return Row("r", "f", "field", **known).verdict  # type: ignore[arg-type]

    assert verdict(results=2, most={"net": 1}) == "pays by timing"
    assert verdict(small_gain=1e-6) == "pays in a small graph"
    assert verdict(small_gain=0.0) == "fires in a small graph"


def test_small_graphs_contain_the_pattern() -> None:
    drawn = small_graphs(RULES.rules[SAVES], np.random.default_rng(0))
    assert {graph.nodes[graph.roots[0]].op for graph in drawn} == {"cos"}
