"""Values that are never negative, within a graph and through folded bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.program.host import disassemble
from xrl_jax.transform.signs import never_negative

X = np.ones((2, 4), np.float32)


def result(fn: Callable[..., Any], *args: Any) -> bool:
    """Return whether the result of a function is known to be never negative."""
    host = disassemble(from_jax(fn, *args))
    return never_negative(host)[0][host.main.outputs[0]]


@pytest.mark.parametrize(
    "fn",
    [
        jax.nn.relu,
        jax.nn.sigmoid,
        lambda x: jnp.clip(x, 0, 6),
        lambda x: x * x,
        lambda x: jnp.mean(jnp.exp(x), axis=1),
        lambda x: jnp.concatenate([jnp.abs(x), jax.nn.relu(x)], axis=1).T[1:],
        lambda x: jax.nn.relu(x) + jnp.sqrt(x),
        lambda x: jnp.pad(jax.nn.relu(x), 1),
        lambda x: jnp.where(x > 1, jnp.exp(x), 0.0),
    ],
)
def test_known(fn: Callable[..., Any]) -> None:
    assert result(fn, X)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x,
        jnp.tanh,
        jax.nn.gelu,
        lambda x: jax.nn.relu(x) - 1.0,
        lambda x: jax.nn.relu(x) * x,
        lambda x: jnp.clip(x, -1, 6),
        lambda x: jnp.pad(jax.nn.relu(x), 1, constant_values=-1.0),
        lambda x: jnp.log(jax.nn.relu(x)),
        lambda x: jnp.where(x > 1, jnp.exp(x), x),
    ],
)
def test_unknown(fn: Callable[..., Any]) -> None:
    assert not result(fn, X)


def layers(last: Callable[[Any], Any]) -> Callable[..., Any]:
    def fn(weights: list[Any], x: Any) -> Any:
        x = jax.nn.relu(x)
        for w in weights:
            x = last(jnp.tanh(jnp.sin(jnp.cos(x @ w) * 2.0 + 1.0) / 3.0))
        return x

    return fn


@pytest.mark.parametrize(("last", "known"), [(jax.nn.relu, True), (jnp.sin, False)])
def test_the_input_of_a_folded_layer_is_the_result_of_the_one_before(
    last: Callable[[Any], Any], known: bool
) -> None:
    weights = [np.eye(4, dtype=np.float32)] * 8
    program = from_jax(layers(last), weights, X, weights=0)
    host = disassemble(program)
    assert len(host.bodies) == 1
    body = never_negative(host)[1]
    (product,) = (n for n in host.bodies[0].nodes if n.op == "dot")
    assert body[product.args[0]] == known
