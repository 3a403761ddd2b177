"""Which inputs of a body are its own results in the previous call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.bindings import Input
from xrl_jax.graph.graph import nodes_of
from xrl_jax.program.program import Program

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
WEIGHTS = [np.full((3, 3), 0.1 * (i + 1), np.float32) for i in range(4)]


@jax.jit
def layer(x: jax.Array, kept: jax.Array, w: jax.Array) -> jax.Array:
    """Apply a layer of more than 16 equations, so that it is a body wherever it is called."""
    for _ in range(3):
        x = jnp.tanh(x @ w + kept) - jnp.exp(x * 0.5) * jnp.sin(kept)
    return x


@jax.jit
def exchanging_layer(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.exp(y) - y * jnp.sin(y), jnp.tanh(x) * x + jnp.cos(x)


def carried_inputs(program: Program) -> list[dict[int, int]]:
    """Return, for each body, `carried` of its inputs by their positions."""
    found = []
    for body in program.bodies:
        inputs = [n for n in nodes_of(body.graph)[0] if n.op == "input"]
        rows = [(program.bindings[n.ref], n.attrs[0]) for n in inputs]
        found.append({b.position: a for b, a in rows if isinstance(b, Input)})
    return found


def test_a_layers_input_is_recognised_as_the_previous_layers_result() -> None:
    def network(x, weights):
        y = jnp.exp(x)
        for w in weights:
            y = layer(y, x, w)
        return y

    program = from_jax(network, X, WEIGHTS, weights=(1,))
    (body,) = carried_inputs(program)
    assert sorted(body.values()) == [0, 1]  # `kept` is the same in all calls


def test_results_that_change_places_are_distinguished() -> None:
    def network(x, y):
        for _ in range(3):
            x, y = exchanging_layer(x, y)
        return x, y

    (body,) = carried_inputs(from_jax(network, X, X + 1))
    assert sorted(body.values()) == [1, 2]


def test_parallel_calls_are_not_a_chain() -> None:
    def network(x, weights):
        return [layer(x, x, w) for w in weights]

    (body,) = carried_inputs(from_jax(network, X, WEIGHTS, weights=(1,)))
    assert set(body.values()) == {0}


def test_an_interrupted_chain_is_not_a_chain() -> None:
    def network(x, weights):
        y = layer(layer(x, x, weights[0]), x, weights[1])
        return layer(jnp.cos(y), x, weights[2])

    (body,) = carried_inputs(from_jax(network, X, WEIGHTS, weights=(1,)))
    assert set(body.values()) == {0}
