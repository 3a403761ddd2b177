"""Local search by sharing, inside jit: classes switch together to e-nodes that read the same class.

A merged product pays only if all products that it replaces are read from it. So for each class that
is not needed yet, the gain is estimated of all needed classes reading it that would gain by that;
the best estimate is tried, and kept if the exact cost falls (`extraction.shared` is the same on the
host, without estimates).

Letters: N slots, A arguments.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.egraph import arrays
from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.order import Order, each_at, order_chosen
from xrl_jax.egraph.tree_cost import cheapest

_STEPS = 16  # most switches that are tried
_FAILURES = 2  # in a row
_LEAST_GAIN = 1e-3  # of the cost: a smaller one is not worth a try
_DEPTH = 4  # arguments of arguments that are counted as saved


class _Shared(NamedTuple):
    """A choice under improvement."""

    node: jax.Array  # [N] the e-node of each class, in the slot of the class's name
    cost: jax.Array  # [], exact
    tried: jax.Array  # [N] bool, classes that did not pay
    left: jax.Array  # int32, tries
    failures: jax.Array  # int32, in a row


class Pairs(NamedTuple):
    """Who reads what: an entry for each argument of each e-node."""

    read: jax.Array  # [N A] class that is read; 0 for none
    by: jax.Array  # [N A] class of the reader
    first: jax.Array  # [N A] the first entry with the same two classes


def pairs_of(graph: EGraph, usable: jax.Array) -> Pairs:
    """Return who reads what among usable e-nodes [N]."""
    read = jnp.where(usable[:, None], graph.args, HOLE).reshape(-1)
    by = jnp.repeat(graph.parent, graph.args.shape[1])
    # Equal pairs are found as equal e-nodes are.
    column = by[:, None]
    nodes = EGraph(read, column, column, column, by, jnp.int32(len(read)), graph.roots)
    return Pairs(read, by, arrays.table_of(nodes)[1])


def total(graph: EGraph, costs: jax.Array, node: jax.Array) -> jax.Array:
    """Return the cost [] of a choice; infinite where it has a cycle, or a class has no e-node."""
    order = order_chosen(graph, node)
    there = jnp.arange(graph.bucket) < order.n
    missing = jnp.any(there & (order.slots == HOLE))
    cost = jnp.sum(jnp.where(there, costs[order.slots], 0.0))
    return jnp.where(order.cyclic | missing, jnp.inf, cost)


def needed_by(graph: EGraph, chosen: Order) -> jax.Array:
    """Return which classes [N] are needed under a choice with this order."""
    there = jnp.arange(graph.bucket) < chosen.n
    classes = jnp.where(there, graph.parent[chosen.slots], HOLE)
    return jnp.zeros(graph.bucket, bool).at[classes].set(True).at[HOLE].set(False)


def shared(
    graph: EGraph, pairs: Pairs, order: Order, costs: jax.Array, node: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the cost [] of an improved choice, and the choice [N].

    Args:
      costs: [N] float32, not negative; infinite for e-nodes that must not be chosen.
      node: [N], acyclic, an e-node for every class that has one.
    """

    def step(state: _Shared) -> _Shared:
        y, gain, trial = _best_switch(graph, pairs, order, costs, state)
        worth = gain > _LEAST_GAIN * state.cost
        cost = jax.lax.cond(worth, lambda: total(graph, costs, trial), lambda: jnp.float32(jnp.inf))
        better = cost < state.cost * (1 - 1e-6)
        return _Shared(
            jnp.where(better, trial, state.node),
            jnp.where(better, cost, state.cost),
            jnp.where(better, state.tried, state.tried.at[y].set(True)),
            state.left - 1,
            jnp.where(better, 0, jnp.where(worth, state.failures + 1, _FAILURES)),
        )

    start = _Shared(
        node,
        total(graph, costs, node),
        jnp.zeros(graph.bucket, bool),
        jnp.int32(_STEPS),
        jnp.int32(0),
    )
    done = jax.lax.while_loop(lambda s: (s.failures < _FAILURES) & (s.left > 0), step, start)
    return done.cost, done.node


def _best_switch(
    graph: EGraph, pairs: Pairs, order: Order, costs: jax.Array, state: _Shared
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the class that is most worth reading, the estimated gain, and the choice in which all
    classes read it that gain by that.
    """
    n, n_args = graph.bucket, graph.args.shape[1]
    present = order_chosen(graph, state.node)
    needed = needed_by(graph, present)
    extra = cheapest(graph, costs, needed, order).cost  # beside what is needed anyway
    chosen = graph.args[state.node]
    reads = jnp.where(needed[:, None], chosen, HOLE)
    readers = jnp.zeros(n, jnp.int32).at[reads].add(1).at[graph.roots].add(1)
    own = jnp.where(needed, costs[state.node], 0.0)
    freed = own
    for _ in range(_DEPTH):
        only = (readers[chosen] == 1) & (chosen > 0)
        freed = own + jnp.sum(jnp.where(only, freed[chosen], 0.0), axis=1)
    # What the class of each e-node saves by switching to it; arguments that it reads as well stay.
    c = graph.parent
    kept = jnp.any(chosen[c][:, :, None] == graph.args[:, None, :], axis=2)
    only = (readers[chosen[c]] == 1) & (chosen[c] > 0) & ~kept
    saved = own[c] + jnp.sum(jnp.where(only, freed[chosen[c]], 0.0), axis=1)
    args_extra = jnp.where(graph.args > 0, extra[graph.args], 0.0)
    paid = costs + jnp.sum(args_extra, axis=1)
    possible = needed[c] & (state.node[c] != jnp.arange(n)) & jnp.isfinite(paid)
    gain = jnp.where(possible, saved - paid, -jnp.inf)
    # Without what the shared argument costs, which is paid once.
    each = jnp.where(possible[:, None], gain[:, None] + args_extra, -jnp.inf).reshape(-1)
    best = jnp.full(n * n_args, -jnp.inf).at[pairs.first].max(each)
    worth = (best > 0) & (pairs.read != HOLE)
    sums = jnp.zeros(n).at[pairs.read].add(jnp.where(worth, best, 0.0))
    open_to = ~needed & ~state.tried & jnp.isfinite(extra)
    sums = jnp.where(open_to.at[HOLE].set(False), sums - extra, -jnp.inf)
    y = jnp.argmax(sums)
    # All classes with a gain by reading y switch to the e-node with the largest.
    entry = jnp.arange(n * n_args)
    taken = (pairs.read == y) & (each > 0) & (each >= best[pairs.first])
    slot = (
        jnp.full(n, n, jnp.int32)
        .at[jnp.where(taken, pairs.by, n)]
        .min((entry // n_args).astype(jnp.int32), mode="drop")
    )
    switched = slot < n
    # What y is made of must not be made of what switches.
    above = _above(graph, present, switched)
    unread = jnp.where(above[graph.parent], jnp.inf, costs)
    made_of = cheapest(graph, unread, needed & ~above, order).node
    trial = jnp.where(needed, state.node, made_of)
    return y, sums[y], jnp.where(switched, slot, trial)


def _above(graph: EGraph, chosen: Order, classes: jax.Array) -> jax.Array:
    """Return these classes [N] and those that a choice with this order makes of them."""

    def read(slot: jax.Array, above: jax.Array) -> jax.Array:
        return jnp.any(each_at(above, graph.args[slot]))

    def write(slot: jax.Array, below: jax.Array, above: jax.Array) -> jax.Array:
        return above.at[graph.parent[slot]].max(below)

    return chosen.passed_on(read, write, classes.at[HOLE].set(False))
