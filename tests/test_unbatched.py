"""Pure functions take one graph, candidate or state, and refuse a batch with a clear error."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.engine.harness import DOUBLE, graph_of, rules_of
from tests.rl.test_env import negated, own, params_of
from xrl_jax.cost.roofline import cost_table
from xrl_jax.engine.apply import apply
from xrl_jax.engine.match import match, rematch
from xrl_jax.graph.graph import TensorGraph
from xrl_jax.rl.env import Action, EnvParams, reset, step
from xrl_jax.rl.features import observe
from xrl_jax.rl.networks import NetworkConfig, PolicyNetwork

KEY = jax.random.key(0)


def one() -> TensorGraph:
    """Return the graph of tanh(x)."""
    return graph_of(
        """
        %1: float32[3] = input() ref=@0
        %2: float32[3] = tanh(%1)
        return %2
        """
    )


def two(value: Any) -> Any:
    """Return a batch of two copies of a value."""
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), value)


@cache
def environment() -> EnvParams:
    return params_of(negated(), own(), slots=8)


def refused(message: str, function: Any, *args: Any) -> None:
    with pytest.raises(AssertionError, match=message):
        jax.eval_shape(function, *args)


def test_matching_a_batch_is_refused() -> None:
    refused("use jax.vmap for a batch of graphs", match, rules_of(DOUBLE).table, two(one()))


def test_rematching_needs_a_flag_for_each_node_of_the_graph() -> None:
    table, graph = rules_of(DOUBLE).table, one()
    masks = jnp.zeros((len(graph.nodes.op), table.n_words), jnp.uint32)
    refused("a row for each of 128 nodes", rematch, table, graph, masks, jnp.zeros(64, bool))


def test_applying_several_candidates_at_once_is_refused() -> None:
    entries = jnp.zeros(2, jnp.int32)
    refused("use jax.vmap for several", apply, rules_of(DOUBLE).table, one(), *[entries] * 3)


def test_pricing_a_batch_is_refused() -> None:
    refused("use jax.vmap for a batch of graphs", cost_table({}).priced, two(one()))


def test_stepping_with_several_actions_is_refused() -> None:
    params = environment()
    state = jax.eval_shape(reset, KEY, params)
    actions = Action(jnp.zeros(2, jnp.int32), jnp.ones(8, bool))
    refused("index|shape", step, KEY, state, actions, params)


def test_a_policy_refuses_a_batch_of_observations() -> None:
    params = environment()
    seen = jax.eval_shape(lambda: observe(reset(KEY, params), params))
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), seen)
    network = partial(PolicyNetwork(NetworkConfig(n_rules=2)).init, KEY)
    refused("one observation at a time", network, batch)
