"""Pairs of roots that share an operand: their enumeration, and whether they may be merged.

A half is a match of one root of a two-root rule. Letters as in `match`: N nodes, S halves, M pairs,
P positions of a pattern.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.engine.bind import bind_tree
from xrl_jax.engine.instantiate import applies
from xrl_jax.graph.batch import largest_of_batch
from xrl_jax.graph.bits import set_bits_from
from xrl_jax.graph.graph import TensorGraph, args_of
from xrl_jax.language.table import RuleTable

_SWEEP = 128  # pairs tested for cycles at once


def independent(graph: TensorGraph, root: jax.Array, partner: jax.Array) -> jax.Array:
    """Return whether neither node depends on the other; true if there is no partner (0)."""
    # Even without an iteration, the loop would compute its gather indices.
    return jax.lax.cond(
        largest_of_batch(partner > 0),
        lambda: _independent(graph, root, partner),
        lambda: jnp.bool_(True),
    )


def _independent(graph: TensorGraph, root: jax.Array, partner: jax.Array) -> jax.Array:
    depth, args = graph.globals.depth, args_of(graph)
    deeper = depth[root] > depth[partner]
    start, end = jnp.where(deeper, partner, root), jnp.where(deeper, root, partner)
    above = (depth > depth[start]) & (depth <= depth[end])
    reached = (jnp.arange(len(args)) == start) & (partner > 0)

    def level(reached: jax.Array) -> jax.Array:
        return reached | (above & jnp.any(reached[args] & (args > 0), axis=1))

    _, reached = jax.lax.while_loop(
        lambda c: jnp.any(c[0] != c[1]),
        lambda c: (c[1], level(c[1])),
        (jnp.zeros_like(reached), reached),
    )
    return (partner == 0) | ~reached[end]


class Halves(NamedTuple):
    """Matches of either root of two-root rules, numbered so that their pairs can be enumerated.

    Second roots are sorted into runs that share an operand and a variant. A first root forms a pair
    with each second root of its run; pairs are numbered consecutively.
    """

    variant: jax.Array  # [S]
    node: jax.Array  # [S]
    bound: jax.Array  # [S, P]
    order: jax.Array  # [S] indices of the second roots, sorted by run
    low: jax.Array  # [S] of a first root: where its run begins in `order`
    ends: jax.Array  # [S] number of pairs up to and including this first root
    n: jax.Array  # number of pairs
    missing: jax.Array  # number of halves for which there was no room


def halves_of(table: RuleTable, graph: TensorGraph, masks: jax.Array, size: int) -> Halves:
    """Return at most `size` halves, found among the matches `masks` [N, W]."""
    node, tree, exists = set_bits_from(masks, jnp.int32(0), size)
    n_halves = jnp.sum(jax.lax.population_count(masks)).astype(jnp.int32)
    variant, which = table.tree_variant[tree], table.tree_root[tree]
    bound = jax.vmap(bind_tree, in_axes=(None, 0, 0, None))(table, tree, node, graph)[0]
    operand = bound[jnp.arange(size), table.shared[variant, which]]
    n_variants = table.variant_rule.shape[0]
    n_nodes = graph.nodes.op.shape[0]
    key = jnp.where(exists, operand * n_variants + variant, n_nodes * n_variants)
    first_key = jnp.where(exists & (which == 0), key, -1)
    second_key = jnp.where(exists & (which == 1), key, n_nodes * n_variants)
    order = jnp.argsort(second_key)
    ordered = second_key[order]
    low = jnp.searchsorted(ordered, first_key, side="left")
    high = jnp.searchsorted(ordered, first_key, side="right")
    ends = jnp.cumsum(jnp.where(first_key >= 0, high - low, 0))
    missing = jnp.maximum(n_halves - size, 0)
    return Halves(variant, node, bound, order, low, ends, ends[-1], missing)


def pairs_at(
    table: RuleTable,
    graph: TensorGraph,
    halves: Halves,
    numbers: jax.Array,
    *,
    checked: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the two-root candidates with these numbers [M]: variant, root and partner.

    The variant is -1 for the number -1 and where the pair is not a candidate.

    Args:
      checked: if false, pairs whose conditions or types do not hold are included.
    """
    variant, node, bound, order, low, ends, *_ = halves
    present, size = numbers >= 0, len(variant)
    left = jnp.clip(jnp.searchsorted(ends, numbers, side="right"), 0, size - 1)
    offset = numbers - jnp.where(left > 0, ends[left - 1], 0)
    right = order[jnp.clip(low[left] + offset, 0, size - 1)]
    e = jnp.where(present, variant[left], 0)
    root, partner = jnp.where(present, node[left], 0), jnp.where(present, node[right], 0)
    keep = present & (root != partner) & (~table.symmetric[e] | (root < partner))
    cross = table.cross_same[e]
    joint = jnp.concatenate([bound[left], bound[right]], axis=1)
    keep &= jnp.all(
        (cross < 0) | (jnp.take_along_axis(joint, jnp.maximum(cross, 0), axis=1) == bound[right]),
        axis=1,
    )
    if checked:
        keep &= jax.vmap(applies, in_axes=(None, 0, 0, None))(
            table, jnp.where(keep, e, -1), joint, graph
        )
    keep &= ~_closes_cycle(graph, root, partner, keep)
    return jnp.where(keep, e, -1), root, partner


def _closes_cycle(
    graph: TensorGraph, root: jax.Array, partner: jax.Array, among: jax.Array
) -> jax.Array:
    """Return, as [M] bool, whether one root depends on the other: merged, they would form a cycle.

    The topological order prunes: only a deeper root can depend on a shallower one, so equal depths
    are safe. For the remaining pairs, the exact test propagates one bit per pair from arguments to
    consumers, for a few words of pairs at a time.
    """
    depth, args = graph.globals.depth, args_of(graph)
    below = depth[root] <= depth[partner]
    low, high = jnp.where(below, root, partner), jnp.where(below, partner, root)
    suspicious = among & (depth[root] != depth[partner])
    n_suspicious = jnp.sum(suspicious)
    lane = jnp.arange(_SWEEP)
    word, bit = lane // 32, (lane % 32).astype(jnp.uint32)

    def sweep(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, closes = carry
        pair, _, exists = set_bits_from(suspicious[:, None].astype(jnp.uint32), first, _SWEEP)
        start, end = low[pair], high[pair]
        seeds = jnp.zeros((args.shape[0], _SWEEP // 32), jnp.uint32)
        seeds = seeds.at[start, word].add(jnp.where(exists, jnp.uint32(1) << bit, jnp.uint32(0)))
        lowest = jnp.min(jnp.where(exists, depth[start], jnp.iinfo(jnp.int32).max))
        highest = jnp.max(jnp.where(exists, depth[end], -1))

        between = ((depth > lowest) & (depth <= highest))[:, None]

        def level(reach: jax.Array) -> jax.Array:
            above = jax.lax.reduce(reach[args], jnp.uint32(0), jax.lax.bitwise_or, (1,))
            return jnp.where(between, reach | above, reach)

        reach = jax.lax.while_loop(
            lambda c: jnp.any(c[0] != c[1]), lambda c: (c[1], level(c[1])), (seeds, level(seeds))
        )[1]
        hit = exists & ((reach[end, word] >> bit) & 1 == 1)
        return first + _SWEEP, closes.at[pair].max(hit)

    return jax.lax.while_loop(
        lambda c: c[0] < n_suspicious, sweep, (jnp.int32(0), jnp.zeros(root.shape, bool))
    )[1]
