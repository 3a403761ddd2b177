"""What patterns and terms of a rule language are made of: operators, and how numbers are written.

The rule language is one for tensors and for terms. Nodes of a tensor graph have attributes, and
their conditions are `bytecode`. A node of a term is an operator with arguments, a number or a
symbol; its conditions are guards:

    (number ?x)      a number is known to equal ?x
    (symbol ?x)      a symbol is known to equal ?x
    (nonzero ?x)     ?x is not known to equal zero
    (differ ?x ?y)   ?x and ?y are not known to be equal
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from xrl_jax.graph import ops
from xrl_jax.language.sexpr import RuleError, SExpr, SList, symbol

NUMBER, SYMBOL, ANY = "number", "symbol", "any"  # the leaves of terms; any: a root that is ?x
LEAVES = (NUMBER, SYMBOL, ANY)  # not written as operators
GUARDS: Mapping[str, int] = {NUMBER: 1, SYMBOL: 1, "nonzero": 1, "differ": 2}  # with their arity


@dataclass(frozen=True)
class Vocabulary:
    """The operators of a rule language.

    Attributes:
      operators: by name.
      constants: names of numbers, such as true; of terms only.
      of_terms: whether nodes are terms, not tensors.
    """

    operators: Mapping[str, ops.OpSpec]
    constants: Mapping[str, float] = field(default_factory=dict)
    of_terms: bool = False


def tensors() -> Vocabulary:
    """Return the operators of tensor graphs."""
    return Vocabulary(ops.OPS)


def check_guard(e: SExpr, bound: Collection[str]) -> None:
    """Refuse a condition on terms that is no guard.

    Raises:
      RuleError: it is none, or names a variable that is not bound.
    """
    if not isinstance(e, SList) or GUARDS.get(e.head) != len(e.items) - 1:
        known = ", ".join(f"({g} {' '.join('?x ?y'.split()[:n])})" for g, n in GUARDS.items())
        raise RuleError(f"a condition on terms is one of {known}", e.place)
    for name in e.items[1:]:
        if symbol(name) not in bound:
            raise RuleError(f"{symbol(name)!r} is not bound on the left-hand side", name.place)
