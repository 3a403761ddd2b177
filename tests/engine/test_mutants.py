"""Mutants: rules changed mechanically. The verifier must refuse every mutant that is wrong.

A mutant that survives is verified again with many more samples, and also with the evidence of
double precision. If only the latter refutes it, the verifier has a hole. A mutant that survives
both is equivalent to its rule: the change concerns a condition that only says when the rule pays, a
condition that the types of the result imply, or lanes that are never read.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

from xrl_jax.language.rule_files import standard_rules
from xrl_jax.verify.verify import verify_rules

_spec = importlib.util.spec_from_file_location("mutants", Path(__file__).with_name("mutants.py"))
assert _spec is not None and _spec.loader is not None
mutants = importlib.util.module_from_spec(_spec)
sys.modules["mutants"] = mutants
_spec.loader.exec_module(mutants)


def reason(mutant) -> str:
    """Return why a surviving mutant is equivalent to its rule."""
    if "weight-only" in mutant.change:
        return "the condition says when the rule pays, not when it is right"
    if mutant.kind in ("dropped condition", "wrong condition"):
        return "the types of the result imply the condition"
    if mutant.kind == "dropped operator":
        return "it fires only where the operator does nothing"
    return "it fires only where the changed number is not read, or the types of the result fix it"


def survivors(chosen, record_property, *, samples: int, deep: int) -> list[str]:
    """Return the names of survivors that only double precision refutes; record the counts, and
    print the equivalent mutants.
    """
    first = verify_rules([m.rule for m in chosen], samples=samples, rounds=6)
    left = [m for m, v in zip(chosen, first, strict=True) if v.ok]
    again = verify_rules([m.rule for m in left], samples=deep, seed=11, rounds=40)
    left = [m for m, v in zip(left, again, strict=True) if v.ok]
    other = verify_rules(
        [m.rule for m in left], samples=min(deep, 200), seed=7, evidence="float64", rounds=40
    )
    equivalent = [m for m, v in zip(left, other, strict=True) if v.ok]
    caught = len(chosen) - len(left)
    record_property(
        "figure",
        f"{len(chosen)} mutants: {caught} refused, {len(equivalent)} equivalent, "
        f"{len(left) - len(equivalent)} missed",
    )
    for m in equivalent:
        print(f"equivalent: {m.rule.name} ({m.kind}; {m.change}): {reason(m)}")
    return [m.rule.name for m in left if m not in equivalent]


def test_wrong_operators_and_operands_are_refused(record_property) -> None:
    rules = tuple(r for r in standard_rules() if not r.family.startswith("lowering"))
    kinds = ("wrong operator", "swapped operands", "wrong constant")
    chosen = mutants.sample(rules, 40, lambda m: m.kind in kinds)
    assert survivors(chosen, record_property, samples=4, deep=12) == []


@pytest.mark.slow
def test_no_mutant_of_any_kind_is_missed(record_property) -> None:
    rules = tuple(r for r in standard_rules() if not r.family.startswith("lowering"))
    chosen = mutants.sample(rules, 240, lambda m: True)
    assert len(chosen) >= 200
    assert len(Counter(m.kind for m in chosen)) >= 8
    # Some mutants differ from their rule in only one of 260 graphs.
    assert survivors(chosen, record_property, samples=12, deep=800) == []
