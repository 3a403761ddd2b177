"""The table of lowerings: its conditions hold alike on the host and in the engine, and its rows
become rules.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.lower.test_conformance import CHOSEN, rng_for
from xrl_jax.graph.graph import GraphError, Node
from xrl_jax.graph.view import NodeView, view_of
from xrl_jax.language.lowering_rules import lowering_rules
from xrl_jax.lower.table import (
    CHOICE,
    CHOICES,
    applicable,
    fits,
    name_of,
    number_of,
)
from xrl_jax.verify.samplers.nodes import random_node

EXAMPLES = 60
_fits = jax.jit(jax.vmap(fits))


@pytest.mark.parametrize("op", CHOSEN)
def test_conditions_agree_on_the_host_and_inside_jit(op: str) -> None:
    samples = [random_node(op, rng_for(op, example)) for example in range(EXAMPLES)]
    views = [view_of(s.node, s.args) for s in samples]
    found = np.asarray(_fits(NodeView(*(np.stack(f) for f in zip(*views, strict=True)))))
    for sample, row in zip(samples, found, strict=True):
        right = set(applicable(sample.node, sample.args))
        chosen = {i for o, i in CHOICES if o == op and row[CHOICE[o, i]]}
        assert chosen == right - {0}  # 0 is plain, the node's own lowering


def test_the_current_lowering_of_a_node_is_not_offered() -> None:
    sample = random_node("softmax", rng_for("softmax", 0))
    node = replace(sample.node, lowering=number_of("softmax", "reciprocal"))
    views = NodeView(*(np.asarray(f)[None] for f in view_of(node, sample.args)))
    (row,) = np.asarray(_fits(views))
    found = [CHOICES[i] for i in np.flatnonzero(row)]
    assert found == [("softmax", i) for i in applicable(node, sample.args) if i != 1]


def test_every_choice_has_a_rule() -> None:
    rules = {r.lowering: r.name for r in lowering_rules()}
    assert len(rules) == len(CHOICES)
    assert rules["conv", "matmul_transposed"] == "conv-as-matmul-transposed"
    assert rules["window_max", "plain"] == "window_max-as-plain"


def test_an_unknown_lowering_name_is_refused() -> None:
    with pytest.raises(KeyError, match=r"softmax has no lowering 'fast' \(it has: plain, recip"):
        number_of("softmax", "fast")


def test_an_unknown_lowering_number_is_refused() -> None:
    assert name_of(Node("softmax", lowering=2)) == "matmul"
    with pytest.raises(GraphError, match="'softmax' has 3 lowerings, but a node asks for number 3"):
        name_of(Node("softmax", lowering=3))
