"""Saturation of terms: counts against an e-graph in plain Python, and what egg's tests prove."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest

from tests.egraph.plain_egraph import PlainEGraph
from xrl_jax.egraph.limits import Limits, Stop
from xrl_jax.egraph.term_saturation import Saturated, Schedule, saturate_terms
from xrl_jax.language.rule_files import load_language
from xrl_jax.language.terms import Expression, Language, parse_expression

MATH, PROP = load_language("math"), load_language("prop")


def random_expression(draw: random.Random, language: Language, depth: int) -> Expression:
    """Draw from operators, two symbols and the numbers that rules know."""
    names = [n for n in language.vocabulary.operators if n not in ("hole", "number", "any")]
    name = draw.choice(names)
    if depth == 0 or name == "symbol":
        return draw.choice(["x", "y", 0.0, 1.0])
    n = language.vocabulary.operators[name].arity[0]
    return (name, *(random_expression(draw, language, depth - 1) for _ in range(n)))


@pytest.mark.parametrize("language", [MATH, PROP], ids=lambda language: language.name)
@pytest.mark.parametrize("first", range(0, 100, 10))
def test_nodes_classes_and_matches_are_those_of_a_plain_egraph(language, first):
    """A hundred random expressions of each language, with random rules, for three iterations."""
    largest = {"math": "factor", "prop": "dist-or-and"}[language.name]
    for seed in range(first, first + 10):
        draw = random.Random(seed)
        expressions = [random_expression(draw, language, 4) for _ in range(2)]
        rules = [r for r in language.rules if r.name == largest or draw.random() < 0.4][:16]
        found = saturate_terms(
            expressions,
            language,
            rules,
            limits=Limits(iterations=3, nodes=200),
            schedule=Schedule.ALL,
            folding=False,
        )
        plain = PlainEGraph()
        roots = [plain.add_expression(e) for e in expressions]
        for iteration in found.iterations:
            matches = plain.iterate(rules)
            assert list(iteration.matches) == matches, seed
            assert (iteration.nodes, iteration.classes) == plain.counts(), seed
        one, other = map(plain.find, roots)
        assert (int(found.graph.roots[0]) == int(found.graph.roots[1])) == (one == other), seed


def proven(start: str, goal: str, *, seen: str = "", language: Language = MATH, **options) -> Stop:
    expressions = [parse_expression(e, language) for e in (start, seen) if e]
    goals = [parse_expression(goal, language)]
    return saturate_terms(expressions, language, goals=goals, **options).stop


@pytest.mark.parametrize(
    ("start", "goal"),
    [
        ("(+ x (+ x (+ x x)))", "(* 4 x)"),
        ("(* (pow 2 x) (pow 2 y))", "(pow 2 (+ x y))"),
        ("(+ 1 (- a (* (- 2 1) a)))", "1"),
        ("(/ 1 (- (/ (+ 1 (sqrt five)) 2) (/ (- 1 (sqrt five)) 2)))", "(/ 1 (sqrt five))"),
        ("(* (+ x 3) (+ x 1))", "(+ (+ (* x x) (* 4 x)) 3)"),
        ("(d x x)", "1"),
        ("(d x y)", "0"),
        ("(d x (+ 1 (* 2 x)))", "2"),
        ("(d x (+ 1 (* y x)))", "y"),
        ("(d x (ln x))", "(/ 1 x)"),
        ("(d x (pow x 3))", "(* 3 (pow x 2))"),
        ("(i 1 x)", "x"),
        ("(i (cos x) x)", "(sin x)"),
        ("(i (pow x 1) x)", "(/ (pow x 2) 2)"),
        ("(i (* x (cos x)) x)", "(+ (* x (sin x)) (cos x))"),
        ("(i (* (cos x) x) x)", "(+ (* x (sin x)) (cos x))"),
        ("(i (ln x) x)", "(- (* x (ln x)) x)"),
    ],
)
def test_what_egg_proves_in_its_tests_is_proven(start, goal):
    assert proven(start, goal) is Stop.PROVEN


def test_a_derivative_is_factored_where_its_factors_are_in_the_egraph():
    factored = "(* x (- (* 3 x) 14))"
    assert proven("(d x (- (pow x 3) (* 7 (pow x 2))))", factored, seen=factored) is Stop.PROVEN


def test_what_is_not_equal_is_not_proven():
    limits = Limits(iterations=5)
    assert proven("(+ x y)", "(/ x y)", limits=limits) is not Stop.PROVEN


def test_an_implication_is_not_an_equality():
    """egg's tests prove this by a rule that is wrong."""
    limits = Limits(iterations=8, nodes=300)
    start, goal = "(& (-> x y) (-> y z))", "(-> x z)"
    assert proven(start, goal, language=PROP, limits=limits) is not Stop.PROVEN


