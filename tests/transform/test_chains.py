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
def turns(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.exp(y) - y * jnp.sin(y), jnp.tanh(x) * x + jnp.cos(x)


def again(program: Program) -> list[dict[int, int]]:
    """Return, for each body, `carried` of its inputs by their positions."""
    found = []
    for body in program.bodies:
        inputs = [n for n in nodes_of(body.graph)[0] if n.op == "input"]
        rows = [(program.bindings[n.ref], n.attrs[0]) for n in inputs]
        found.append({b.position: a for b, a in rows if isinstance(b, Input)})
    return found


def test_an_input_of_a_layer_is_the_result_of_the_layer_before() -> None:
    def network(x, weights):
        y = jnp.exp(x)
        for w in weights:
            y = layer(y, x, w)
        return y

    program = from_jax(network, X, WEIGHTS, weights=(1,))
    (body,) = again(program)
    assert sorted(body.values()) == [0, 1]  # `kept` is the same in all calls


def test_results_that_change_places_are_told_apart() -> None:
    def network(x, y):
        for _ in range(3):
            x, y = turns(x, y)
        return x, y

    (body,) = again(from_jax(network, X, X + 1))
    assert sorted(body.values()) == [1, 2]


def test_calls_side_by_side_are_no_chain() -> None:
    def network(x, weights):
        return [layer(x, x, w) for w in weights]

    (body,) = again(from_jax(network, X, WEIGHTS, weights=(1,)))
    assert set(body.values()) == {0}


def test_a_chain_that_breaks_off_is_none() -> None:
    def network(x, weights):
        y = layer(layer(x, x, weights[0]), x, weights[1])
        return layer(jnp.cos(y), x, weights[2])

    (body,) = again(from_jax(network, X, WEIGHTS, weights=(1,)))
    assert set(body.values()) == {0}
