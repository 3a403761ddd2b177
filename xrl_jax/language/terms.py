"""Languages of terms, such as arithmetic or logic: operators and rules in one file.

    (language NAME)
    (source "WHERE FROM")                        that of the rules below
    (operators (NAME ARITY [:fold FUNCTION]) ...)
    (constants (NAME NUMBER) ...)                named numbers, such as true
    (rule NAME (lhs PATTERN) [(when GUARD ...)] (rhs TERM)) ...

Numbers stand for themselves, and the left-hand side may be a variable. For guards see
`vocabulary`, for everything else `rule_parser`. `:fold` names the function (`FOLDS`) that computes
an operator of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp

from xrl_jax.graph.ops import OpSpec
from xrl_jax.language.macros import Macros, define, repeated
from xrl_jax.language.rule import Rule
from xrl_jax.language.rule_parser import parse_rule
from xrl_jax.language.sexpr import Atom, RuleError, SExpr, SList, integer, number, read, symbol
from xrl_jax.language.vocabulary import LEAVES, Vocabulary

# A term: a number, the name of a symbol, or an operator and its arguments.
Expression = float | str | tuple["str | Expression", ...]
Fold = Callable[..., jax.Array]

# Functions of integers; NaN where nothing is known. Truth values are 0 and 1.
FOLDS: Mapping[str, Fold] = MappingProxyType(
    {
        "add": jnp.add,
        "sub": jnp.subtract,
        "mul": jnp.multiply,
        "div": lambda a, b: jnp.where((b != 0) & (a / b * b == a), a / b, jnp.nan),
        "neg": jnp.negative,
        "max": jnp.maximum,
        "min": jnp.minimum,
        "and": jnp.minimum,
        "or": jnp.maximum,
        "not": lambda a: 1 - a,
        "implies": lambda a, b: jnp.maximum(1 - a, b),
    }
)
FOLD_ARITY: Mapping[str, int] = MappingProxyType(
    {name: 1 if name in ("neg", "not") else 2 for name in FOLDS}
)
MAX_ARITY = 2


@dataclass(frozen=True)
class Language:
    """A language of terms.

    Attributes:
      folds: names in `FOLDS`, by operator.
    """

    name: str
    vocabulary: Vocabulary
    folds: Mapping[str, str]
    rules: tuple[Rule, ...]


def parse_language(text: str, file: str = "<language>") -> Language:
    """Parse a language.

    Raises:
      RuleError: a form is refused; the message has line and column of the culprit.
    """
    name, source = "", ""
    macros: dict[str, tuple[tuple[str, ...], SExpr]] = {}
    operators = {leaf: (0, "") for leaf in ("hole", *LEAVES)}
    constants: dict[str, float] = {}
    rules: list[Rule] = []
    vocabulary = _vocabulary(operators, constants)
    for form in repeated(read(text, file)):
        if isinstance(form, Atom):
            raise RuleError(f"expected a form such as (rule ...), found {form.text!r}", form.place)
        match form.head, form.items[1:]:
            case "language", (Atom() as given,):
                name = given.text
            case "source", (Atom() as given,):
                source = given.text
            case "operators", entries:
                operators |= dict(_operator(e) for e in entries)
            case "constants", entries:
                constants |= dict(_constant(e) for e in entries)
            case "define", _:
                defined, params, body = define(form)
                macros[defined] = (params, body)
            case "rule", _:
                rules.append(_rule(form, macros, vocabulary, source, rules))
            case _:
                raise RuleError(f"cannot read ({form.head} ...)", form.place)
        vocabulary = _vocabulary(operators, constants)
    if not name:
        raise RuleError(f"{file} does not say (language NAME)")
    folds = {op: fold for op, (_, fold) in operators.items() if fold}
    return Language(name, vocabulary, MappingProxyType(folds), tuple(rules))


def _vocabulary(
    operators: Mapping[str, tuple[int, str]], constants: Mapping[str, float]
) -> Vocabulary:
    specs = {
        name: OpSpec(name, code, (arity, arity))
        for code, (name, (arity, _)) in enumerate(operators.items())
    }
    return Vocabulary(MappingProxyType(specs), MappingProxyType(dict(constants)), of_terms=True)


def _rule(
    form: SList, macros: Macros, vocabulary: Vocabulary, source: str, before: Sequence[Rule]
) -> Rule:
    rule = parse_rule(form, macros, vocabulary, source=source)
    if any(r.name == rule.name for r in before):
        raise RuleError(f"two rules have the name {rule.name!r}", form.place)
    if len(rule.lhs) > 1:
        raise RuleError(f"rule {rule.name}: a rule of terms has one root", form.place)
    return rule


def _operator(e: SExpr) -> tuple[str, tuple[int, str]]:
    match e:
        case SList(items=(Atom() as name, Atom() as arity, *rest)):
            n = integer(arity.text)
            fold = symbol(rest[1]) if len(rest) == 2 and symbol(rest[0]) == ":fold" else ""
            if n is not None and 0 <= n <= MAX_ARITY and len(rest) in (0, 2):
                if rest and FOLD_ARITY.get(fold) != n:
                    known = ", ".join(f for f in FOLDS if FOLD_ARITY[f] == n) or "no function"
                    raise RuleError(f":fold takes {known} for {n} arguments", e.place)
                if name.text in LEAVES:
                    raise RuleError(f"{name.text} cannot be the name of an operator", e.place)
                return name.text, (n, fold)
    raise RuleError(
        f"an operator is (NAME ARITY) or (NAME ARITY :fold FUNCTION), with up to {MAX_ARITY} "
        "arguments",
        e.place,
    )


def _constant(e: SExpr) -> tuple[str, float]:
    if isinstance(e, SList) and len(e.items) == 2:
        value = number(e.items[1])
        if value is not None:
            return symbol(e.items[0]), value
    raise RuleError("a constant is (NAME NUMBER)", e.place)


def parse_expression(text: str, language: Language) -> Expression:
    """Parse a term, such as `(+ x (* 2 y))`; a name that is no operator is a symbol.

    Raises:
      RuleError: the text is no term of the language; the message has line and column.
    """
    forms = read(text, "<expression>")
    if len(forms) != 1:
        raise RuleError(f"expected one expression, found {len(forms)} in {text!r}")
    try:
        return _expression(forms[0], language.vocabulary)
    except RecursionError:
        raise RuleError("the expression is nested too deeply", forms[0].place) from None


def _expression(e: SExpr, vocabulary: Vocabulary) -> Expression:
    if isinstance(e, Atom):
        value = vocabulary.constants.get(e.text, number(e))
        spec = vocabulary.operators.get(e.text)
        if value is None and spec is not None:
            raise RuleError(f"{e.text} takes {spec.arity[0]} arguments: write ({e.text})", e.place)
        return symbol(e) if value is None else value
    spec = None if e.head in LEAVES else vocabulary.operators.get(e.head)
    if spec is None:
        known = ", ".join(n for n in list(vocabulary.operators)[1:] if n not in LEAVES)
        raise RuleError(f"there is no operator {e.head!r} (there are: {known})", e.place)
    if len(e.items) - 1 != spec.arity[0]:
        raise RuleError(
            f"{e.head} takes {spec.arity[0]} arguments, got {len(e.items) - 1}", e.place
        )
    return (e.head, *(_expression(a, vocabulary) for a in e.items[1:]))


def expression_text(e: Expression, language: Language) -> str:
    """Return the text of a term, which `parse_expression` reads."""
    if isinstance(e, str):
        return e
    if isinstance(e, tuple):
        return f"({' '.join([str(e[0]), *(expression_text(a, language) for a in e[1:])])})"
    names = {value: name for name, value in language.vocabulary.constants.items()}
    return names.get(e, str(int(e)) if e == int(e) else repr(e))
