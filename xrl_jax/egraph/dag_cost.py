"""Extraction under costs in which shared parts count once, inside jit: the reward of searches.

An e-node that several classes may read is worth more than its tree shows, since it is paid once.
So its cost is divided by a power of the number of classes that may read its class; with each power,
trees are made cheapest (`extraction.discounted` is the same on the host). The choice with the least
exact cost is improved by `sharing`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.sharing import needed_by, pairs_of, shared, total
from xrl_jax.egraph.tree_cost import Choice, cheapest
from xrl_jax.runtime.engine_jit import engine_jit

POWERS = (0.0, 0.5, 1.0)
_LEAST = 1e-6  # of the largest cost: e-nodes that cost nothing still count as a step


def cheapest_shared(graph: EGraph, costs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the least cost [] found of all roots together, and its choice [N]: the e-node of each
    class, in the slot of the class's name.

    Args:
      graph: rebuilt.
      costs: [N] float32, not negative; infinite for e-nodes that must not be chosen.
    """
    reads_itself = jnp.any(graph.args == graph.parent[:, None], axis=1)
    usable = (graph.op != HOLE) & ~reads_itself & jnp.isfinite(costs)
    largest = jnp.max(jnp.where(usable, costs, 0.0))
    least = _LEAST * jnp.maximum(largest, 1e-30)
    own = jnp.where(usable, jnp.maximum(costs, least), jnp.inf)
    pairs = pairs_of(graph, usable)
    once = (pairs.read != HOLE) & (pairs.first == jnp.arange(len(pairs.read)))
    readers = jnp.zeros(graph.bucket, jnp.float32).at[pairs.read].add(once)
    many = jnp.maximum(readers, 1)[graph.parent]
    discounts = jnp.stack([many**power for power in POWERS])
    choices: Choice = jax.vmap(functools.partial(cheapest, graph))(own / discounts)
    totals = jax.vmap(functools.partial(total, graph, own))(choices.node)
    node = choices.node[jnp.argmin(totals)]
    _, node = shared(graph, pairs, own, node)
    needed = needed_by(graph, node)
    return jnp.sum(jnp.where(needed, costs[node], 0.0)), node


cheapest_shared_now = engine_jit(cheapest_shared)
