"""The policy's network gives the same outputs with wide steps, as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from tests.rl.test_env import RESET, negated, own, params_of
from xrl_jax.rl.features import N_NODE, GraphFeatures, Observation, observe
from xrl_jax.rl.neighbours import neighbours_of
from xrl_jax.rl.networks import NetworkConfig, Output, PolicyNetwork
from xrl_jax.rl.rows import rows
from xrl_jax.runtime import engine_jit

SIZES = NetworkConfig(width=8, layers=2, heads=2, n_rules=2)
INIT = jax.jit(PolicyNetwork(SIZES).init)
# Node 3 reads 1 and 2, node 4 reads 3 twice; the last slot holds no edge.
GRAPH = GraphFeatures(
    lowering=jnp.array([0, 5, 5, 5, 5], jnp.int32),
    values=jnp.zeros((5, N_NODE)),
    senders=jnp.array([1, 2, 3, 3, 0], jnp.int32),
    receivers=jnp.array([3, 3, 4, 4, 0], jnp.int32),
)
VALUES = jnp.array([100.0, 1.0, 2.0, 4.0, 8.0])[:, None]


def on_gpu() -> str:
    return "gpu"


@pytest.fixture(params=[False, True], ids=["narrow", "wide"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(engine_jit, "platform", on_gpu)


def observed() -> Observation:
    given = params_of(negated(), own(), slots=4)
    return jax.jit(observe)(RESET(jax.random.key(0), given), given)


def loss(seen: Observation, weights: Any) -> jax.Array:
    said: Any = PolicyNetwork(SIZES).apply(weights, seen)
    logits, value = Output(*said)
    # Logits of actions that are not allowed are -1e9.
    return jnp.sum(jnp.maximum(logits.index, -10.0)) + jnp.sum(logits.mask) + value


@pytest.mark.usefixtures("steps")
def test_neighbour_sums_follow_edges_in_both_directions() -> None:
    along, against = neighbours_of(GRAPH)
    np.testing.assert_array_equal(along(VALUES)[:, 0], [0, 0, 0, 3, 8])
    np.testing.assert_array_equal(against(VALUES)[:, 0], [0, 4, 4, 16, 0])


@pytest.mark.usefixtures("steps")
def test_rows_that_are_read_twice_get_both_gradients() -> None:
    table, index = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), jnp.array([[2, 0], [2, 2]])
    np.testing.assert_array_equal(rows(table, index)[0], [[5, 6], [1, 2]])
    factors = jnp.array([[1.0, 10.0], [100.0, 1000.0]])[..., None]
    found = jax.grad(lambda t: jnp.sum(factors * rows(t, index)))(table)
    np.testing.assert_array_equal(found, [[10, 10], [0, 0], [1101, 1101]])


def test_wide_steps_give_the_same_loss_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = observed()
    weights = INIT(jax.random.key(0), seen)
    narrow = jax.jit(jax.value_and_grad(loss, argnums=1))(seen, weights)
    monkeypatch.setattr(engine_jit, "platform", on_gpu)
    wide = jax.jit(jax.value_and_grad(loss, argnums=1))(seen, weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), narrow, wide)


def test_gradients_of_wide_steps_contain_no_float_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """One such sum takes a GPU as long as everything else if it has to be deterministic."""
    seen = observed()
    weights = INIT(jax.random.key(0), seen)

    def traced() -> Any:
        return jax.make_jaxpr(lambda w: jax.grad(loss, argnums=1)(seen, w))(weights)

    assert list(scattered_floats(traced()))
    monkeypatch.setattr(engine_jit, "platform", on_gpu)
    assert not list(scattered_floats(traced()))


def scattered_floats(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("scatter") and eqn.outvars[0].aval.dtype == jnp.float32:
            yield str(eqn)
        for held in jax.tree.leaves(eqn.params, is_leaf=lambda p: isinstance(p, Jaxpr)):
            if isinstance(held, ClosedJaxpr | Jaxpr):
                yield from scattered_floats(held)
