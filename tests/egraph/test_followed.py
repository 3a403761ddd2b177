"""A program can be followed through an e-graph while it grows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tests.egraph.test_tensor_graph import BUCKET, SMALL, X, arguments, iterated
from xrl_jax.cost.enodes import Choice, allowed_lowerings, least_cost_now
from xrl_jax.cost.model import price
from xrl_jax.cost.roofline import cost_table
from xrl_jax.egraph.arrays import EGraph
from xrl_jax.egraph.followed import Followed, followed, moved
from xrl_jax.egraph.tensor_graph import egraph_of, extracted
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import TensorGraph, nodes_of
from xrl_jax.graph.hash import identity
from xrl_jax.language.rule_files import available_rules, standard_rules
from xrl_jax.program.program import Program
from xrl_jax.transform.start import start_of


def program_of(name: str) -> Program:
    fn, shapes = SMALL[name]
    leaves = arguments(0, *shapes)
    return start_of(from_jax(fn, *leaves, weights=tuple(range(1, len(leaves)))), "cpu")


def chosen_in(graph: EGraph, choice: Followed) -> TensorGraph:
    return extracted(graph, np.asarray(choice.node), 1, np.asarray(choice.lowering))


@pytest.mark.parametrize("name", SMALL)
def test_a_program_is_the_same_after_iterations(name):
    program = program_of(name)
    digests = jnp.asarray(program.digests())
    graph = egraph_of([program.graph], BUCKET)
    choice = followed(graph, program.graph)
    first = chosen_in(graph, choice)  # equal nodes are one
    for _ in range(2):
        done = iterated(graph)
        graph, choice = done.graph, moved(choice, done.place, done.graph.parent)
        now = chosen_in(graph, choice)
        np.testing.assert_array_equal(identity(now, digests), identity(first, digests))


def test_of_classes_that_become_one_the_first_is_kept():
    """A transposed transpose is its argument, so that the choice would have a cycle."""
    program = from_jax(lambda x: jnp.tanh(x.T.T), X)
    graph = egraph_of([program.graph], BUCKET)
    choice = followed(graph, program.graph)
    assert np.count_nonzero(choice.node) == 4
    for _ in range(2):
        done = iterated(graph, "transpose-transpose", "transpose-away")
        graph, choice = done.graph, moved(choice, done.place, done.graph.parent)
    assert [n.op for n in nodes_of(chosen_in(graph, choice))[0]] == ["input", "tanh"]


def test_nothing_is_followed_where_the_egraph_lacks_a_node():
    graph = egraph_of([from_jax(jnp.tanh, X).graph], BUCKET)
    choice: Followed = followed(graph, from_jax(jnp.sin, X).graph)
    assert not any(np.any(x) for x in choice)


@pytest.mark.parametrize("name", SMALL)
def test_an_egraph_costs_at_most_what_the_program_known_does(name):
    program = program_of(name)
    graph = iterated(egraph_of([program.graph], BUCKET)).graph
    costs, rules = cost_table({}), available_rules(standard_rules(), "cpu")
    known = followed(graph, program.graph)
    choice = Choice(known.node, known.lowering)
    least = least_cost_now(costs, graph, allowed_lowerings(rules), choice, jnp.int32(1))
    assert float(least.seconds) <= float(price(costs, program.graph)[1]) * (1 + 1e-5)
