"""Searching for the smallest form of a term, and the tree search under it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.egraph import uct
from xrl_jax.egraph.limits import Limits
from xrl_jax.egraph.term_saturation import Schedule, saturate_terms
from xrl_jax.egraph.term_search import search_terms
from xrl_jax.egraph.tree_cost import cheapest_now, expression_of
from xrl_jax.egraph.uct import UCT, Request, Simulated
from xrl_jax.language.rule_files import load_language
from xrl_jax.language.terms import expression_text, parse_expression, parse_language

MATH = load_language("math")
KEY = jax.random.key(0)


class Steps:
    """A state is a number of steps taken to the right, of at most four; the cost is 5 - steps.
    Rollouts stay where they are.
    """

    n_actions = 3  # stay, right, left

    def weights(self, state: int) -> np.ndarray:
        return np.ones(3)

    def simulate(self, requests: Sequence[Request[int]]) -> list[Simulated[int]]:
        found = []
        for state, action, *_ in requests:
            new = min(max(state + (0, 1, -1)[action], 0), 4)
            child = None if new == state else new
            none = np.zeros(3, np.int64)
            found.append(Simulated(child, 5.0 - new, new == 4, new, 5.0 - new, none))
        return found


class OnlyRight(Steps):
    """The same, where it is known that only steps to the right are of use."""

    def weights(self, state: int) -> np.ndarray:
        return np.array([0.0, 1.0, 0.0])


def test_a_tree_search_finds_the_cheapest_state():
    found = uct.search(Steps(), 0, 5.0, KEY, simulations=200)
    assert (found.state, found.cost) == (4, 1.0)


def test_actions_without_weight_are_not_tried():
    found = uct.search(OnlyRight(), 0, 5.0, KEY, simulations=200)
    assert (found.state, found.cost, found.simulations) == (4, 1.0, 4)


@pytest.mark.parametrize("batch", [2, 3])
def test_simulations_may_be_made_at_once(batch):
    one, again = (uct.search(Steps(), 0, 5.0, KEY, simulations=200, batch=batch) for _ in range(2))
    assert (one.state, one.cost) == (4, 1.0)
    assert one == again


def test_a_tree_search_ends_without_progress():
    found = uct.search(Steps(), 4, 1.0, KEY, settings=UCT(patience=7), simulations=200)
    assert (found.state, found.cost) == (4, 1.0)
    assert found.simulations < 20


def test_a_tree_search_asks_whether_to_go_on():
    answers = iter([True, True, False])
    found = uct.search(Steps(), 0, 5.0, KEY, simulations=200, going=lambda: next(answers))
    assert found.simulations == 2


def cheapest_form(text: str) -> tuple[float, str]:
    """Saturate, and return the cost and the text of the smallest form."""
    limits = Limits(iterations=4, nodes=500)
    grown = saturate_terms(
        [parse_expression(text, MATH)], MATH, limits=limits, schedule=Schedule.ALL
    )
    choice = cheapest_now(grown.graph, jnp.ones(grown.graph.bucket, jnp.float32))
    root = int(grown.graph.roots[0])
    best = expression_of(grown.graph, choice, root, MATH, grown.symbols)
    return float(choice.cost[root]), expression_text(best, MATH)


@pytest.mark.parametrize(
    ("text", "cost", "best"),
    [
        ("(+ (* a b) (* a c))", 5.0, "(* a (+ b c))"),
        ("(* (+ x 0) 1)", 1.0, "x"),
        ("(d x (sin x))", 2.0, "(cos x)"),
        ("(sin (sin y))", 3.0, "(sin (sin y))"),
    ],
)
def test_the_cheapest_form_is_extracted(text, cost, best):
    assert cheapest_form(text) == (cost, best)


def test_a_search_simplifies_what_saturation_in_turn_does_not():
    """i f 0 with f = (1 * 0) (i 2 1): the product is zero."""
    start = parse_expression("(+ (* (* 1 0) (i 2 1)) (- (sin 2) (sin 2)))", MATH)
    rules = [r for r in MATH.rules if not r.conditions]
    found = search_terms(start, MATH, rules, key=KEY, folding=False, simulations=60)
    assert (found.expression, found.cost) == (0.0, 1.0)


def test_the_same_key_gives_the_same_search():
    start = parse_expression("(+ (* x (+ y 0)) (* x (* z 1)))", MATH)
    one, other = (search_terms(start, MATH, key=KEY, simulations=20) for _ in range(2))
    assert one == other and one.cost == 5.0


def test_rules_that_prove_nonsense_are_noticed():
    wrong = parse_language(
        "(language wrong) (source mine) (operators (f 1)) (rule bad (lhs (f ?x)) (rhs ?x))"
        "(rule worse (lhs (f 1)) (rhs 2))"
    )
    with pytest.raises(ValueError, match="prove that two different numbers are equal"):
        search_terms(parse_expression("(f 1)", wrong), wrong, key=KEY, simulations=10)


def test_an_expression_that_fills_the_egraph_is_refused():
    parts = [float(k) for k in range(1024)]
    while len(parts) > 1:
        parts = [("+", a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    with pytest.raises(ValueError, match="has 2047 parts, at most 1024"):
        search_terms(parts[0], MATH, key=KEY)


def test_an_expression_nested_too_deeply_is_refused():
    deep = "x"
    for _ in range(3000):
        deep = ("sin", deep)
    with pytest.raises(ValueError, match="nested too deeply"):
        search_terms(deep, MATH, key=KEY)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_expression("(sin " * 3000 + "x" + ")" * 3000, MATH)
