"""Costs of e-nodes are those of nodes in the program that a choice stands for."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.egraph.test_tensor_graph import SMALL, arguments
from xrl_jax.cost.enodes import (
    Choice,
    allowed_lowerings,
    enode_costs_now,
    fitting_now,
    least_cost_now,
    no_choice,
)
from xrl_jax.cost.model import price
from xrl_jax.cost.roofline import CostTable, cost_table
from xrl_jax.egraph.arrays import HOLE
from xrl_jax.egraph.tensor_graph import egraph_of, extracted
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph import ops
from xrl_jax.graph.graph import nodes_of
from xrl_jax.language.rule_files import available_rules, standard_rules
from xrl_jax.program.program import Program
from xrl_jax.transform.start import start_of

BUCKET = 2048
ONE = jnp.int32(1)


@cache
def costs() -> CostTable:
    return cost_table({})


@cache
def allowed() -> jax.Array:
    return allowed_lowerings(available_rules(standard_rules(), "cpu"))


def program_of(name: str) -> Program:
    fn, shapes = SMALL[name]
    leaves = arguments(0, *shapes)
    return start_of(from_jax(fn, *leaves, weights=tuple(range(1, len(leaves)))), "cpu")


@pytest.mark.parametrize("name", SMALL)
def test_enodes_cost_what_the_nodes_of_the_program_cost(name):
    """An e-graph of one program has one choice; lowerings are chosen until they stay the same."""
    graph = egraph_of([program_of(name).graph], BUCKET)
    node = jnp.where(graph.op != HOLE, jnp.arange(BUCKET, dtype=jnp.int32), HOLE)
    right, lowering = fitting_now(graph, allowed()), jnp.zeros(BUCKET, jnp.int32)
    for _ in range(4):
        cost, lowering = enode_costs_now(costs(), graph, right, Choice(node, lowering), ONE)
    found = extracted(graph, np.asarray(node), 1, np.asarray(lowering))
    total = float(price(costs(), found)[1])
    assert float(jnp.sum(jnp.where(node > 0, cost, 0.0))) == pytest.approx(total, rel=1e-5)
    plain = float(price(costs(), extracted(graph, np.asarray(node), 1))[1])
    assert total <= plain


def test_only_allowed_lowerings_are_chosen():
    graph = egraph_of([program_of("attention").graph], BUCKET)
    right = fitting_now(graph, allowed_lowerings([]))
    assert not np.asarray(right).any()
    _, lowering = enode_costs_now(costs(), graph, right, no_choice(BUCKET), ONE)
    assert not np.asarray(lowering).any()


@pytest.mark.parametrize("name", SMALL)
def test_the_least_cost_is_that_of_an_extracted_program(name):
    graph = egraph_of([program_of(name).graph], BUCKET)
    least = least_cost_now(costs(), graph, allowed(), no_choice(BUCKET), ONE)
    node, lowering = (np.asarray(x) for x in least.choice)
    found = extracted(graph, node, 1, lowering)
    assert float(least.seconds) == pytest.approx(float(price(costs(), found)[1]), rel=0.05)
    assert {n.op for n in nodes_of(found)[0]} <= ops.OPS.keys()
