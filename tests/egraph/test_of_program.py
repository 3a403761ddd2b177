"""Saturation of programs for users: what it prints, what is extracted, pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xrl_jax
from xrl_jax.egraph.of_program import ProgramEGraph
from xrl_jax.graph.graph import Node, nodes_of

X = jnp.arange(32.0).reshape(4, 8)
W = jnp.full((8, 8), 0.5)


def transposed(x: jax.Array) -> jax.Array:
    return jnp.tanh(x.T).T @ W


@cache
def egraph() -> ProgramEGraph:
    return xrl_jax.saturate(xrl_jax.from_jax(transposed, X))


def test_text_and_counts():
    found = egraph()
    assert found.saturated
    nodes, classes = found.counts
    assert str(found).startswith(f"main: {nodes} e-nodes in {classes} classes after ")
    assert "no rule adds anything\n  matches: " in str(found)


def test_the_smallest_program_is_extracted():
    program = egraph().extract()
    assert {n.op for n in nodes_of(program.graph)[0]} == {"input", "tanh", "array", "dot"}
    np.testing.assert_allclose(program(X), transposed(X), rtol=1e-6)


def test_a_cost_of_the_users_own_decides():
    """Where products with four rows are dear, the product is computed transposed."""

    def cost(node: Node, args: Sequence[Node]) -> float:
        return 10.0 if node.op == "dot" and node.shape == (4, 8) else 1.0

    program = egraph().extract(cost)
    assert [n.shape for n in nodes_of(program.graph)[0] if n.op == "dot"] == [(8, 4)]
    np.testing.assert_allclose(program(X), transposed(X), rtol=1e-6)


def test_a_picture_has_a_box_for_each_class():
    text = egraph().graphviz()
    assert text.startswith("digraph") and text.endswith("}")
    assert text.count("subgraph cluster_") == egraph().counts[1]
    assert 'label="tanh[4, 8]"' in text
    named = set(re.findall(r"^ +(n\d+) \[", text, re.M))
    assert {end for pair in re.findall(r"(n\d+) -> (n\d+)", text) for end in pair} <= named
    assert egraph().graphviz(most=2).count("subgraph") == 2


def test_every_graph_of_a_program_is_saturated():
    def layers(x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = jnp.tanh(jnp.sin(jnp.exp(x)) * jnp.cos(x) + 1.0) - jnp.sqrt(x)
        return x

    program = xrl_jax.from_jax(layers, X)
    found = xrl_jax.saturate(program, iterations=2)
    assert len(found.graphs) == len(program.graphs) == 2
    assert len(str(found).splitlines()) >= 2
    np.testing.assert_allclose(found.extract()(X), layers(X), rtol=1e-5)


def test_only_the_given_rules_are_used():
    program = xrl_jax.from_jax(lambda x: jnp.negative(-x) + 0.0, X)
    found = xrl_jax.saturate(program, ["neg-neg"])
    assert [n.op for n in nodes_of(found.extract().graph)[0]] == ["input", "const", "add"]
    with pytest.raises(ValueError, match="neg-nge"):
        xrl_jax.saturate(program, ["neg-nge"])
