"""The experiment on languages of terms: reading cases, checking results, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import geb
from experiments.geb import Result, Settings, summary, table
from experiments.geb_cases import Case, CaseError, drawn, parsed, read, same_values
from xrl_jax.language.rule_files import load_language
from xrl_jax.language.terms import Expression, parse_expression

MATH, PROP = load_language("math"), load_language("prop")


def test_expressions_are_read_from_calls() -> None:
    assert parsed("Add(x=Sin(x='y'), y=-1)") == ("+", ("sin", "y"), -1.0)
    assert parsed("Or(x=Not(x=True), y='a')") == ("|", ("~", 1.0), "a")
    with pytest.raises(ValueError, match="open"):
        parsed("open('file')")


FILE = """lang,i,solver,steps,final_cost,best,enodes,stop,expr
MathLang,0,egg,62,7.0,7.0,536,NODE_LIMIT,"Div(x=Sin(x=0), y=Sqrt(x=2))"
MathLang,0,om,5,6.0,7.0,1011,NODE_LIMIT,"Div(x=Sin(x=0), y=Sqrt(x=2))"
PropLang,3,egg,9,2.0,2.0,500,NODE_LIMIT,"Not(x=Not(x='a'))"
"""


def test_a_file_has_several_costs_of_a_case(tmp_path: Path) -> None:
    (tmp_path / "costs.csv").write_text(FILE)
    first, second = read(tmp_path / "costs.csv")
    assert (first.language, first.published) == ("math", {"egg": 7.0, "om": 6.0})
    assert (second.name, second.expression) == ("3", ("~", ("~", "a")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE.replace("PropLang", "TaxLang"), "line 4: cannot read 'TaxLang'"),
        (FILE.replace("7.0,7.0", "cheap,7.0"), "line 2: cannot read could not convert"),
        ("lang,i,solver,final_cost,expr\n", "has no cases"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "costs.csv").write_text(text)
    with pytest.raises(CaseError, match=message):
        read(tmp_path / "costs.csv")


@pytest.mark.parametrize(
    ("one", "other", "language", "same"),
    [
        ("(+ x x)", "(* 2 x)", MATH, True),
        ("(+ x x)", "(* x x)", MATH, False),
        ("(d x x)", "1", MATH, None),
        ("(/ 1 0)", "3", MATH, None),
        ("(-> a b)", "(| (~ a) b)", PROP, True),
        ("(-> a b)", "(| a (~ b))", PROP, False),
        ("true", "(| a (~ a))", PROP, True),
    ],
)
def test_results_are_checked_by_values(one, other, language, same) -> None:
    a, b = (parse_expression(text, language) for text in (one, other))
    assert same_values(a, b, language) is same


def test_random_expressions_are_the_same_for_the_same_seed() -> None:
    assert drawn(PROP, 3) == drawn(PROP, 3) != drawn(PROP, 4)


def result(name: str, egg: float, turns: float, restarts: tuple[float, ...]) -> Result:
    costs = {"turns": (turns,), "backoff": (9.0,), "mcts": (5.0, 7.0), "restarts": restarts}
    return Result(Case("math", name, "x", {"egg": egg}), costs, 1.25, "values")


def test_the_table_has_a_row_for_each_case_and_sums() -> None:
    lines = table([result("0", 8, 8, (1.0, 1.0)), result("1", 9, 7, (2.0, 4.0))]).splitlines()
    assert lines[2] == "| math 0 | 8 | 8 | 9 | 6.0 ± 1.4 | 1 | 1.2 | values |"
    assert lines[4] == "| math: sum of 2 | 17 | 15 | 18 | 12.0 ± 2.8 | 4.0 ± 1.4 |  |  |"


def test_the_summary_names_cases_dearer_than_eggs() -> None:
    text = summary([result("0", 8, 8, (1.0, 1.0)), result("1", 3, 3, (2.0, 4.0))])
    assert "largest gain over plain saturation: 8.0 times (math 0: 8 -> 1)" in text
    assert "published cost on 2 of 2 cases" in text
    assert "dearer than egg's: math 1" in text


def test_one_case_by_all_searches(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case("math", "0", parsed("Mul(x=Add(x='y', y=0), y=Cos(x=1))"), {"egg": 3.0})
    assert geb.run([case], Settings(100, 20, 20.0, 2), lambda _: None) == 1
    assert "| math 0 | 3 | 4 | 4 | 4 | 4 |" in capsys.readouterr().out


def test_a_case_that_is_too_large_does_not_end_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    large: Expression = 0.0
    for k in range(600):
        large = ("+", large, float(k))
    told: list[str] = []
    cases = [Case("math", "large", large), Case("math", "small", ("sin", 0.0), {"egg": 2.0})]
    assert geb.run(cases, Settings(50, 3, 20.0, 1), told.append) == 1
    assert any("error: math large: an expression is nested too deeply" in line for line in told)
    assert "| math small | 2 |" in capsys.readouterr().out
