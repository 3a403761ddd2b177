"""Short scans become calls of their bodies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.bindings import Call
from xrl_jax.graph.graph import Node, nodes_of
from xrl_jax.program.check import check_program
from xrl_jax.program.program import Program, to_jax
from xrl_jax.transform import unroll
from xrl_jax.transform.unroll import unrolled

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
WEIGHTS = np.linspace(-1, 1, 36, dtype=np.float32).reshape(4, 3, 3)


def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
    return lax.scan(lambda y, w: (jnp.tanh(y @ w) + y, None), x, weights)[0]


def kinds(program: Program) -> list[str]:
    """Return the kinds of the calls in the main graph."""
    calls = [program.bindings[n.ref] for n in nodes_of(program.graph)[0] if n.op == "call"]
    return [c.kind for c in calls if isinstance(c, Call)]


def sources(program: Program) -> list[Node]:
    return [n for n in nodes_of(program.bodies[0].graph)[0] if n.op in ("input", "weight")]


def test_layers_under_a_scan_become_one_body_called_per_layer() -> None:
    program = unrolled(from_jax(layers, X, WEIGHTS, weights=(1,)))
    assert kinds(program) == ["inline"] * 4
    assert [b.count for b in program.bodies] == [4.0]
    # Rows of the weights are weights, and the carried value is the result of the previous step.
    assert sorted((n.op, n.attrs[0]) for n in sources(program)) == [("input", 1), ("weight", 0)]


def stacks(x, weights):
    return lax.scan(lambda y, w: (y @ w, (y, jnp.sum(y))), x, weights)


def backwards(x, weights):
    return lax.scan(lambda y, w: (y @ w + 1, y * 2), x, weights, reverse=True)


def nothing_scanned(x, weights):
    return lax.scan(lambda y, _: (y @ weights[0], None), x, None, length=3)[0]


def nothing_carried(x, weights):
    return lax.scan(lambda _, w: (None, x @ w), None, weights)[1]


def nested(x, weights):
    def outer(y, _):
        return lax.scan(lambda z, w: (z @ w, z), y, weights)

    return lax.scan(outer, x, None, length=2)


def many(x, weights):
    return lax.scan(lambda y, i: (y + i, jnp.sin(y)), x, jnp.arange(20.0))


@pytest.mark.parametrize(
    "fn", [layers, stacks, backwards, nothing_scanned, nothing_carried, nested, many]
)
def test_unrolling_computes_the_same(fn: Callable[..., Any]) -> None:
    program = unrolled(from_jax(fn, X, WEIGHTS, weights=(1,)))
    check_program(program)
    assert set(kinds(program)) == {"inline"}
    got, want = jax.jit(to_jax(program))(X, WEIGHTS), jax.jit(fn)(X, WEIGHTS)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-6), got, want)


def test_long_scans_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x):
        return lax.scan(lambda y, _: (y * 2, None), x, None, length=65)[0]

    assert kinds(unrolled(from_jax(fn, X))) == ["scan"]
    monkeypatch.setattr(unroll, "MOST_NODES", 32)
    assert kinds(unrolled(from_jax(layers, X, WEIGHTS, weights=(1,)))) == ["scan"]


def test_scans_share_the_limit_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x, weights):
        return layers(layers(x, weights), weights)

    program = from_jax(fn, X, WEIGHTS, weights=(1,), fold=False)
    size = 4 * (len(nodes_of(program.bodies[0].graph)[0]) + 2 * 3)
    monkeypatch.setattr(unroll, "MOST_NODES", len(nodes_of(program.graph)[0]) + size)
    assert kinds(unrolled(program)) == ["inline"] * 4 + ["scan"]


def test_scans_with_effects_and_of_keys_stay() -> None:
    def prints(x):
        def step(y, _):
            jax.debug.print("{}", y[0, 0])
            return y + 1, None

        return lax.scan(step, x, None, length=2)[0]

    def draws(x):
        keys = jax.random.split(jax.random.key(0), 3)
        return lax.scan(lambda y, k: (y + jax.random.normal(k, y.shape), None), x, keys)[0]

    assert kinds(unrolled(from_jax(prints, X))) == ["scan"]
    assert kinds(unrolled(from_jax(draws, X))) == ["scan"]
