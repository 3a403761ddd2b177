"""Extraction under costs in which shared parts count once, inside jit: the reward of searches.

An e-node that several classes may read is worth more than its tree shows, since it is paid once.
So its cost is divided by a power of the number of classes that may read its class; with each power,
trees are made cheapest (`extraction.discounted` is the same on the host). The choice with the least
exact cost is improved by `sharing`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.order import Order, order_of
from xrl_jax.egraph.sharing import Pairs, pairs_of, shared, total
from xrl_jax.egraph.tree_cost import Choice, cheapest
from xrl_jax.runtime.engine_jit import engine_jit

POWERS = (0.0, 0.5, 1.0)
_LEAST = 1e-6  # of the largest cost: e-nodes that cost nothing still count as a step


class Structure(NamedTuple):
    """What extraction needs of an e-graph besides costs."""

    usable: jax.Array  # [N] bool, e-nodes that do not read their own class
    pairs: Pairs
    order: Order


def structure_of(graph: EGraph) -> Structure:
    """Return the `Structure` of a rebuilt e-graph."""
    usable = (graph.op != HOLE) & ~jnp.any(graph.args == graph.parent[:, None], axis=1)
    return Structure(usable, pairs_of(graph, usable), order_of(graph))


def discounted(
    graph: EGraph, of: Structure, costs: jax.Array, start: jax.Array | None = None
) -> jax.Array:
    """Return a choice [N] of little cost: the e-node of each class, in the slot of its name.

    Args:
      costs: [N] float32, not negative; infinite for e-nodes that must not be chosen.
      start: [N], an acyclic choice of some classes' e-nodes, which is used if it is cheaper.
    """
    own, pairs = _positive(of, costs), of.pairs
    once = (pairs.read != HOLE) & (pairs.first == jnp.arange(len(pairs.read)))
    readers = jnp.zeros(graph.bucket, jnp.float32).at[pairs.read].add(once)
    many = jnp.maximum(readers, 1)[graph.parent]
    discounts = jnp.stack([many**power for power in POWERS])
    choices: Choice = jax.lax.map(lambda c: cheapest(graph, c, order=of.order), own / discounts)
    nodes = choices.node
    if start is not None:
        rest = jnp.where(start > 0, start, nodes[0])  # acyclic: e-nodes of `start` read no others
        nodes = jnp.concatenate([nodes, rest[None]])
    totals = jax.lax.map(lambda node: total(graph, own, node), nodes)
    return nodes[jnp.argmin(totals)]


def cheapest_shared(
    graph: EGraph, of: Structure, costs: jax.Array, start: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the least cost [] found of all roots together, and its choice [N]; the cost is
    infinite if they cannot be built.

    Args:
      costs, start: see `discounted`.
    """
    node = discounted(graph, of, costs, start)
    _, node = shared(graph, of.pairs, of.order, _positive(of, costs), node)
    return total(graph, costs, node), node


def _positive(of: Structure, costs: jax.Array) -> jax.Array:
    usable = of.usable & jnp.isfinite(costs)
    largest = jnp.max(jnp.where(usable, costs, 0.0))
    return jnp.where(usable, jnp.maximum(costs, _LEAST * jnp.maximum(largest, 1e-30)), jnp.inf)


@engine_jit
def cheapest_shared_now(graph: EGraph, costs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `cheapest_shared` of a rebuilt e-graph."""
    return cheapest_shared(graph, structure_of(graph), costs)
