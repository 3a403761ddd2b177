"""Languages of terms: what a file may say, and expressions."""

from __future__ import annotations

import pytest

from xrl_jax.language.rule_files import load_language
from xrl_jax.language.sexpr import RuleError
from xrl_jax.language.terms import expression_text, parse_expression, parse_language

SETS = """
(language sets)
(source "algebra of sets")
(operators (union 2) (minus 2))
(constants (empty 0))
(rule union-self (lhs (union ?a ?a)) (rhs ?a))
(rule minus-self (lhs (minus ?a ?a)) (rhs empty))
(rule grow (lhs ?a) (when (symbol ?a)) (rhs (union ?a ?a)))
"""


def test_a_language_has_operators_constants_and_rules():
    sets = parse_language(SETS)
    assert sets.name == "sets"
    assert [r.name for r in sets.rules] == ["union-self", "minus-self", "grow"]
    assert sets.rules[0].source == "algebra of sets"
    assert sets.vocabulary.constants == {"empty": 0.0}


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "(union x empty)",
        "(minus (union a b) 2.5)",
        "(union nan 16777215)",
        "(union 0.1 -1e-07)",
    ],
)
def test_an_expression_is_read_as_it_is_written(text):
    sets = parse_language(SETS)
    assert expression_text(parse_expression(text, sets), sets) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(union x)", "1:1: union takes 2 arguments, got 1"),
        ("(cut x y)", "1:1: there is no operator 'cut' .there are: union, minus"),
        ("union", "1:1: union takes 2 arguments: write .union"),
        ("x y", "expected one expression, found 2"),
    ],
)
def test_an_expression_that_is_none_is_refused(text, message):
    with pytest.raises(RuleError, match=message):
        parse_expression(text, parse_language(SETS))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("(rule r (lhs (cut ?a)) (rhs ?a))", "there is no operator 'cut'"),
        ("(rule r (lhs (union ?a ?b)) (rhs ?c))", "'.c' is not bound"),
        ("(rule r (lhs (union ?a ?b)) (when (even ?a)) (rhs ?a))", "is one of .number .x"),
        ("(rule r (lhs (union ?a ?b)) (when (symbol ?c)) (rhs ?a))", "'.c' is not bound"),
        ("(rule union-self (lhs (union ?a ?b)) (rhs ?a))", "two rules have the name"),
        ("(operators (cut 3))", "with up to 2 arguments"),
        ("(operators (cut 1 :fold add))", ":fold takes neg, not for 1 arguments"),
        ("(operators (any 1))", "any cannot be the name of an operator"),
        ("(constants (one two))", "a constant is .NAME NUMBER"),
        ("(sorts a b)", "cannot read .sorts"),
        ("hello", "found 'hello'"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused_with_its_place(form, message):
    with pytest.raises(RuleError, match=message) as refused:
        parse_language(SETS + form, "sets.rules")
    assert str(refused.value).startswith("sets.rules:9:")


def test_a_language_needs_a_name():
    with pytest.raises(RuleError, match=r"does not say \(language NAME\)"):
        parse_language("(operators (f 1))")


def test_an_unknown_language_is_refused_with_those_that_there_are():
    with pytest.raises(FileNotFoundError, match=r"no language file lambda \(languages: math, prop"):
        load_language("lambda")


def test_a_language_is_read_from_a_file(tmp_path):
    (tmp_path / "sets.rules").write_text(SETS, encoding="utf-8")
    assert load_language(tmp_path / "sets.rules").name == "sets"
