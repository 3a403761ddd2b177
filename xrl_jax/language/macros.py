"""Macros and repetitions of rule files (see `rule_parser`): `(define (NAME PARAM ...) EXPRESSION)`,
and `(each $OP (NAME ...) FORM ...)`, which repeats the forms for every name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from xrl_jax.language.sexpr import Atom, RuleError, SExpr, SList, symbol

Macros = Mapping[str, tuple[tuple[str, ...], SExpr]]


def repeated(forms: Sequence[SExpr]) -> Iterator[SExpr]:
    """Yield the forms with every `(each $OP (NAME ...) FORM ...)` expanded."""
    for form in forms:
        if not isinstance(form, SList) or form.head != "each":
            yield form
            continue
        if (
            len(form.items) < 4
            or not isinstance(form.items[2], SList)
            or not symbol(form.items[1]).startswith("$")
        ):
            raise RuleError("a repetition must be (each $OP (NAME ...) FORM ...)", form.place)
        for name in form.items[2].items:
            yield from repeated(
                [_fill(f, symbol(form.items[1]), symbol(name)) for f in form.items[3:]]
            )


def _fill(e: SExpr, name: str, by: str) -> SExpr:
    if isinstance(e, Atom):
        return Atom(e.text.replace(name, by), e.place, e.quoted)
    return SList(tuple(_fill(i, name, by) for i in e.items), e.place)


def define(form: SList) -> tuple[str, tuple[str, ...], SExpr]:
    if len(form.items) != 3 or not isinstance(form.items[1], SList) or not form.items[1].head:
        raise RuleError("a macro must be (define (NAME PARAM ...) EXPRESSION)", form.place)
    names = [symbol(i) for i in form.items[1].items]
    return names[0], tuple(names[1:]), form.items[2]


def expand(e: SExpr, macros: Macros) -> SExpr:
    """Return the expression with its macros expanded."""
    if isinstance(e, Atom):
        return e
    items = tuple(expand(i, macros) for i in e.items)
    if e.head not in macros:
        return SList(items, e.place)
    params, body = macros[e.head]
    if len(items) - 1 != len(params):
        raise RuleError(
            f"macro {e.head} takes {len(params)} arguments, got {len(items) - 1}", e.place
        )
    return expand(_substitute(body, dict(zip(params, items[1:], strict=True))), macros)


def _substitute(e: SExpr, by: Mapping[str, SExpr]) -> SExpr:
    if isinstance(e, Atom):
        return by.get(e.text, e)
    return SList(tuple(_substitute(i, by) for i in e.items), e.place)
