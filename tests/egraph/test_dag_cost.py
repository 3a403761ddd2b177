"""The reward of searches over e-graphs: costs in which shared parts count once."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.dag_cost import cheapest_shared_now, structure_of
from xrl_jax.egraph.extraction.extract import extract
from xrl_jax.egraph.extraction.of_egraph import instance_of_egraph
from xrl_jax.egraph.limits import Limits
from xrl_jax.egraph.sharing import shared, total
from xrl_jax.egraph.tensor_graph import egraph_of
from xrl_jax.egraph.tensor_saturation import saturate_graph, tensor_rules
from xrl_jax.egraph.tree_cost import cheapest_now
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph import ops
from xrl_jax.language.rule_files import standard_rules
from xrl_jax.runtime.engine_jit import engine_jit

BUCKET = 2048
structure_now, shared_now = engine_jit(structure_of), engine_jit(shared)
total_now = engine_jit(total)
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
    roots = np.asarray(graph.roots)[:2]
    assert [ops.OP_NAMES[int(graph.op[chosen[c]])] for c in roots] == ["dot", "dot"]


def test_an_enode_that_must_not_be_chosen_is_not():
    graph = merged(1)
    no_slices = jnp.where(graph.op == ops.OPS["slice"].code, jnp.inf, costs_of(graph))
    assert float(cheapest_shared_now(graph, no_slices)[0]) == 2.0


def cost_of(graph: EGraph, costs: np.ndarray, node: np.ndarray) -> float:
    """Return the cost of a choice, each e-node once."""
    needed, waiting = set(), np.asarray(graph.roots).tolist()
    while waiting:
        c = waiting.pop()
        if c not in needed:
            needed.add(c)
            waiting += [int(a) for a in np.asarray(graph.args)[node[c]] if a]
    return float(sum(costs[node[c]] for c in needed))


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_costs_what_is_stated_and_is_as_good_as_greedy_on_the_host(seed):
    graph = merged(1)
    costs = jax.random.uniform(jax.random.key(seed), (BUCKET,))
    cost, node = cheapest_shared_now(graph, costs)
    assert float(cost) == pytest.approx(cost_of(graph, np.asarray(costs), np.asarray(node)))
    instance = instance_of_egraph(graph, np.asarray(costs, np.float64))
    assert float(cost) <= extract(instance, lambda: 0.0).greedy * (1 + 1e-5)


def products() -> tuple[EGraph, jax.Array, jax.Array]:
    """Return an e-graph with a merged product, costs, and the choice without it."""
    graph = merged(1)
    costs = jnp.where(graph.op > 0, costs_of(graph) + 1e-6, jnp.inf)
    return graph, costs, cheapest_now(graph, costs).node


def test_classes_switch_together_to_the_merged_product():
    graph, costs, node = products()
    assert float(total_now(graph, costs, node)) == pytest.approx(2.0, rel=1e-4)
    _, pairs, order = structure_now(graph)
    cost, _ = shared_now(graph, pairs, order, costs, node)
    assert float(cost) == pytest.approx(1.2, rel=1e-4)


def test_a_choice_with_a_cycle_costs_infinitely_much():
    """x, tanh x; then tanh x reads itself."""
    graph = egraph_of([from_jax(jnp.tanh, X).graph], BUCKET)
    costs, node = jnp.ones(BUCKET), jnp.where(graph.op > 0, graph.parent, 0)
    assert float(total_now(graph, costs, node)) == 2.0
    looped = graph._replace(args=graph.args.at[2, 0].set(2))
    assert float(total_now(looped, costs, node)) == np.inf


def test_a_class_that_cannot_be_built_has_no_enode():
    graph = egraph_of([from_jax(jnp.tanh, X).graph], BUCKET)
    looped = graph._replace(args=graph.args.at[2, 0].set(2))
    assert int(cheapest_now(looped, jnp.ones(BUCKET)).node[2]) == HOLE
