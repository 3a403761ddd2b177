"""Special values in lowerings. A lowering that is right on all arguments has NaN and infinities
where the plain one has them, and a large element does not disturb others.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.lower.test_conformance import CHOSEN, rng_for
from xrl_jax.lower.table import LOWERINGS, applicable
from xrl_jax.verify.lowerings import SPECIAL, SPECIAL_VALUES, comparison
from xrl_jax.verify.samplers.nodes import random_node

_EXAMPLES, _TIMES = 160, 2  # nodes per operator; how many of them each lowering is tried on


def broken(op: str, kind: str) -> tuple[set[str], set[str]]:
    """Return the names of the lowerings that were tried, and of those that lose such values."""
    tried: Counter[str] = Counter()
    wrong: set[str] = set()
    for example in range(_EXAMPLES):
        rng = rng_for(op, example)
        sample = random_node(op, rng)
        dtypes = {sample.node.dtype, sample.args[0].dtype}
        if dtypes != {"float32"} or 0 in sample.node.shape:
            continue
        first, *others = sample.values(rng)
        values = [SPECIAL_VALUES[kind](first, rng), *others]
        found = [LOWERINGS[op][i] for i in applicable(sample.node, sample.args) if i]
        lowerings = [lowering for lowering in found if tried[lowering.name] < _TIMES]
        if lowerings:
            tried.update(lowering.name for lowering in lowerings)
            differences = comparison(sample, lowerings)(values, units=SPECIAL)
            wrong |= {w.name for w, d in zip(lowerings, differences, strict=True) if d.problem}
    return set(tried), wrong


@pytest.mark.parametrize("kind", SPECIAL_VALUES)
@pytest.mark.parametrize("op", CHOSEN)
def test_an_unbounded_lowering_keeps_special_values(op: str, kind: str) -> None:
    tried, wrong = broken(op, kind)
    assert tried == {row.name for row in LOWERINGS[op][1:] if row.rounds is None}
    undeclared = wrong - {row.name for row in LOWERINGS[op] if row.bounded}
    assert not undeclared, f"{undeclared} lose special values: mend them, or say bounded=True"


def test_every_bounded_lowering_of_a_convolution_changes_special_values() -> None:
    wrong = set().union(*(broken("conv", kind)[1] for kind in SPECIAL_VALUES))
    assert wrong == {row.name for row in LOWERINGS["conv"] if row.bounded}
