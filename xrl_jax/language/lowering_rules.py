"""Rules that choose lowerings, one for each row of `lower.table`, such as `conv-as-matmul`.

They change no operator; the row's conditions say where its lowering is valid. They lead from the
plain lowering to any other, and from any other to the plain one.
"""

from __future__ import annotations

from xrl_jax.graph import ops
from xrl_jax.language.rule import Pattern, Rule, Term, Var
from xrl_jax.language.sexpr import read
from xrl_jax.lower.table import CHOICES, LOWERINGS

_FROM_PLAIN, _TO_PLAIN = read("(= (lowering d) 0) (/= (lowering d) 0)", "<lowerings>")
FAMILY = "lowering"  # followed by the operator: lowering_conv, lowering_dot, ...


def lowering_rules() -> tuple[Rule, ...]:
    """Return a rule for each lowering of each operator that has several."""
    return tuple(lowering_rule(op, i) for op, i in CHOICES)


def lowering_rule(op: str, number: int) -> Rule:
    """Return the rule that chooses lowering `number` of an operator."""
    row = LOWERINGS[op][number]
    args = tuple(Var(f"?{k}") for k in range(ops.OPS[op].arity[0]))
    return Rule(
        name_of_rule(op, row.name),
        f"{FAMILY}_{op}",
        row.source or "derived",
        "float64",
        (Pattern(op, args, name="d"),),
        (Term(op, args, like="d", lowering=row.name),),
        (_FROM_PLAIN if number else _TO_PLAIN,),
    )


def name_of_rule(op: str, lowering: str) -> str:
    """Return the name of the rule that chooses a lowering of an operator."""
    return f"{op}-as-{lowering.replace('_', '-')}"
