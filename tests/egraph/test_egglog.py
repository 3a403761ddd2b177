"""Saturation of terms grows e-graphs as egglog does (Zhang et al., PLDI 2023).

egglog is compiled from Rust and comes with the extra `egglog`; without it these tests are skipped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.egraph.test_saturate import MATH, PROP, random_expression
from xrl_jax.egraph.limits import Limits
from xrl_jax.egraph.term_saturation import Schedule, saturate_terms
from xrl_jax.language.rule import Pattern, Rule, Term, Var
from xrl_jax.language.terms import Expression, Language
from xrl_jax.language.vocabulary import ANY, NUMBER

bindings = pytest.importorskip("egglog.bindings", reason="pip install xrl_jax[egglog]")


class Egglog:
    """An e-graph of egglog; `Is` holds its classes. Operators are named by their position."""

    def __init__(self, language: Language, rules: Sequence[Rule], first: Sequence[Expression]):
        operators = language.vocabulary.operators
        self.name = {op: f"Op{n}" for n, op in enumerate(operators)}
        self.egraph = bindings.EGraph()
        arity = {op: operators[op].arity[0] for op in operators if op not in ("symbol", NUMBER)}
        kinds = [f"({self.name[op]}{' E' * n})" for op, n in arity.items()]
        self.run(f"(datatype E (Symbol String) (Number f64) {' '.join(kinds)})")
        self.run("(ruleset counting) (relation Is (E))")
        for head in ["Symbol a", "Number a"] + [
            " ".join([self.name[op], *"abc"[:n]]) for op, n in arity.items()
        ]:
            self.run(f"(rule ((= e ({head}))) ((Is e)) :ruleset counting)")
        for rule in rules:
            self.run(f"(rewrite {self.pattern(rule.lhs[0])} {self.pattern(rule.rhs[0])})")
        for e in first:
            self.run(self.expression(e))

    def run(self, text: str) -> list:
        return self.egraph.run_program(*self.egraph.parse_program(text))

    def pattern(self, p: Pattern | Term | Var) -> str:
        if isinstance(p, Var):
            return p.name.removeprefix("?")
        if p.op == NUMBER:
            return f"(Number {p.value})"
        return f"({' '.join([self.name[p.op], *map(self.pattern, p.args)])})"

    def expression(self, e: Expression) -> str:
        if isinstance(e, tuple):
            op, *args = e
            return f"({' '.join([self.name[str(op)], *map(self.expression, args)])})"
        return f'(Symbol "{e}")' if isinstance(e, str) else f"(Number {e})"

    def counts(self) -> tuple[int, int]:
        """Return the numbers of e-nodes and classes."""
        self.run("(run counting 1)")
        sizes = dict(self.run("(print-size)")[0].sizes)
        classes = sizes.pop("Is")
        return sum(sizes.values()), classes


@pytest.mark.parametrize("language", [MATH, PROP], ids=lambda language: language.name)
@pytest.mark.parametrize("seed", range(5))
def test_enodes_and_classes_are_those_of_egglog(language, seed):
    """Ten pairs of expressions, with random rules that have no guards, for three iterations."""
    draw = random.Random(seed)
    plain = [r for r in language.rules if not r.conditions and r.lhs[0].op != ANY]
    expressions = [random_expression(draw, language, 4) for _ in range(2)]
    rules = draw.sample(plain, 10)
    found = saturate_terms(
        expressions,
        language,
        rules,
        limits=Limits(iterations=3, nodes=2000),
        schedule=Schedule.ALL,
        folding=False,
    )
    egglog = Egglog(language, rules, expressions)
    for iteration in found.iterations:
        egglog.run("(run 1)")
        assert egglog.counts() == (iteration.nodes, iteration.classes)
