"""Rewrite rules as data; `rule_parser` documents their text form.

Roles:

    fold-into-weights   folds a scale, a shift or a bias into weights
    sink-broadcast      moves a broadcast down past an operator, which then works on the small array
    to-bias-or-scale    replaces subtraction of or division by a vector by addition, multiplication
    to-features-last    converts an operator on images to features last, between transposes
    transpose-product   replaces x·w by the transpose of w·x
    sink-transpose      moves a transpose down past an operator
    cancel-transpose    merges two transposes into one, or removes one that changes nothing
    absorb-transpose    merges a transpose into the operator that reads it
    merge-siblings      merges operators that read the same operand into one, and slices its result
    join-slices         computes on a whole array what was computed on its slices, or removes slices
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from xrl_jax.language.sexpr import Place, SExpr

EVIDENCE = ("field", "maxplus", "exp", "float64")
# Assumptions that a user may allow: that all values are finite and in range, and that calls stay in
# the domain of a result, which is then not checked (`backends.domain`).
ASSUMPTIONS = ("finite", "in-domain")
# What a rule may assume: that all values are finite and in range, or only that its operands are
# finite, as they are inside the domain of some programs.
RULE_ASSUMPTIONS = ("finite", "finite-operands")
# Roles by which a search selects rules (`search.starting_points`); a rule may have several.
Role = Literal[
    "fold-into-weights",
    "sink-broadcast",
    "to-bias-or-scale",
    "to-features-last",
    "transpose-product",
    "sink-transpose",
    "cancel-transpose",
    "absorb-transpose",
    "merge-siblings",
    "join-slices",
]
ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True)
class Var:
    """A pattern variable; matches any node."""

    name: str


@dataclass(frozen=True)
class Pattern:
    """An operator with sub-patterns; `attrs` are (field, number or name) pairs. `value` is that of
    a number in a pattern of terms.
    """

    op: str
    args: tuple[Pattern | Var, ...]
    attrs: tuple[tuple[str, int | str], ...] = ()
    name: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Term:
    """A node of the right-hand side; `attrs` are (field, expression) pairs."""

    op: str
    args: tuple[Term | Var, ...]
    like: str = ""
    attrs: tuple[tuple[str, SExpr], ...] = ()
    lowering: str = (
        ""  # chosen for an unchanged node; "" keeps that of `like` where it is still valid
    )
    value: float = 0.0
    dtype_of: str = ""


@dataclass(frozen=True)
class Rule:
    """A rewrite rule; see `rule_parser` for the meaning of the parts."""

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
        """The operator and the lowering that the rule chooses for its root, or None."""
        term = self.rhs[0]
        if isinstance(term, Term) and term.lowering:
            return term.op, term.lowering
        return None


def pattern_text(patterns: Sequence[Pattern | Var]) -> str:
    """Return the text of patterns with variables renamed, numbered in order of appearance."""
    names: dict[str, str] = {}

    def show(t: Pattern | Var) -> str:
        if isinstance(t, Var):
            return names.setdefault(t.name, f"v{len(names)}")
        return f"({t.op} {' '.join(show(a) for a in t.args)} {t.attrs})"

    return " | ".join(show(p) for p in patterns)
