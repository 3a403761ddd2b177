"""Extraction under costs in which shared parts count once, inside jit: the reward of searches.

An e-node that several classes may read is worth more than its tree shows, since it is paid once.
So its cost is divided by a power of the number of classes that may read its class; with each power,
trees are made cheapest, and the choice with the least exact cost counts (`extraction.discounted` is
the same on the host).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from xrl_jax.egraph import arrays
from xrl_jax.egraph.arrays import HOLE, EGraph
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
    costs = jnp.where(usable, costs, jnp.inf)
    largest = jnp.max(jnp.where(usable, costs, 0.0))
    own = jnp.maximum(costs, _LEAST * jnp.maximum(largest, 1e-30))
    many = jnp.maximum(_reading_classes(graph, usable), 1)[graph.parent]
    discounts = jnp.stack([many**power for power in POWERS])
    choices: Choice = jax.vmap(functools.partial(cheapest, graph))(own / discounts)
    totals = jax.vmap(functools.partial(_total, graph, costs))(choices.node)
    best = jnp.argmin(totals)
    return totals[best], choices.node[best]


cheapest_shared_now = engine_jit(cheapest_shared)


def _reading_classes(graph: EGraph, usable: jax.Array) -> jax.Array:
    """Return for each class [N] how many classes have a usable e-node that reads it."""
    read = jnp.where(usable[:, None], graph.args, HOLE).reshape(-1)
    by = jnp.repeat(graph.parent, graph.args.shape[1])
    pairs = EGraph(  # equal pairs are found as equal e-nodes are
        read, by[:, None], by[:, None], by[:, None], by, jnp.int32(len(read)), graph.roots
    )
    _, first = arrays.table_of(pairs)
    once = (read != HOLE) & (first == jnp.arange(len(read)))
    return jnp.zeros(graph.bucket, jnp.float32).at[read].add(once)


def _total(graph: EGraph, costs: jax.Array, node: jax.Array) -> jax.Array:
    """Return the cost [] of a choice [N]; infinite where a class that is needed has no e-node."""
    args = graph.args[node]

    def below(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        needed, _ = carry
        # Slot 0 collects what is not needed.
        read = jnp.where(needed[:, None], args, HOLE)
        new = needed.at[read].set(True).at[HOLE].set(False)
        return new, jnp.any(new != needed)

    start = jnp.zeros(graph.bucket, bool).at[graph.roots].set(True), jnp.bool_(True)
    needed, _ = jax.lax.while_loop(lambda c: c[1], below, start)
    own = jnp.where(node != HOLE, costs[node], jnp.inf)
    return jnp.sum(jnp.where(needed, own, 0.0))
