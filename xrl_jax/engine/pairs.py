"""Two roots that share an operand: which pairs there are, and whether they may be merged.

Letters as in `match`: N nodes, S halves, M pairs, P positions of a pattern.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.engine.bind import bind_tree
from xrl_jax.engine.instantiate import applies
from xrl_jax.graph.batch import largest_of_batch
from xrl_jax.graph.bits import ranked
from xrl_jax.graph.graph import TensorGraph, args_of
from xrl_jax.language.table import RuleTable

_SWEEP = 128  # pairs tested for cycles at once


def independent(
    graph: TensorGraph, root: jax.Array, partner: jax.Array, *, steps: int | None = None
) -> jax.Array:
    """Whether neither node depends on the other; true where there is no partner (0).

    Args:
      steps: argument steps looked at; where they do not suffice, the answer is no.
    """
    if steps is None:
        # A loop without a turn would work out where to gather for all that.
        return jax.lax.cond(
            largest_of_batch(partner > 0),
            lambda: _independent(graph, root, partner, None),
            lambda: jnp.bool_(True),
        )
    return _independent(graph, root, partner, steps)


def _independent(
    graph: TensorGraph, root: jax.Array, partner: jax.Array, steps: int | None
) -> jax.Array:
    depth, args = graph.globals.depth, args_of(graph)
    deeper = depth[root] > depth[partner]
    start, end = jnp.where(deeper, partner, root), jnp.where(deeper, root, partner)
    above = (depth > depth[start]) & (depth <= depth[end])
    reached = (jnp.arange(len(args)) == start) & (partner > 0)

    def going(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        i, old, new = carry
        more = jnp.any(old != new)
        return more if steps is None else more & (i <= steps)

    def level(reached: jax.Array) -> jax.Array:
        return reached | (above & jnp.any(reached[args] & (args > 0), axis=1))

    start_from = (jnp.int32(0), jnp.zeros_like(reached), reached)
    _, old, new = jax.lax.while_loop(going, lambda c: (c[0] + 1, c[2], level(c[2])), start_from)
    return (partner == 0) | (~new[end] & jnp.all(old == new))


class Halves(NamedTuple):
    """Matches of either root of two-root rules, sorted so that those that share an operand lie
    together: a first root meets the second roots of its run. Pairs are numbered through.
    """

    variant: jax.Array  # [S]
    node: jax.Array  # [S]
    bound: jax.Array  # [S, P]
    order: jax.Array  # [S] the second roots by run
    low: jax.Array  # [S] for a first root, where its run begins in `order`
    ends: jax.Array  # [S] how many pairs there are up to and with this first root
    n: jax.Array  # pairs in all
    missing: jax.Array  # halves for which there was no room


def halves_of(table: RuleTable, graph: TensorGraph, masks: jax.Array, size: int) -> Halves:
    """The halves among the matches `masks` [N, W], of which there are at most `size`."""
    node, tree, exists = ranked(masks, jnp.int32(0), size)
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
    """The two-root candidates with these numbers [M]: variant (-1 for the number -1 and where the
    pair does not hold), root, partner.

    Args:
      checked: false for pairs, too, whose conditions do not hold, or that have no types.
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
    """Whether one root depends on the other, [M] bool: merged, they would close a cycle.

    The topological order prunes: only a deeper root can depend on a shallower one, so equal depths
    are safe. The exact test spreads a bit for each pair left from arguments to what reads them, for
    a few words of pairs at a time.
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
        pair, _, exists = ranked(suspicious[:, None].astype(jnp.uint32), first, _SWEEP)
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
