"""Parsing and checking rules: errors name the file, line and column."""

from __future__ import annotations

import pytest

from xrl_jax.graph import ops
from xrl_jax.language.rule import Pattern, Term, Var
from xrl_jax.language.rule_parser import parse_rules
from xrl_jax.language.sexpr import Atom, RuleError, SExpr


def test_a_rule_is_read_into_patterns_and_terms() -> None:
    (rule,), _ = parse_rules('(rule r (source "s") (lhs (add ?x (neg ?y))) (rhs (sub ?x ?y)))')
    assert (rule.name, rule.family, rule.evidence) == ("r", "other", "float64")
    assert rule.lhs == (Pattern("add", (Var("?x"), Pattern("neg", (Var("?y"),)))),)
    assert rule.rhs == (Term("sub", (Var("?x"), Var("?y"))),)


def test_each_expands_into_one_rule_per_operator() -> None:
    rules, _ = parse_rules(
        '(each $op (max min) (rule $op-same (source "s") (lhs ($op ?x ?x)) (rhs ?x)))'
    )
    assert [(r.name, r.lhs[0].op) for r in rules] == [("max-same", "max"), ("min-same", "min")]


def test_macros_are_expanded() -> None:
    text = """
    (define (wide x) (> (rank x) 1))
    (rule r (source "s") (lhs (neg ?y)) (when (wide ?y)) (rhs ?y))"""
    (rule,), macros = parse_rules(text)
    assert "wide" in macros
    head = rule.conditions[0]
    assert getattr(head, "head", "") == ">"


def test_dtypes_are_compared_by_name() -> None:
    names = ["float16", "int8", "float32"]
    named, coded = (
        f"""
        (define (wider x than) (> (dtype x) than))
        (rule r (source "s") (lhs (cast ?x :dtype {narrow} :as d))
          (when (wider ?x {half}) (or (= {single} (dtype ?x)) (= (attr d dtype) {narrow})))
          (rhs (cast ?x :dtype {single})))"""
        for half, narrow, single in (names, [ops.DTYPE_CODE[n] for n in names])
    )
    assert texts(named) == texts(coded)


def texts(rules: str) -> list[object]:
    """Return the patterns, conditions and attributes of a rule, without source positions."""
    (rule,), _ = parse_rules(rules)
    (made,) = rule.rhs
    assert isinstance(made, Term)
    return [rule.lhs, [bare(c) for c in rule.conditions], [(f, bare(e)) for f, e in made.attrs]]


def bare(e: SExpr) -> object:
    return e.text if isinstance(e, Atom) else [bare(i) for i in e.items]


def test_a_dtype_may_be_compared_with_a_number_by_name() -> None:
    parse_rules(
        '(rule r (source "s") (lhs (cast ?x :dtype to)) (when (< (dtype ?x) to)) (rhs (neg ?x)))'
    )


@pytest.mark.parametrize(
    ("clauses", "message"),
    [
        ("(lhs (add ?x ?y)) (rhs ?z)", "'?z' is not bound on the left-hand side"),
        ("(lhs (add ?x ?y)) (rhs (mul ?x 2))", "write a number as (const NUMBER :dtype-of ?x)"),
        ("(lhs (add ?x 2)) (rhs ?x)", "match a number by a variable and a condition"),
        ("(lhs (add ?x (const 2))) (rhs ?x)", "match a number by a variable and a condition"),
        ("(lhs (plus ?x ?y)) (rhs ?x)", "there is no operator 'plus'"),
        ("(lhs (add ?x)) (rhs ?x)", "add takes 2 arguments, got 1"),
        ("(lhs (slice ?x :begin b)) (rhs ?x)", "operator 'slice' has no attribute 'begin'"),
        ("(lhs ?x) (rhs ?x)", "a root must be an operator, not a variable"),
        ("(lhs (neg ?x)) (when (= n 1)) (rhs ?x)", "'n' is neither a number nor bound"),
        (
            "(lhs (neg ?x)) (when (= (dtype ?x) flaot32)) (rhs ?x)",
            "unknown dtype 'flaot32' (known: bool, int2,",
        ),
        ("(lhs (neg ?x)) (rhs (cast ?x :dtype half))", "unknown dtype 'half'"),
        ("(lhs (neg ?x)) (when (= (rank ?x) int8)) (rhs ?x)", "'int8' is neither a number nor"),
        ("(lhs (neg ?x)) (role sink-stone) (rhs ?x)", "a role must be one of fold-into-weights,"),
        ("(lhs (neg ?x)) (when (size ?x)) (rhs ?x)", "there is no function 'size'"),
        ("(lhs (neg ?x)) (when (attr ?x axes)) (rhs ?x)", "is not the name of a node"),
        ("(lhs (neg ?x)) (rhs (neg ?x :like d))", "no node of the left-hand side has this name"),
        ("(lhs (neg ?x)) (rhs (neg ?x :lowering fast))", "neg has no lowering 'fast'"),
        ("(lhs (neg ?x)) (rhs (input))", "a rewrite cannot create a 'input' node"),
        ("(lhs (neg ?x)) (rhs (const one :dtype-of ?x))", "'one' is not a number"),
        ("(lhs (neg ?x)) (then ?x)", "cannot read clause (then ...)"),
    ],
)
def test_a_wrong_clause_is_named_with_its_place(clauses: str, message: str) -> None:
    with pytest.raises(RuleError) as error:
        parse_rules(f'(rule r (source "s")\n{clauses})', "my.rules")
    assert message in str(error.value)
    assert str(error.value).startswith("my.rules:2:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(rule r (lhs (neg ?x)) (rhs ?x))", 'its clause (source "...") is missing'),
        ('(rule r (source "s") (evidence hope) (lhs (neg ?x)) (rhs ?x))', "evidence must be"),
        ('(rule r (source "s") (rhs))', "one or two roots"),
        (
            '(rule r (source "s") (lhs (neg ?x) (neg ?y)) (rhs ?x ?y))',
            "two roots must share an operand",
        ),
        (
            '(rule r (source "s") (symmetric) (lhs (neg ?x) (exp ?x)) (rhs ?x ?x))',
            "only two equal patterns",
        ),
        ("(law r)", "expected (rule ...) or (define ...)"),
        ("(each op (add) (law r))", "a repetition must be (each $OP (NAME ...) FORM ...)"),
    ],
)
def test_a_wrong_rule_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(RuleError) as error:
        parse_rules(text, "my.rules")
    assert message in str(error.value)
    assert str(error.value).startswith("my.rules:1:1:")


def test_two_rules_of_one_name_are_refused() -> None:
    rule = '(rule r (source "s") (lhs (neg ?x)) (rhs ?x))'
    with pytest.raises(RuleError, match=r"<rules>:2:1: two rules have the name 'r'"):
        parse_rules(f"{rule}\n{rule}")
