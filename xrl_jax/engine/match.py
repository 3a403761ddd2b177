"""Finds all candidates of a rule table in a tensor graph, and updates them after a rewrite.

1. Bit masks: a node's operator and its arguments' operators each select a set of pattern trees;
   their intersection is the set of trees that may match at the node.
2. Compress: list the few (node, tree) pairs whose bit is set.
3. Bind and evaluate, for these pairs only: bind positions by following argument slots, then check
   conditions and types in the bytecode.

Rules with two roots are joined at the consumers of the operand that they share, never over all
pairs of nodes. The masks of a graph are kept; after a rewrite, a tree is matched again only at
nodes from which its pattern reaches down to a changed node.

Letters: N nodes, T trees, W words of T bits, C capacity of a chunk, M candidates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.engine.bind import bind_tree
from xrl_jax.engine.instantiate import applies
from xrl_jax.engine.pairs import halves_of, pairs_at
from xrl_jax.graph import ops
from xrl_jax.graph.bits import set_bits_at, set_bits_from, words_of
from xrl_jax.graph.graph import TensorGraph, args_of, assert_one
from xrl_jax.graph.passes import join_batch
from xrl_jax.graph.view import views_at
from xrl_jax.language.table import HEIGHT, N_ARG_BITS, P, RuleTable
from xrl_jax.lower.table import fits

_FAR = HEIGHT + 1  # argument steps to a change that no pattern reaches
# Chunk sizes of `rematch`, for nodes and for surviving (node, tree) pairs: a minimum, and an amount
# for each rewrite. Equal bindings of a large chunk are evaluated once.
_AT_LEAST, _FOR_EACH = 64, (8, 32)


class Candidates(NamedTuple):
    """Where rules apply; except after `sample`, the first `count` slots are the used ones."""

    variant: jax.Array  # [M] int32, index into the table's variants; -1 for an empty slot
    root: jax.Array  # [M] int32
    partner: jax.Array  # [M] int32, second root; 0 for none
    count: jax.Array  # scalar int32, number of candidates (if above M, some are missing)


def _trees_possible(table: RuleTable, graph: TensorGraph, nodes: jax.Array) -> jax.Array:
    """Return the trees that may match at each of `nodes` [D], as bit masks [D, W] (phase 1).

    Trees are selected by operators and, for a rule that chooses a lowering, by whether that
    lowering may be chosen.
    """
    code = graph.nodes.op
    args = args_of(graph)[nodes]
    bits = table.root_bits[code[nodes]]
    for slot in range(N_ARG_BITS):
        bits &= table.arg_bits[slot, code[args[:, slot]]]
    choice = table.variant_choice[table.tree_variant]
    allowed = (choice < 0) | jax.vmap(fits)(views_at(graph, nodes))[:, choice]
    return bits & jax.vmap(words_of)(allowed)


def _single_trees(table: RuleTable) -> jax.Array:
    """Return the trees of single-root rules, as words [W]."""
    return words_of((table.variant_trees[table.tree_variant, 1] < 0) & (table.tree_root >= 0))


def trees_of_root(table: RuleTable, which: int) -> jax.Array:
    """Return the trees that are root `which` of their variant, as words [W]."""
    return words_of(table.tree_root == which)


def trees_of_rule(table: RuleTable, rule: jax.Array) -> jax.Array:
    """Return the trees of one rule, given by its index, as words [W]."""
    return words_of((table.variant_rule[table.tree_variant] == rule) & (table.tree_root >= 0))


def _match_nodes(
    table: RuleTable,
    graph: TensorGraph,
    steps: jax.Array,
    masks: jax.Array,
    n_nodes: int,
    capacity: int,
) -> jax.Array:
    """Return masks [N, W] in which some trees are matched again.

    At each node, these are the trees that reach at least `steps` [N] argument steps down. Processes
    `n_nodes` nodes and `capacity` surviving (node, tree) pairs at a time. Supports vmap over
    everything but the table.
    """

    @jax.custom_batching.custom_vmap
    def matched(
        table: RuleTable, graph: TensorGraph, steps: jax.Array, masks: jax.Array
    ) -> jax.Array:
        return _match_some(table, graph, steps, masks, n_nodes, capacity)

    @matched.def_vmap
    def _(size: int, batched: Any, table: RuleTable, *each: Any) -> tuple[jax.Array, bool]:
        """Match a batch as one graph of several parts, so that no part waits for the longest."""
        if any(jax.tree.leaves(batched[0])):
            raise ValueError("a batch has one rule table: do not vmap over the tables")
        graph, steps, masks = jax.tree.map(
            lambda v, b: v if b else jnp.broadcast_to(v, (size, *v.shape)), each, tuple(batched[1:])
        )
        flat = masks.reshape(-1, masks.shape[-1])
        new = _match_nodes(
            table, join_batch(graph), steps.reshape(-1), flat, size * n_nodes, size * capacity
        )
        return new.reshape(masks.shape), True

    return matched(table, graph, steps, masks)


def _match_some(
    table: RuleTable,
    graph: TensorGraph,
    steps: jax.Array,
    masks: jax.Array,
    n_nodes: int,
    capacity: int,
) -> jax.Array:
    among = steps < _FAR
    n_among = jnp.sum(among)
    bind_all = jax.vmap(bind_tree, in_axes=(None, 0, 0, None))
    all_apply = jax.vmap(applies, in_axes=(None, 0, 0, None))

    def some_nodes(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, hit = carry
        nodes, _, exists = set_bits_from(among[:, None].astype(jnp.uint32), first, n_nodes)
        possible = _trees_possible(table, graph, nodes) & table.tall_bits[steps[nodes]]
        possible = jnp.where(exists[:, None], possible, 0)
        n_possible = jnp.sum(jax.lax.population_count(possible))

        def some_survivors(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            first, hit = carry
            at, tree, exists = set_bits_from(possible, first, capacity)
            bound, binds = bind_all(table, tree, nodes[at], graph)
            binds &= exists
            variant = table.tree_variant[tree]
            single = table.variant_trees[variant, 1] < 0
            joint = jnp.pad(bound, ((0, 0), (0, P)))
            ok = all_apply(table, jnp.where(binds & single, variant, -1), joint, graph)
            bit = jnp.uint32(1) << (tree % 32).astype(jnp.uint32)
            bit = jnp.where(binds & (ok | ~single), bit, jnp.uint32(0))
            return first + capacity, hit.at[nodes[at], tree // 32].add(bit)

        hit = jax.lax.while_loop(lambda c: c[0] < n_possible, some_survivors, (jnp.uint32(0), hit))[
            1
        ]
        return first + n_nodes, hit

    start = (jnp.int32(0), masks & ~table.tall_bits[steps])
    return jax.lax.while_loop(lambda c: c[0] < n_among, some_nodes, start)[1]


def match(table: RuleTable, graph: TensorGraph, *, capacity: int | None = None) -> jax.Array:
    """Return the match masks [N, W] uint32 of the whole graph.

    Bit t of node n is set if tree t matches at n. For a single-root rule, this means that the rule
    applies there; for one root of a two-root rule, that the root's tree binds there.

    Args:
      capacity: surviving (node, tree) pairs processed at a time, by default four per slot; affects
        speed only.
    """
    assert_one(graph)
    n = graph.nodes.op.shape[0]
    masks = jnp.zeros((n, table.n_words), jnp.uint32)
    steps = jnp.where(graph.nodes.op != ops.HOLE, 0, _FAR)
    return _match_nodes(table, graph, steps, masks, n, capacity or 4 * n)


def rematch(
    table: RuleTable,
    graph: TensorGraph,
    masks: jax.Array,
    changed: jax.Array,
    *,
    rewrites: int = 1,
) -> jax.Array:
    """Return the masks after rewrites.

    Trees are matched again at the nodes from which they reach down to one of `changed` [N] bool;
    the other bits are kept.

    Args:
      rewrites: maximum number of rewrites since `masks`; affects speed only.
    """
    assert_one(graph, masks, changed)
    args = args_of(graph)
    steps = jnp.where(changed, 0, _FAR)
    for _ in range(HEIGHT):
        below = jnp.min(jnp.where(args > 0, steps[args], _FAR), axis=1)
        steps = jnp.minimum(steps, below + 1)
    live = graph.nodes.op != ops.HOLE
    masks = jnp.where(live[:, None], masks, 0)
    n_nodes, capacity = (max(_AT_LEAST, each * rewrites) for each in _FOR_EACH)
    return _match_nodes(table, graph, jnp.where(live, steps, _FAR), masks, n_nodes, capacity)


def candidates(
    table: RuleTable,
    graph: TensorGraph,
    masks: jax.Array,
    *,
    size: int,
    pair_size: int | None = None,
) -> Candidates:
    """Return all candidates of the matched graph: single roots by node and tree, then pairs.

    Args:
      size: M, room for candidates.
      pair_size: room for pairs before they are checked; `size` by default.
    """
    assert_one(graph, masks)
    single = _single_trees(table)
    node, tree, exists = set_bits_from(masks & single, jnp.int32(0), size)
    n_single = jnp.sum(jax.lax.population_count(masks & single)).astype(jnp.int32)
    variant = jnp.where(exists, table.tree_variant[tree], -1)
    halves = halves_of(table, graph, masks & ~single, pair_size or size)
    each = jnp.arange(pair_size or size)
    pair_variant, root, partner = pairs_at(
        table, graph, halves, jnp.where(each < halves.n, each, -1)
    )
    overflow = (halves.missing > 0) | (halves.n > len(each))
    most = jnp.maximum(halves.n, len(each) + halves.missing)
    n_pairs = jnp.where(overflow, most, jnp.sum(pair_variant >= 0)).astype(jnp.int32)
    # Pairs go behind the single-root candidates, as far as there is room.
    at = jnp.where(pair_variant >= 0, n_single + jnp.cumsum(pair_variant >= 0) - 1, size)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[at].set(new, mode="drop")

    return Candidates(
        put(variant, pair_variant),
        put(jnp.where(exists, node, 0), root),
        put(jnp.zeros(size, jnp.int32), partner),
        n_single + n_pairs,
    )


def sample(
    table: RuleTable,
    graph: TensorGraph,
    masks: jax.Array,
    key: jax.Array,
    *,
    size: int,
    checked: bool = True,
) -> Candidates:
    """Return the candidates of the matched graph, sampled uniformly if they exceed `size`.

    Candidates are numbered, pairs that fail their checks included. If there are more than `size`,
    those at equal distances from a random start are taken (systematic sampling), so that each is
    taken with the same probability. A pair that fails leaves its slot empty: slots are not
    compressed to the front.

    Args:
      checked: see `pairs_at`.

    Returns:
      Candidates; `count` includes pairs that fail, and exceeds `size` if only a sample is returned.
    """
    assert_one(graph, masks)
    single = _single_trees(table)
    n_single = jnp.sum(jax.lax.population_count(masks & single)).astype(jnp.int32)
    halves = halves_of(table, graph, masks & ~single, 2 * graph.nodes.op.shape[0])
    n = n_single + halves.n
    slot = jnp.arange(size, dtype=jnp.int32)
    drawn = jnp.floor((slot + jax.random.uniform(key)) * (n / size)).astype(jnp.int32)
    number = jnp.where(n > size, jnp.minimum(drawn, n - 1), jnp.where(slot < n, slot, -1))
    node, tree, exists = set_bits_at(masks & single, jnp.where(number < n_single, number, -1))
    of_pair = jnp.where(number >= n_single, number - n_single, -1)
    pair_variant, root, partner = pairs_at(table, graph, halves, of_pair, checked=checked)
    return Candidates(
        jnp.where(exists, table.tree_variant[tree], pair_variant),
        jnp.where(exists, node, root),
        jnp.where(exists, 0, partner),
        n + halves.missing,
    )
