"""Applying candidates: one, every one in a batch, or all siblings of a shared operand in turn."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.graph import graph as graph_lib
from xrl_jax.graph import ops, passes
from xrl_jax.graph.graph import TensorGraph, args_of
from xrl_jax.rewrite.bind import bind
from xrl_jax.rewrite.instantiate import instantiate
from xrl_jax.rewrite.match import Candidates
from xrl_jax.rewrite.pairs import independent
from xrl_jax.rewrite.table import P, Q, RuleTable


class Applied(NamedTuple):
    """The result of a rewrite."""

    graph: TensorGraph
    changed: jax.Array  # [N] bool, nodes made, removed or with other arguments
    ok: jax.Array  # bool; where false the graph is the old one (no match there, or no free slots)
    full: jax.Array  # bool, the bucket has no room: grow the graph and try again


def apply(
    table: RuleTable,
    graph: TensorGraph,
    entry: jax.Array,
    root: jax.Array,
    partner: jax.Array,
) -> Applied:
    """Rewrite at one place; pure, jittable and vmappable over candidates or graphs.

    The candidate may come from an earlier graph: where it matches no more, or two roots have come
    to depend on each other, nothing is done.

    Args:
      entry, root, partner: one candidate (`Candidates`); partner 0 for a rule with one root.
    """
    entry_ok = entry >= 0
    entry = jnp.maximum(entry, 0)
    bound, matched = bind(table, entry, root, partner, graph)
    new = instantiate(table, jnp.where(matched & entry_ok, entry, -1), bound, graph)
    old_nodes, n = graph.nodes, graph.nodes.op.shape[0]
    used = new.nodes.op != ops.HOLE
    is_free = (old_nodes.op == ops.HOLE) & (jnp.arange(n) > 0)
    free = jnp.nonzero(is_free, size=Q, fill_value=0)[0].astype(jnp.int32)
    # Unused new nodes take no slot: the k-th used one gets the k-th free slot.
    slots = jnp.where(used, free[jnp.maximum(jnp.cumsum(used) - 1, 0)], 0)
    full = jnp.any(used & (slots == 0))
    fits = entry_ok & matched & new.ok & independent(graph, root, partner)
    ok = fits & ~full
    where = jnp.concatenate([bound, slots])  # code -> slot
    # Out of range what is dropped; no two alike, so that nothing need be put into an order.
    target = jnp.where(ok & used, slots, n + jnp.arange(Q))

    def put(field: jax.Array, values: jax.Array) -> jax.Array:
        values = values.astype(field.dtype)
        return field.at[target].set(values, mode="drop", unique_indices=True)

    nodes = jax.tree.map(put, old_nodes, new.nodes)
    args, outputs = args_of(graph), graph.globals.outputs
    for role in range(2):
        to = table.root_to[entry, role]
        old = jnp.where(ok & (to >= 0), bound[role * P], -2)
        args = jnp.where(args == old, where[jnp.maximum(to, 0)], args)
        outputs = jnp.where(outputs == old, where[jnp.maximum(to, 0)], outputs)
    new_args = jnp.where(new.args >= 0, where[jnp.maximum(new.args, 0)], 0)
    args = put(args, new_args)
    depth = _place(graph.globals.depth, new_args, jnp.where(ok, slots, 0), used)
    rewritten = graph._replace(
        nodes=nodes, globals=graph.globals._replace(outputs=outputs, depth=depth)
    )
    rewritten = graph_lib.with_args(rewritten, args)
    rewritten = passes.remove_dead(passes.raise_depths(rewritten))
    changed = jnp.any(args_of(rewritten) != args_of(graph), axis=1) | (
        rewritten.nodes.op != old_nodes.op
    )
    changed = put(changed, used)
    return Applied(rewritten, changed, ok, fits & full)


def _place(depth: jax.Array, new_args: jax.Array, slots: jax.Array, used: jax.Array) -> jax.Array:
    """Depths of the new nodes, just above their arguments."""

    def one(q: jax.Array, depth: jax.Array) -> jax.Array:
        above = jnp.max(depth[new_args[q]]) + 1
        slot = jnp.where(used[q] & (slots[q] > 0), slots[q], depth.shape[0])
        return depth.at[slot].set(above, mode="drop")

    return jax.lax.fori_loop(0, Q, one, depth)


def apply_all(table: RuleTable, graph: TensorGraph, candidates: Candidates) -> Applied:
    """Every candidate applied to the same graph, as a batch [M, ...]."""

    def one(entry: jax.Array, root: jax.Array, partner: jax.Array) -> Applied:
        return apply(table, graph, entry, root, partner)

    return jax.vmap(one)(candidates.entry, candidates.root, candidates.partner)
