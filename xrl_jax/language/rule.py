"""Rewrite rules as data; `rule_parser` says how they are written.

Roles:

    fold-into-weights   a scale, a shift or a bias goes into weights
    sink-broadcast      a broadcast moves down past an operator, which then works on the small array
    to-bias-or-scale    a vector that is subtracted or divided by is added or multiplied by instead
    to-features-last    an operator on images works features last, between transposes
    transpose-product   x·w becomes (w·x) transposed
    sink-transpose      a transpose moves down, past an operator
    cancel-transpose    two transposes become one, or one that changes nothing goes
    absorb-transpose    a transpose goes into the operator that reads it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from xrl_jax.language.sexpr import Place, SExpr

EVIDENCE = ("field", "maxplus", "exp", "float64")
# What may be taken for granted: that all values are finite and in range, and that calls stay in the
# domain of a result, which then need not be looked at (`backends.domain`).
ASSUMPTIONS = ("finite", "in-domain")
# What a search may ask for (`search.starting_points`); a rule may have several.
Role = Literal[
    "fold-into-weights",
    "sink-broadcast",
    "to-bias-or-scale",
    "to-features-last",
    "transpose-product",
    "sink-transpose",
    "cancel-transpose",
    "absorb-transpose",
]
ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True)
class Var:
    """A pattern variable; matches any node."""

    name: str


@dataclass(frozen=True)
class Pattern:
    """An operator with sub-patterns; `attrs` are (field, number or name) pairs."""

    op: str
    args: tuple[Pattern | Var, ...]
    attrs: tuple[tuple[str, int | str], ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Term:
    """A node of the right-hand side; `attrs` are (field, expression) pairs."""

    op: str
    args: tuple[Term | Var, ...]
    like: str = ""
    attrs: tuple[tuple[str, SExpr], ...] = ()
    lowering: str = (
        ""  # chosen for a node as it is; "" is `like`'s where that is as right as it was
    )
    value: float = 0.0
    dtype_of: str = ""


@dataclass(frozen=True)
class Rule:
    """A rewrite rule; see the module docstring for the meaning of the parts."""

    name: str
    family: str
    source: str
    evidence: str
    lhs: tuple[Pattern, ...]
    rhs: tuple[Term | Var, ...]
    conditions: tuple[SExpr, ...] = ()
    lets: tuple[tuple[str, SExpr], ...] = ()
    nodes: tuple[tuple[str, Term], ...] = ()
    symmetric: bool = False
    assumes: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    place: Place | None = field(default=None, compare=False)

    @property
    def lowering(self) -> tuple[str, str] | None:
        """The operator and the lowering that the rule chooses for its root; None for others."""
        term = self.rhs[0]
        if isinstance(term, Term) and term.lowering:
            return term.op, term.lowering
        return None


def shape_text(patterns: Sequence[Pattern | Var]) -> str:
    """Text of patterns up to names, variables numbered in order of appearance."""
    names: dict[str, str] = {}

    def show(t: Pattern | Var) -> str:
        if isinstance(t, Var):
            return names.setdefault(t.name, f"v{len(names)}")
        return f"({t.op} {' '.join(show(a) for a in t.args)} {t.attrs})"

    return " | ".join(show(p) for p in patterns)
