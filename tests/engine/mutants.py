"""Wrong rules, made from right ones by small mechanical changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from xrl_jax.graph import ops
from xrl_jax.language.rule import Rule, Term, Var
from xrl_jax.language.sexpr import Atom, SExpr, SList

_OTHER_OP = {
    "add": "sub", "sub": "add", "mul": "add", "div": "mul", "max": "min", "min": "max",
    "neg": "abs", "reduce_sum": "reduce_max", "reduce_max": "reduce_min",
    "window_sum": "window_max", "window_max": "window_min",
}  # fmt: skip
_OTHER_FUNCTION = {
    "+": "-",
    "-": "+",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "and": "or",
    "or": "and",
    "*": "+",
}


@dataclass(frozen=True)
class Mutant:
    """A changed rule and what was changed."""

    rule: Rule
    kind: str
    change: str


def mutants_of(rule: Rule) -> Iterator[Mutant]:
    """Yield all mutants of a rule, named after it."""
    count = 0
    for kind, change, made in _changes(rule):
        if made != rule:
            yield Mutant(replace(made, name=f"{rule.name}~{count}"), kind, change)
            count += 1


def _changes(rule: Rule) -> Iterator[tuple[str, str, Rule]]:
    for i, e in enumerate(rule.conditions):
        rest = (*rule.conditions[:i], *rule.conditions[i + 1 :])
        yield "dropped condition", text(e), replace(rule, conditions=rest)
    for i, e in enumerate(rule.conditions):
        for change, other in _expressions(e):
            rest = (*rule.conditions[:i], other, *rule.conditions[i + 1 :])
            yield "wrong condition", change, replace(rule, conditions=rest)
    for i, (name, e) in enumerate(rule.lets):
        for change, other in _expressions(e):
            lets = (*rule.lets[:i], (name, other), *rule.lets[i + 1 :])
            yield "wrong number", change, replace(rule, lets=lets)
    for kind, change, rebuild in _terms(rule):
        yield kind, change, rebuild
    if len(rule.rhs) == 2:
        yield "swapped results", "", replace(rule, rhs=rule.rhs[::-1])


def _expressions(e: SExpr) -> Iterator[tuple[str, SExpr]]:
    """Yield the expression with one number or function changed."""
    if isinstance(e, Atom):
        if e.text.lstrip("-").isdigit():
            yield f"{e.text} to {int(e.text) + 1}", replace(e, text=str(int(e.text) + 1))
        return
    if e.head in _OTHER_FUNCTION:
        other = _OTHER_FUNCTION[e.head]
        yield (
            f"{e.head} to {other} in {text(e)}",
            SList((replace(e.items[0], text=other), *e.items[1:]), e.place),
        )  # type: ignore[call-arg]
    if e.head in ("vec", "is-value", "attr", "weight-only", "shape", "rank", "dtype"):
        return
    for i, item in enumerate(e.items[1:], 1):
        for change, other in _expressions(item):
            yield change, SList((*e.items[:i], other, *e.items[i + 1 :]), e.place)


def _terms(rule: Rule) -> Iterator[tuple[str, str, Rule]]:
    for i, t in enumerate(rule.rhs):
        for kind, change, other in _changed(t):
            yield kind, change, replace(rule, rhs=(*rule.rhs[:i], other, *rule.rhs[i + 1 :]))
    for i, (name, t) in enumerate(rule.nodes):
        for kind, change, other in _changed(t):
            if isinstance(other, Term):
                nodes = (*rule.nodes[:i], (name, other), *rule.nodes[i + 1 :])
                yield kind, change, replace(rule, nodes=nodes)


def _changed(t: Term | Var) -> Iterator[tuple[str, str, Term | Var]]:
    if isinstance(t, Var):
        return
    if t.op == "const":
        yield "wrong constant", f"{t.value} to {t.value + 1}", replace(t, value=t.value + 1)
        return
    if len(t.args) >= 2 and t.args[0] != t.args[1] and not ops.OPS[t.op].commutative:
        swapped = (t.args[1], t.args[0], *t.args[2:])
        yield "swapped operands", t.op, replace(t, args=swapped)
    if t.op in _OTHER_OP:
        other = _OTHER_OP[t.op]
        if ops.OPS[other].fields == ops.OPS[t.op].fields:
            yield "wrong operator", f"{t.op} to {other}", replace(t, op=other)
    if t.args:
        yield "dropped operator", t.op, t.args[0]
    for i, (key, e) in enumerate(t.attrs):
        yield "dropped attribute", key, replace(t, attrs=(*t.attrs[:i], *t.attrs[i + 1 :]))
        for change, other in _expressions(e):
            attrs = (*t.attrs[:i], (key, other), *t.attrs[i + 1 :])
            yield "wrong attribute", f"{key}: {change}", replace(t, attrs=attrs)
    for i, a in enumerate(t.args):
        for kind, change, other in _changed(a):
            yield kind, change, replace(t, args=(*t.args[:i], other, *t.args[i + 1 :]))


def text(e: SExpr) -> str:
    """Return the text of an expression."""
    return e.text if isinstance(e, Atom) else f"({' '.join(map(text, e.items))})"


def sample(rules: tuple[Rule, ...], n: int, keep: Callable[[Mutant], bool]) -> list[Mutant]:
    """Return `n` mutants, spread evenly over rules and changes."""
    every = [m for r in rules for m in mutants_of(r) if keep(m)]
    step = max(len(every) // n, 1)
    return every[::step][:n]
