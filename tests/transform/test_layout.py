"""Activations cross the boundaries of folded bodies in another layout; nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import nodes_of
from xrl_jax.program.program import Program
from xrl_jax.transform.layout import FEATURES_FIRST, FEATURES_LAST, convert_layout

W = jax.random.normal(jax.random.key(0), (3, 3, 1, 1))
X = jax.random.normal(jax.random.key(1), (1, 3, 4, 5))


@jax.jit
def block(w: jax.Array, x: jax.Array) -> jax.Array:
    """Apply a block that is one body of a traced network."""
    y = lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW"))
    for _ in range(4):  # enough operators to be worth a body
        y = jnp.tanh(y) * 2.0
    return y + x


def network(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(block(w, block(w, x)), axis=1)


def traced() -> Program:
    program = from_jax(network, W, X, weights=(0,))
    assert len(program.bodies) == 1
    return program


def test_another_layout_computes_the_same_result() -> None:
    # XLA sums in another order if features are last.
    np.testing.assert_allclose(
        convert_layout(traced(), FEATURES_LAST)(W, X), network(W, X), rtol=1e-5, atol=1e-5
    )


def test_inputs_and_results_of_a_body_are_features_last_and_kernels_are_not() -> None:
    (body,) = convert_layout(traced(), FEATURES_LAST).bodies
    nodes, outputs, _ = nodes_of(body.graph)
    assert {n.op: n.shape for n in nodes if n.op in ("input", "weight")} == {
        "weight": (3, 3, 1, 1),
        "input": (1, 4, 5, 3),
    }
    assert [nodes[o].shape for o in outputs] == [(1, 4, 5, 3)]
    assert sorted(a.shape for a in body.in_avals) == [(1, 4, 5, 3), (3, 3, 1, 1)]


def test_every_call_stands_between_transposes() -> None:
    nodes, _, _ = nodes_of(convert_layout(traced(), FEATURES_LAST).graph)
    assert [n.op for n in nodes if n.op in ("transpose", "call")] == [
        "transpose", "call", "transpose", "transpose", "call", "transpose",
    ]  # fmt: skip


def test_a_program_without_convolutions_in_bodies_is_unchanged() -> None:
    @jax.jit
    def scale(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * 2.0

    program = from_jax(lambda x: scale(scale(x)), X)
    assert convert_layout(program, FEATURES_LAST) is program


def test_the_body_of_a_loop_keeps_the_layout_of_its_inputs() -> None:
    def loop(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (block(w, c), None), x, None, length=2)[0]

    program = from_jax(loop, W, X, weights=(0,))
    after = convert_layout(program, FEATURES_LAST)
    carried = [b for b in after.bodies if b.count == 2.0 and len(b.in_avals) == 2]
    assert (1, 3, 4, 5) in {a.shape for b in carried for a in b.in_avals}
    np.testing.assert_array_equal(after(W, X), loop(W, X))


def test_each_of_several_results_is_transposed() -> None:
    @jax.jit
    def halves(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = block(w, x)
        return y + 1.0, y * 2.0

    def both(w: jax.Array, x: jax.Array) -> jax.Array:
        a, b = halves(w, x)
        c, d = halves(w, a + b)
        return c - d

    program = from_jax(both, W, X, weights=(0,))
    np.testing.assert_array_equal(convert_layout(program, FEATURES_LAST)(W, X), both(W, X))


V = jax.random.normal(jax.random.key(2), (3, 3))
TOKENS = jax.random.normal(jax.random.key(3), (2, 3))


@jax.jit
def layer(v: jax.Array, x: jax.Array) -> jax.Array:
    y = x @ v
    for _ in range(4):
        y = jnp.tanh(y) * 2.0
    return y + x


def layers(v: jax.Array, x: jax.Array) -> jax.Array:
    return layer(v, layer(v, x))


def test_tokens_enter_bodies_features_first_and_weights_unchanged() -> None:
    program = convert_layout(from_jax(layers, V, TOKENS, weights=(0,)), FEATURES_FIRST)
    (body,) = program.bodies
    nodes, outputs, _ = nodes_of(body.graph)
    assert {n.op: n.shape for n in nodes if n.op in ("input", "weight")} == {
        "weight": (3, 3),
        "input": (3, 2),
    }
    assert [nodes[o].shape for o in outputs] == [(3, 2)]
    np.testing.assert_array_equal(program(V, TOKENS), layers(V, TOKENS))


def test_an_input_of_the_program_is_transposed_and_transposed_back() -> None:
    program = from_jax(lambda v, x: x @ v + x, V, TOKENS, weights=(0,))
    nodes, _, _ = nodes_of(convert_layout(program, FEATURES_FIRST).graph)
    assert [(n.op, n.shape) for n in nodes if n.op in ("input", "transpose")] == [
        ("input", (2, 3)), ("transpose", (3, 2)), ("transpose", (2, 3)),
    ]  # fmt: skip
