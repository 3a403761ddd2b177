"""Saturation of tensor graphs: limits, why it ends, and what Tensat does about cycles."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.egraph import arrays
from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.limits import DEFAULT, Limits, Stop
from xrl_jax.egraph.tensor_graph import egraph_of
from xrl_jax.egraph.tensor_saturation import (
    Saturation,
    TensorRules,
    applies,
    saturate_graph,
    tensor_rules,
    without_cycles,
)
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import GraphError
from xrl_jax.language.rule_files import standard_rules
from xrl_jax.program.program import Program

BUCKET = 2048
X = jnp.ones((4, 8))
W = [jnp.full((8, 8), 1.0 + i) for i in range(3)]


@cache
def rules() -> TensorRules:
    return tensor_rules(standard_rules())


def three(x: jax.Array, u: jax.Array, v: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    """Three products of one array."""
    return x @ u, jnp.tanh(x @ v), x @ w


def program() -> Program:
    return from_jax(three, X, *W, weights=(1, 2, 3))


def saturated(limits: Limits = DEFAULT, *, of: Program | None = None, **how: object) -> Saturation:
    graph = egraph_of([(of or program()).graph], BUCKET)
    return saturate_graph(rules(), graph, limits=limits, **how)  # type: ignore[arg-type]


def test_rules_for_lowerings_and_for_equal_nodes_are_left_out():
    names = {r.name for r in standard_rules() if not applies(r)}
    assert {"same-dot", "window_sum-same", "dot-as-flat"} <= names
    assert not {"merge-dots-by-left", "add-zero"} & names


def test_a_program_without_a_rewrite_is_saturated_at_once():
    found = saturated(of=from_jax(jnp.tanh, X))
    assert (found.stop, found.counts, len(found.iterations)) == (Stop.SATURATED, (2, 2), 1)


def test_products_are_merged_in_the_first_iterations_only():
    """Three products in pairs are three merged products; then a pair with the third one."""
    never, once = (saturated(Limits(iterations=3), merging=m) for m in (0, 1))
    assert never.counts[0] < once.counts[0]
    by_rule = dict(zip((r.name for r in rules().rules), once.iterations[0].matches, strict=True))
    assert by_rule["merge-dots-by-left"] == 3


@pytest.mark.parametrize("nodes", [40, 100, 300])
def test_there_are_never_more_enodes_than_the_limit(nodes):
    found = saturated(Limits(nodes=nodes), merging=2)
    assert found.stop is Stop.NODES
    assert all(i.nodes <= nodes for i in found.iterations)
    assert found.counts[0] > 0.8 * nodes


def test_a_saturation_ends_at_its_other_limits():
    assert saturated(Limits(iterations=1)).stop is Stop.ITERATIONS
    assert saturated(Limits(seconds=0.0)).stop is Stop.SECONDS
    assert saturated(proven=lambda graph: True).stop is Stop.PROVEN


def test_the_same_saturation_gives_the_same_bits():
    one, again = (saturated(Limits(iterations=3)).graph for _ in range(2))
    for a, b in zip(one, again, strict=True):
        np.testing.assert_array_equal(a, b)


def is_acyclic(graph: EGraph) -> bool:
    """Whether classes can be put in an order in which all arguments come first."""
    args, parent, op = (np.asarray(x) for x in (graph.args, graph.parent, graph.op))
    needs: dict[int, set[int]] = {}
    for slot in np.flatnonzero(op != HOLE):
        needs.setdefault(int(parent[slot]), set()).update(int(a) for a in args[slot] if a)
    while ready := {c for c, below in needs.items() if not below & needs.keys()}:
        needs = {c: below for c, below in needs.items() if c not in ready}
    return not needs


def test_filtering_leaves_no_cycle():
    """A product that was merged and cut again is a part of itself."""
    limits = Limits(iterations=3)
    assert not is_acyclic(saturated(limits).graph)
    filtered = saturated(limits, filter_cycles=True).graph
    assert is_acyclic(filtered)
    assert np.all(np.asarray(without_cycles(filtered).op) == np.asarray(filtered.op))


def test_two_programs_that_compute_the_same_share_an_egraph():
    """tanh(x) + y and y + tanh(x), and one that is not known to be equal."""
    one, two, other = (
        from_jax(fn, X, X).graph
        for fn in (
            lambda x, y: jnp.tanh(x) + y,
            lambda x, y: y + jnp.tanh(x),
            lambda x, y: x + y,
        )
    )
    assert int(arrays.counts(egraph_of([one, two], BUCKET))[0]) == 4
    assert int(arrays.counts(egraph_of([one, other], BUCKET))[0]) == 5
    assert int(egraph_of([one, other], BUCKET).n) == 6


def test_programs_with_effects_do_not_share_an_egraph():
    def fn(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x[0, 0])
        return x + 1.0

    graph = from_jax(fn, X).graph
    with pytest.raises(GraphError, match="pinned"):
        egraph_of([graph, graph], BUCKET)
