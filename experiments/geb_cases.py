"""Expressions to simplify, with costs that others reached: those of a file, or random ones.

A file is CSV with the columns lang (MathLang or PropLang), i, solver, final_cost and expr, as
ucamrl/eqs writes its results. An expression is written as calls, such as
`Add(x=Sin(x=2), y=0)`, with symbols as strings.
"""

from __future__ import annotations

import ast
import csv
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from xrl_jax.language.terms import Expression, Language

LANGUAGES = {"MathLang": "math", "PropLang": "prop"}
OPERATORS = {
    **{"Diff": "d", "Integral": "i", "Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "Pow": "pow"},
    **{"Ln": "ln", "Sqrt": "sqrt", "Sin": "sin", "Cos": "cos"},
    **{"And": "&", "Not": "~", "Or": "|", "Implies": "->"},
}
_VALUES = 8  # assignments of numbers that two expressions are compared on
_MOST_SYMBOLS = 12  # of propositions that are compared on all assignments


class CaseError(ValueError):
    """A file that cannot be read; the message names the line."""


@dataclass
class Case:
    """An expression, and the costs that solvers reached on it."""

    language: str
    name: str
    expression: Expression
    published: dict[str, float] = field(default_factory=dict)


def read(path: Path) -> list[Case]:
    """Read the cases of a file, in its order.

    Raises:
      CaseError: a line cannot be read.
      OSError: there is no such file.
    """
    cases: dict[tuple[str, str], Case] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                language = LANGUAGES[row["lang"]]
                key = language, row["i"]
                if key not in cases:
                    cases[key] = Case(language, row["i"], parsed(row["expr"]))
                cases[key].published[row["solver"]] = float(row["final_cost"])
            except (KeyError, TypeError, ValueError, SyntaxError) as error:
                raise CaseError(f"{path}, line {number}: cannot read {error}") from None
    if not cases:
        raise CaseError(f"{path} has no cases")
    return list(cases.values())


def parsed(text: str) -> Expression:
    """Parse an expression written as calls.

    Raises:
      ValueError: it has anything else in it.
    """
    return _expression(ast.parse(text, mode="eval").body)


def _expression(e: ast.expr) -> Expression:
    match e:
        case ast.Constant(value=str(name)):
            return name
        case ast.Constant(value=bool() | int() | float() as value):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -float(value)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in OPERATORS:
            parts = [*args, *(k.value for k in keywords)]
            return (OPERATORS[name], *map(_expression, parts))
    raise ValueError(ast.unparse(e))


def drawn(language: Language, seed: int, *, depth: int = 5) -> Expression:
    """Draw an expression: an operator at random, with arguments of its own kind below it, as the
    generator of ucamrl/eqs does.
    """
    draw = random.Random(seed)
    arity = {
        n: s.arity[0] for n, s in language.vocabulary.operators.items() if n in OPERATORS.values()
    }
    leaves: list[Expression] = (
        [0.0, 1.0, 2.0] if language.name == "math" else ["a", "b", "c", "d", 0.0, 1.0]
    )

    def make(name: str, level: int) -> Expression:
        return (name, *(part(level) for _ in range(arity[name])))

    def part(level: int) -> Expression:
        if level >= depth or draw.random() < 0.4:
            return draw.choice(leaves)
        name = draw.choice(sorted(arity))
        return (name, *(make(name, level + 1) for _ in range(arity[name])))

    return make(draw.choice(sorted(arity)), 0)


# What operators mean, apart from how the languages compute them.
_MEANING: dict[str, Callable[..., np.ndarray]] = {
    **{"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide, "pow": np.power},
    **{"sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "ln": np.log},
    **{"&": np.minimum, "|": np.maximum, "~": lambda a: 1.0 - a},
    "->": lambda a, b: np.maximum(1.0 - a, b),
}


def same_values(a: Expression, b: Expression, language: Language) -> bool | None:
    """Return whether two expressions have the same values; None where that cannot be told, as for
    derivatives. Few symbols of propositions are compared on all assignments, others at random.
    """
    symbols = sorted(_symbols(a) | _symbols(b))
    if _operators(a) & {"d", "i"} or _operators(b) & {"d", "i"}:
        return None
    rng = np.random.default_rng(0)
    if language.name != "prop":
        values = rng.uniform(0.5, 2.0, (len(symbols), _VALUES))
    elif len(symbols) <= _MOST_SYMBOLS:
        values = np.array(list(itertools.product((0.0, 1.0), repeat=len(symbols)))).T
    else:
        values = rng.integers(0, 2, (len(symbols), 2**_MOST_SYMBOLS)).astype(np.float64)
    given = dict(zip(symbols, values, strict=True))
    with np.errstate(all="ignore"):
        x, y = np.broadcast_arrays(*(_value(e, given) for e in (a, b)))
    told = np.isfinite(x) & np.isfinite(y)
    return bool(np.allclose(x[told], y[told], 1e-6, 1e-9)) if told.any() else None


def _value(e: Expression, given: Mapping[str, np.ndarray]) -> np.ndarray:
    if isinstance(e, str):
        return given[e]
    if not isinstance(e, tuple):
        return np.asarray(e)
    return _MEANING[str(e[0])](*(_value(a, given) for a in e[1:]))


def _symbols(e: Expression) -> set[str]:
    if isinstance(e, str):
        return {e}
    return set().union(*map(_symbols, e[1:])) if isinstance(e, tuple) else set()


def _operators(e: Expression) -> set[str]:
    return {str(e[0])}.union(*map(_operators, e[1:])) if isinstance(e, tuple) else set()
