"""The verifier finds rules that hold for real numbers but not for floats, each by one kind of
special value.
"""

from __future__ import annotations

import pytest

from xrl_jax.language.rule_files import load_rules
from xrl_jax.verify.verify import verify_rules

BREAKING = {
    "NaN": "(lhs (max (sqrt ?x) (sqrt ?y))) (rhs (sqrt (max ?x ?y)))",
    "inf": "(lhs (sub (mul ?x ?x) (mul ?y ?y))) (rhs (mul (add ?x ?y) (sub ?x ?y)))",
    "numbers near 1e30": "(lhs (mul (exp ?x) (exp ?y))) (rhs (exp (add ?x ?y)))",
    "numbers near 1e-12": "(lhs (expm1 ?x)) (rhs (sub (exp ?x) (const 1 :dtype-of ?x)))",
    "a mean of 1e3": "(lhs (square (sub ?x ?y))) "
    "(rhs (sub (add (square ?x) (square ?y)) (mul (add ?x ?x) ?y)))",
}


@pytest.mark.parametrize("kind", BREAKING)
def test_broken_special_values_are_named(kind: str) -> None:
    text = f'(rule r (source "s") (evidence float64) {BREAKING[kind]})'
    if kind == "NaN":
        text = text.replace("float64", "maxplus")
    (verdict,) = verify_rules(load_rules(text), samples=24)
    assert verdict.ok and verdict.breaks.startswith("with ")
    assert " became " in verdict.breaks


@pytest.mark.parametrize(
    "body",
    [
        "(lhs (neg (sub ?x ?y))) (rhs (sub ?y ?x))",
        "(lhs (max (exp ?x) (exp ?y))) (rhs (exp (max ?x ?y)))",
        "(lhs (transpose (tanh ?x) :perm p)) (rhs (tanh (transpose ?x :perm p)))",
    ],
    ids=["sub", "max", "transpose"],
)
def test_rules_that_keep_special_values_break_nothing(body: str) -> None:
    evidence = "maxplus" if "max" in body else "field"
    (verdict,) = verify_rules(
        load_rules(f'(rule r (source "s") (evidence {evidence}) {body})'), samples=24
    )
    assert verdict.ok and verdict.breaks == ""
