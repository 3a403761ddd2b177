"""The rules of the languages of terms are true: in logic for all truth values, in mathematics for
functions of one variable and their derivatives and integrals, computed with JAX.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.language.rule import Pattern, Rule, Term, Var
from xrl_jax.language.rule_files import load_language
from xrl_jax.language.sexpr import SList, symbol
from xrl_jax.language.vocabulary import ANY, NUMBER

MATH, PROP = load_language("math"), load_language("prop")
Function = Callable[[jax.Array], jax.Array]

LOGIC = {"&": min, "|": max, "~": lambda a: 1 - a, "->": lambda a, b: max(1 - a, b)}


def variable(t: Pattern | Term | Var) -> str:
    """Return the name of a variable, which may be the whole left-hand side; "" for others."""
    if isinstance(t, Pattern) and t.op == ANY:
        return t.name
    return t.name if isinstance(t, Var) else ""


def truth(t: Pattern | Term | Var, given: Mapping[str, float]) -> float:
    if variable(t):
        return given[variable(t)]
    assert not isinstance(t, Var)
    if t.op == NUMBER:
        assert t.value is not None
        return t.value
    return LOGIC[t.op](*(truth(a, given) for a in t.args))


@pytest.mark.parametrize("rule", PROP.rules, ids=lambda r: r.name)
def test_rules_of_logic_hold_for_all_truth_values(rule):
    for values in itertools.product((0.0, 1.0), repeat=3):
        given: dict[str, float] = dict(zip(["?a", "?b", "?c"], values, strict=True))
        assert truth(rule.lhs[0], given) == truth(rule.rhs[0], given)


POINTS, WEIGHTS = np.polynomial.legendre.leggauss(24)
MATHEMATICS: dict[str, Callable[..., jax.Array]] = {
    "+": jnp.add,
    "-": jnp.subtract,
    "*": jnp.multiply,
    "/": jnp.divide,
    "pow": lambda a, b: a**b,
    "ln": jnp.log,
    "sqrt": jnp.sqrt,
    "sin": jnp.sin,
    "cos": jnp.cos,
}


def derivative(f: Function) -> Function:
    return jax.grad(f)


def integral(f: Function) -> Function:
    """Return the integral from 1 by Gauss-Legendre quadrature."""

    def value(x: jax.Array) -> jax.Array:
        at = 1 + (x - 1) * (POINTS + 1) / 2
        return (x - 1) / 2 * sum(w * f(a) for w, a in zip(WEIGHTS, at, strict=True))

    return value


def function(t: Pattern | Term | Var, given: dict[str, Function]) -> Function:
    """Return what a pattern or term stands for, as a function of x."""
    if variable(t):
        return given[variable(t)]
    assert not isinstance(t, Var)
    if t.op == NUMBER:
        assert t.value is not None
        value = t.value
        return lambda x: jnp.full_like(x, value)
    if t.op == "d":
        return derivative(function(t.args[1], given))
    if t.op == "i":
        return integral(function(t.args[0], given))
    args = [function(a, given) for a in t.args]
    return lambda x: MATHEMATICS[t.op](*(f(x) for f in args))


def meaning(rule: Rule) -> dict[str, Function]:
    """Return functions for the variables: positive ones, or numbers where the rule needs them."""
    functions: list[Function] = [
        lambda x: jnp.sin(x) + 2,
        lambda x: x * x + 0.5,
        lambda x: jnp.exp(-x) + 1,
    ]
    names = ["?a", "?b", "?c", "?f", "?g"]
    given = {n: functions[i % 3] for i, n in enumerate(names)}
    for guard in rule.conditions:
        assert isinstance(guard, SList)
        if guard.head == "number":
            given[symbol(guard.items[1])] = lambda x: jnp.full_like(x, 3.0)
    return given | {"?x": lambda x: x, "?y": lambda x: jnp.full_like(x, 0.7)}


@pytest.mark.parametrize("rule", MATH.rules, ids=lambda r: r.name)
def test_rules_of_mathematics_hold_for_functions(rule):
    """Integrals are compared by their derivatives: they have a constant of their own."""
    given = meaning(rule)
    with jax.enable_x64(True):
        one, other = (function(t, given) for t in (rule.lhs[0], rule.rhs[0]))
        if rule.lhs[0].op == "i":
            one, other = derivative(one), derivative(other)
        for x in (0.6, 1.3, 1.9):
            a, b = (float(f(jnp.float64(x))) for f in (one, other))
            assert a == pytest.approx(b, rel=1e-9, abs=1e-9)
