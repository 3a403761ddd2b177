"""Images cross the borders of folded bodies features last, and nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import nodes_of
from xrl_jax.graph.program import Program
from xrl_jax.rewrite.interface import features_last

W = jax.random.normal(jax.random.key(0), (3, 3, 1, 1))
X = jax.random.normal(jax.random.key(1), (1, 3, 4, 5))


@jax.jit
def block(w: jax.Array, x: jax.Array) -> jax.Array:
    """What a traced network has as one body."""
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


def test_the_result_is_the_same() -> None:
    np.testing.assert_array_equal(features_last(traced())(W, X), network(W, X))


def test_inputs_and_results_of_a_body_are_features_last_and_kernels_are_not() -> None:
    (body,) = features_last(traced()).bodies
    nodes, outputs, _ = nodes_of(body.graph)
    assert {n.op: n.shape for n in nodes if n.op in ("input", "weight")} == {
        "weight": (3, 3, 1, 1),
        "input": (1, 4, 5, 3),
    }
    assert [nodes[o].shape for o in outputs] == [(1, 4, 5, 3)]
    assert sorted(a.shape for a in body.in_avals) == [(1, 4, 5, 3), (3, 3, 1, 1)]


def test_every_call_stands_between_transposes() -> None:
    nodes, _, _ = nodes_of(features_last(traced()).graph)
    assert [n.op for n in nodes if n.op in ("transpose", "call")] == [
        "transpose", "call", "transpose", "transpose", "call", "transpose",
    ]  # fmt: skip


def test_a_program_whose_bodies_convolve_nothing_is_returned_as_it_is() -> None:
    @jax.jit
    def scale(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * 2.0

    program = from_jax(lambda x: scale(scale(x)), X)
    assert features_last(program) is program


def test_the_body_of_a_loop_keeps_what_it_takes() -> None:
    def loop(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (block(w, c), None), x, None, length=2)[0]

    program = from_jax(loop, W, X, weights=(0,))
    after = features_last(program)
    carried = [b for b in after.bodies if b.count == 2.0 and len(b.in_avals) == 2]
    assert (1, 3, 4, 5) in {a.shape for b in carried for a in b.in_avals}
    np.testing.assert_array_equal(after(W, X), loop(W, X))


def test_several_results_are_turned_each() -> None:
    @jax.jit
    def halves(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = block(w, x)
        return y + 1.0, y * 2.0

    def both(w: jax.Array, x: jax.Array) -> jax.Array:
        a, b = halves(w, x)
        c, d = halves(w, a + b)
        return c - d

    program = from_jax(both, W, X, weights=(0,))
    np.testing.assert_array_equal(features_last(program)(W, X), both(W, X))
