"""The reward of searches over e-graphs: costs in which shared parts count once."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.egraph.arrays import EGraph
from xrl_jax.egraph.dag_cost import cheapest_shared_now
from xrl_jax.egraph.extraction.extract import extract
from xrl_jax.egraph.extraction.of_egraph import enodes_of, instance_of_egraph
from xrl_jax.egraph.limits import Limits
from xrl_jax.egraph.tensor_graph import egraph_of
from xrl_jax.egraph.tensor_saturation import saturate_graph, tensor_rules
from xrl_jax.egraph.tree_cost import cheapest_now
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph import ops
from xrl_jax.language.rule_files import standard_rules

BUCKET = 2048
X, W = jnp.ones((4, 8)), jnp.ones((8, 8))


@cache
def merged(times: int) -> EGraph:
    """Return the e-graph of x v and x w, where products of one array were merged so many times."""

    def two(x: jax.Array, v: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x @ v, x @ w

    rules = tensor_rules([r for r in standard_rules() if r.name == "merge-dots-by-left"])
    program = from_jax(two, X, W, 2 * W, weights=(1, 2))
    graph = egraph_of([program.graph], BUCKET)
    return (
        saturate_graph(rules, graph, limits=Limits(iterations=times), merging=times).graph
        if times
        else graph
    )


def costs_of(graph: EGraph) -> jax.Array:
    """A product costs 1, a slice 0.1, all else nothing."""
    is_dot, is_slice = (graph.op == ops.OPS[name].code for name in ("dot", "slice"))
    return jnp.where(is_dot, 1.0, jnp.where(is_slice, 0.1, 0.0)).astype(jnp.float32)


@pytest.mark.parametrize(("times", "cost"), [(0, 2.0), (1, 1.2)])
def test_merging_two_products_raises_the_reward(times, cost):
    """The merged product is paid once, and each of its slices 0.1."""
    graph = merged(times)
    assert float(cheapest_shared_now(graph, costs_of(graph))[0]) == pytest.approx(cost)


def test_tree_costs_do_not_see_that_merging_pays():
    graph = merged(1)
    chosen = np.asarray(cheapest_now(graph, costs_of(graph) + 1e-6).node)
    roots = np.asarray(graph.roots)
    assert [ops.OP_NAMES[int(graph.op[chosen[c]])] for c in roots] == ["dot", "dot"]


def test_an_enode_that_must_not_be_chosen_is_not():
    graph = merged(1)
    no_slices = jnp.where(graph.op == ops.OPS["slice"].code, jnp.inf, costs_of(graph))
    assert float(cheapest_shared_now(graph, no_slices)[0]) == 2.0


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_costs_what_is_stated_and_is_as_good_as_on_the_host(seed):
    graph = merged(1)
    costs = jax.random.uniform(jax.random.key(seed), (BUCKET,))
    cost, node = cheapest_shared_now(graph, costs)
    instance = instance_of_egraph(graph, np.asarray(costs, np.float64))
    found = extract(instance, lambda: 0.0)
    assert float(cost) == pytest.approx(found.greedy, rel=1e-5)
    used = found.choice.node >= 0
    np.testing.assert_array_equal(
        enodes_of(instance, found.choice.node)[used], np.asarray(node)[used]
    )