@pytest.mark.parametrize(
    ("start", "goal"),
    [
        ("(-> x y)", "(-> (~ y) (~ x))"),
        ("(& x (| y (~ y)))", "x"),
        ("(| (& false true) (& true false))", "false"),
    ],
)
def test_propositions_are_proven(start, goal):
    assert proven(start, goal, language=PROP) is Stop.PROVEN


def sums(n: int) -> Expression:
    """Return 1 + (2 + (3 + ... n))."""
    total: Expression = float(n)
    for k in range(n - 1, 0, -1):
        total = ("+", float(k), total)
    return total


def orders_of(n: int, iterations: int) -> Saturated:
    """Apply commutativity and associativity to the sum of n numbers."""
    rules = [r for r in MATH.rules if r.name in ("comm-+", "assoc-+")]
    limits = Limits(iterations=iterations, nodes=20_000)
    return saturate_terms(
        [sums(n)], MATH, rules, limits=limits, schedule=Schedule.ALL, folding=False
    )


def test_the_sums_of_subsets_of_seven_numbers_are_127_classes():
    assert orders_of(7, 7).counts == (1939, 127)


def test_counts_grow_as_in_egglog():
    """The numbers are egglog 13.2's; the last two iterations need larger buckets."""
    nodes = [i.nodes for i in orders_of(9, 6).iterations]
    assert nodes == [39, 113, 490, 2293, 8233, 16282]


def test_folding_leaves_one_number():
    found = saturate_terms([parse_expression("(- (* (+ 1 2) 4) 5)", MATH)], MATH)
    assert found.equals_first(7.0)


@pytest.mark.parametrize(
    "text", ["(/ 1 0)", "(/ 1 3)", "(+ 16777215 1)", "(* 4099 4099)", "(+ 0.1 0.2)"]
)
def test_what_float32_does_not_hold_exactly_is_not_folded(text):
    found = saturate_terms([parse_expression(text, MATH)], MATH, rules=[])
    assert found.counts in ((3, 3), (2, 2))


def test_a_number_that_float32_rounds_is_refused():
    with pytest.raises(ValueError, match="16777217.0 would be 16777216.0"):
        saturate_terms([parse_expression("(- 16777217 16777216)", MATH)], MATH)
    with pytest.raises(ValueError, match="1e[+]39 would be inf"):
        saturate_terms([parse_expression("(- 1e39 1)", MATH)], MATH)


def test_saturation_ends_when_nothing_is_left():
    """x = x * 1, x + 0; 0 and 1 likewise."""
    found = saturate_terms([parse_expression("(* x 1)", MATH)], MATH)
    assert found.stop is Stop.SATURATED


@pytest.mark.parametrize("schedule", list(Schedule))
def test_all_schedules_end_with_the_same_classes(schedule):
    rules = [r for r in PROP.rules if r.name in ("comm-and", "comm-or", "dist-and-or", "assoc-or")]
    e = parse_expression("(& (| a b) (| c d))", PROP)
    limits = Limits(iterations=200)
    found = saturate_terms([e], PROP, rules, limits=limits, schedule=schedule)
    assert (found.stop, found.counts) == (Stop.SATURATED, (76, 21))


@pytest.mark.parametrize("schedule", list(Schedule))
def test_without_rules_nothing_changes(schedule):
    found = saturate_terms([parse_expression("(sin x)", MATH)], MATH, [], schedule=schedule)
    assert (found.stop, found.counts) == (Stop.SATURATED, (2, 2))


def test_a_rule_that_matches_too_often_is_banned():
    """Associativity has 1,840 places in the fourth iteration, above a thousand."""
    rules = [r for r in MATH.rules if r.name in ("comm-+", "assoc-+")]
    found = saturate_terms([sums(9)], MATH, rules, limits=Limits(iterations=5), folding=False)
    assert [i.matches[1] for i in found.iterations] == [7, 37, 294, 0, 0]


def test_the_same_run_gives_the_same_bits():
    one, other = (orders_of(6, 5).graph for _ in range(2))
    same = jax.tree.map(np.array_equal, one, other)
    assert all(jax.tree.leaves(same))


def test_limits_end_a_run():
    assert orders_of(7, 2).stop is Stop.ITERATIONS
    limits = Limits(nodes=100)
    rules = [r for r in MATH.rules if r.name in ("comm-+", "assoc-+")]
    found = saturate_terms([sums(7)], MATH, rules, limits=limits, folding=False)
    assert found.stop is Stop.NODES


def test_no_expressions_are_refused():
    with pytest.raises(ValueError, match="saturation takes 1 to 65536 e-nodes, not 0"):
        saturate_terms([], MATH)
