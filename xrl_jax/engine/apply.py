"""Applies one candidate to a graph; under vmap, a batch of candidates or graphs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.engine import interpreter
from xrl_jax.engine.bind import bind
from xrl_jax.engine.instantiate import instantiate
from xrl_jax.engine.pairs import independent
from xrl_jax.graph import graph as graph_lib
from xrl_jax.graph import ops, passes
from xrl_jax.graph.batch import largest_of_batch
from xrl_jax.graph.bits import first_set
from xrl_jax.graph.graph import (
    Nodes,
    TensorGraph,
    args_of,
    assert_one,
    assert_one_candidate,
)
from xrl_jax.graph.view import views_at
from xrl_jax.language.table import P, Q, RuleTable
from xrl_jax.lower import table as lower_table


class Applied(NamedTuple):
    """The result of a rewrite."""

    graph: TensorGraph
    changed: jax.Array  # [N] bool, nodes created, removed or given other arguments
    ok: jax.Array  # bool; if false, the graph is unchanged (no match, or no free slots)
    full: jax.Array  # bool, the bucket has too few free slots: grow the graph and try again
    uses: jax.Array  # [N] int32, `use_counts` of `graph`


def apply(
    table: RuleTable,
    graph: TensorGraph,
    variant: jax.Array,
    root: jax.Array,
    partner: jax.Array,
) -> Applied:
    """Rewrite the graph at one place (pure, jittable, vmappable over candidates or graphs).

    The candidate may come from an earlier graph. The graph is left unchanged if the pattern does
    not match any more, or if of its two roots one now depends on the other.

    Args:
      variant, root, partner: one candidate (see `Candidates`); partner is 0 for a single-root rule.
    """
    assert_one(graph)
    assert_one_candidate(variant, root, partner)
    bound, matched = bind(table, jnp.maximum(variant, 0), root, partner, graph)
    matched &= _may_choose(table, graph, jnp.maximum(variant, 0), root)
    new = instantiate(table, jnp.where(matched, variant, -1), bound, graph)
    candidate = Instantiated(variant, root, partner, new.nodes, new.args)
    return _with_new(table, graph, passes.use_counts(graph), bound, candidate, new.ok)


def _may_choose(
    table: RuleTable, graph: TensorGraph, variant: jax.Array, root: jax.Array
) -> jax.Array:
    """Return whether a rule that chooses a lowering may do so at `root`; true for other rules.

    Matching has already checked this for a candidate of the same graph.
    """
    choice = table.variant_choice[variant]
    return (choice < 0) | lower_table.fits(views_at(graph, root))[choice]


class Instantiated(NamedTuple):
    """A candidate (or [K] candidates) of a graph with the nodes that it creates there."""

    variant: jax.Array  # -1 for none, or where it does not apply
    root: jax.Array
    partner: jax.Array
    nodes: Nodes  # [Q, ...]; op 0 for unused ones
    args: jax.Array  # [Q, A] binding codes


def instantiated(
    table: RuleTable, graph: TensorGraph, variant: jax.Array, root: jax.Array, partner: jax.Array
) -> Instantiated:
    """Return a candidate of this graph together with the nodes that it creates."""
    assert_one(graph)
    assert_one_candidate(variant, root, partner)
    bound, matched = bind(table, jnp.maximum(variant, 0), root, partner, graph)
    new = instantiate(table, jnp.where(matched, variant, -1), bound, graph)
    return Instantiated(jnp.where(new.ok, variant, -1), root, partner, new.nodes, new.args)


class Match(NamedTuple):
    """How a candidate matches in a graph: its binding, and the features of the bound nodes."""

    bound: jax.Array  # [2P] slots
    matched: jax.Array  # bool
    features: jax.Array  # [2P, F], features of the bound nodes (`interpreter.features`)


def match_in(table: RuleTable, graph: TensorGraph, candidate: Instantiated) -> Match:
    """Return how the candidate matches in this graph."""
    variant, root, partner, *_ = candidate
    bound, matched = bind(table, jnp.maximum(variant, 0), root, partner, graph)
    features = interpreter.features(jax.tree.map(lambda f: f[bound], graph.nodes))
    return Match(bound, matched, features)


def apply_instantiated(
    table: RuleTable,
    graph: TensorGraph,
    uses: jax.Array,
    candidate: Instantiated,
    features: jax.Array,
) -> Applied:
    """Apply a candidate as `apply` does, with its new nodes given instead of computed.

    Nothing is done if the features of the bound nodes differ from `features`, since the candidate
    might create other nodes there.

    Args:
      uses: [N], `use_counts` of the graph.
      features: those of the bound nodes (see `match_in`) in the graph that `candidate` was
        instantiated in.
    """
    now = match_in(table, graph, candidate)
    ok = (candidate.variant >= 0) & now.matched & jnp.all(now.features == features)
    return _with_new(table, graph, uses, now.bound, candidate, ok)


def _with_new(
    table: RuleTable,
    graph: TensorGraph,
    uses: jax.Array,
    bound: jax.Array,
    new: Instantiated,
    fits: jax.Array,
) -> Applied:
    """Replace the matched roots by the candidate's new nodes, if `fits`."""
    old_nodes, n = graph.nodes, graph.nodes.op.shape[0]
    used = new.nodes.op != ops.HOLE
    is_free = (old_nodes.op == ops.HOLE) & (jnp.arange(n) > 0)
    free = first_set(is_free, Q)
    # Unused new nodes take no slot: the k-th used one gets the k-th free slot.
    slots = jnp.where(used, free[jnp.maximum(jnp.cumsum(used) - 1, 0)], 0)
    full = jnp.any(used & (slots == 0))
    fits &= independent(graph, new.root, new.partner)
    ok = fits & ~full
    where = jnp.concatenate([bound, slots])  # code -> slot
    # Updates to be dropped get distinct targets out of range: the scatter may then take its
    # indices as unique and need not sort them.
    target = jnp.where(ok & used, slots, n + jnp.arange(Q))

    def put(field: jax.Array, values: jax.Array) -> jax.Array:
        values = values.astype(field.dtype)
        return field.at[target].set(values, mode="drop", unique_indices=True)

    nodes = jax.tree.map(put, old_nodes, new.nodes)
    args, outputs, depth = args_of(graph), graph.globals.outputs, graph.globals.depth
    new_args = jnp.where(new.args >= 0, where[jnp.maximum(new.args, 0)], 0)
    depth = _place(depth, new_args, jnp.where(ok, slots, 0), used)
    too_low = jnp.zeros(n, bool)
    for which in range(2):
        to = table.root_to[jnp.maximum(new.variant, 0), which]
        old = jnp.where(ok & (to >= 0), bound[which * P], -2)
        instead = where[jnp.maximum(to, 0)]
        reads = args == old
        args = jnp.where(reads, instead, args)
        too_low |= jnp.any(reads, axis=1) & (depth <= depth[instead])
        outputs = jnp.where(outputs == old, instead, outputs)
        moved = jnp.where(old >= 0, uses[old], 0)  # 0 where no root is replaced
        uses = uses.at[instead].add(moved).at[old].add(-moved)
    read_anew = (ok & used)[:, None] & (new_args > 0)
    uses = uses.at[new_args].add(read_anew.astype(jnp.int32))
    args = put(args, new_args)
    rewritten = graph._replace(
        nodes=nodes, globals=graph.globals._replace(outputs=outputs, depth=depth)
    )
    rewritten = graph_lib.with_args(rewritten, args)
    rewritten, uses = passes.remove_dead_with_counts(
        passes.raise_depths(rewritten, needed=jnp.any(too_low)), uses
    )
    changed = jnp.any(args_of(rewritten) != args_of(graph), axis=1) | (
        rewritten.nodes.op != old_nodes.op
    )
    changed = put(changed, used)
    return Applied(rewritten, changed, ok, fits & full, uses)


def _place(depth: jax.Array, new_args: jax.Array, slots: jax.Array, used: jax.Array) -> jax.Array:
    """Return `depth` with each new node placed just above its arguments."""

    def one(q: jax.Array, depth: jax.Array) -> jax.Array:
        above = jnp.max(depth[new_args[q]]) + 1
        slot = jnp.where(used[q] & (slots[q] > 0), slots[q], depth.shape[0])
        return depth.at[slot].set(above, mode="drop")

    turns = jnp.max(jnp.where(used, jnp.arange(Q) + 1, 0))
    return jax.lax.fori_loop(0, largest_of_batch(turns), one, depth)
