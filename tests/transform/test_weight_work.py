"""Hiding weight-only work: what is still visible of it, and that all of it is restored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from jax import lax

from tests.graph.generators import graphs
from tests.quick import QUICK
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import Node, build, nodes_of
from xrl_jax.lower.table import lower
from xrl_jax.program.program import Program
from xrl_jax.transform.union import split_union, united
from xrl_jax.transform.weight_work import Hidden, Operands, Value, hide, unhide

X = jnp.linspace(-1.0, 1.0, 24).reshape(2, 3, 4)


def visible_ops(program: Program) -> list[str]:
    nodes, _, _ = nodes_of(united(program)[0])
    return [n.op for n in nodes]


def hidden(program: Program) -> tuple[list[Node], Hidden]:
    nodes, _, found = hide(program.graph, len(program.bindings))
    return nodes, found


def same_function(program: Program, *args: object) -> None:
    back = split_union(program, *united(program))
    for one, other in zip(
        jax.tree.leaves(back(*args)), jax.tree.leaves(program(*args)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_a_value_computed_from_weights_appears_as_one_weight():
    """The program is x @ tanh(w + v)."""
    w, v = jnp.ones((4, 5)), jnp.full((4, 5), 0.5)
    program = from_jax(lambda w, v, x: x @ jnp.tanh(w + v), w, v, X, weights=(0, 1))
    nodes, found = hidden(program)
    assert [n.op for n in nodes] == ["input", "weight", "dot"]
    assert nodes[1].shape == (4, 5) and nodes[1].ref == len(program.bindings)
    (stub,) = found.stubs
    assert isinstance(stub, Value) and found.nodes[stub.node].op == "tanh"
    same_function(program, w, v, X)


def test_weights_used_directly_and_scalars_stay_as_they_are():
    program = from_jax(lambda w, x: (x @ w) * 2.0, jnp.ones((4, 5)), X, weights=(0,))
    nodes, found = hidden(program)
    assert [n.op for n in nodes] == ["input", "weight", "dot", "const", "mul"]
    assert nodes[3].value == 2.0 and found.stubs == ()


def test_a_broadcast_vector_appears_as_the_vector():
    """The program is x / sqrt(var + 1) along the middle dimension: [3] becomes [3, 1], whose
    reciprocal root is broadcast to [2, 3, 4].
    """
    var = jnp.array([1.0, 2.0, 3.0])
    program = from_jax(lambda v, x: x * lax.rsqrt(v[:, None] + 1.0), var, X, weights=(0,))
    assert len(nodes_of(program.graph)[0]) > 5
    nodes, found = hidden(program)
    assert [(n.op, n.shape) for n in nodes] == [
        ("input", (2, 3, 4)),
        ("weight", (3,)),
        ("broadcast", (2, 3, 4)),
        ("mul", (2, 3, 4)),
    ]
    assert nodes[2].attr("dims") == (1, -1, -1, -1, -1, -1)
    (stub,) = found.stubs
    assert isinstance(stub, Value) and found.nodes[stub.node].shape == (3, 1)
    same_function(program, var, X)


def test_all_weights_of_a_call_appear_as_one():
    """The program is a scan over four layers of two weights each."""
    weights = jnp.full((4, 4, 4), 0.1), jnp.full((4, 4), 0.2)

    def layers(weights, x):
        def layer(x, weights):
            w, b = weights
            return jnp.tanh(x @ w + b), None

        return lax.scan(layer, x, weights)[0]

    program = from_jax(layers, weights, X, weights=(0,))
    nodes, found = hidden(program)
    assert [n.op for n in nodes] == ["input", "weight", "call"]
    (stub,) = found.stubs
    assert isinstance(stub, Operands) and [found.nodes[i].op for i in stub.nodes] == ["weight"] * 2
    same_function(program, weights, X)


def test_operands_keep_their_positions_beyond_what_a_node_holds():
    """A sort of seven arrays, three of them weights, is one equation."""
    rows = [jnp.array([3.0, 1.0, 2.0]) * (i + 1) for i in range(7)]

    def sorted_together(a, w1, b, w2, w3, c, d):
        return lax.sort((a, w1, b, w2, w3, c, d), num_keys=1)

    program = from_jax(sorted_together, *rows, weights=(1, 3, 4))
    _, found = hidden(program)
    (stub,) = found.stubs
    assert isinstance(stub, Operands) and stub.places == (1, 3, 4)
    assert "opaque" in visible_ops(program)
    same_function(program, *rows)


def test_weight_only_outputs_and_effects_stay():
    def prints_a_weight(w, x):
        jax.debug.print("{}", w.sum())
        return jnp.exp(w), x + w

    program = from_jax(prints_a_weight, jnp.ones((3, 4)), X, weights=(0,))
    assert visible_ops(program).count("opaque") == 1
    same_function(program, jnp.ones((3, 4)), X)


@settings(max_examples=50, deadline=None)
@given(graphs())
def test_unhide_restores_the_graph(case):
    graph = build(*case)
    nodes, outputs, hidden = hide(graph, first=len(case[0]))
    fixed = {i for i, w in enumerate(graph.nodes.weight_only.tolist()) if w}
    shown = nodes_of(build(nodes, outputs))[0]
    assert sum(not n for n in weight_only_of(shown)) == len(case[0]) - len(fixed)
    back = unhide(nodes, outputs, hidden)
    for one, other in zip(results(*case), results(*back), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def weight_only_of(nodes: list[Node]) -> list[bool]:
    found = build(nodes, ()).nodes.weight_only.tolist()
    return found[1 : len(nodes) + 1]


def results(nodes: Sequence[Node], outputs: Sequence[int]) -> list[Any]:
    """Return the outputs of a graph of native operators for random arguments, seeded by `ref`."""
    given = {
        n.ref: np.random.default_rng(n.ref).normal(size=n.shape).astype(n.dtype)
        for n in nodes
        if n.ref >= 0
    }

    def run(given: dict[int, jax.Array]) -> list[jax.Array]:
        values: list[Any] = []
        for n in nodes:
            args = [values[a] for a in n.args]
            values.append(given[n.ref] if n.ref >= 0 else lower(n, *args))
        return [values[o] for o in outputs]

    return jax.jit(run, compiler_options=QUICK)(given)
