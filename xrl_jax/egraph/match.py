"""E-matching: all places where patterns match in an e-graph.

A row is a pattern tree with the e-nodes that its operators stand for, so far. Rows are extended one
operator at a time: the argument of a bound e-node is a class, and a row becomes one row for each
e-node of that class with the operator in question. The first operator, the root, ranges over the
whole e-graph.

A window of C rows is processed at a time, depth first, so room never runs out and no match is
dropped: whatever a level could not extend is extended later.

Letters: N slots, C rows of a window, T trees, E operators of a tree, P positions, O operators of
the language.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.patterns import NO_VALUE, P, Patterns


class Index(NamedTuple):
    """E-nodes by class and operator, by operator, and the classes."""

    by_class: jax.Array  # [N] e-nodes, sorted by class, then operator
    class_key: jax.Array  # [N] their keys, class and operator
    run_end: jax.Array  # [N] where the run of equal keys ends
    by_op: jax.Array  # [2 N] e-nodes sorted by operator, then the first e-nodes of all classes
    op_start: jax.Array  # [O + 1] where an operator's e-nodes begin; 0 stands for classes
    op_count: jax.Array  # [O + 1]


class Matches(NamedTuple):
    """Rows whose operators are all bound."""

    tree: jax.Array  # [C] int32
    bound: jax.Array  # [C, P] int32: an e-node for an operator, a class for a variable
    ok: jax.Array  # [C] bool, whether the row is a match


def _index_of(graph: EGraph, n_ops: int) -> Index:
    """Return the index of a rebuilt e-graph with operators below `n_ops`."""
    n = graph.bucket
    each = jnp.arange(n, dtype=jnp.int32)
    live = graph.op != HOLE
    op = jnp.where(live, graph.op, n_ops)
    by_op = _sorted_by(op, each, n_ops + 1)
    by_class = _sorted_by(jnp.where(live, graph.parent, n - 1), by_op, n)  # holes stay behind
    class_key = jnp.where(live, graph.parent * n_ops + graph.op, jnp.iinfo(jnp.int32).max)[by_class]
    is_last = jnp.append(class_key[1:] != class_key[:-1], True)
    run_end = jax.lax.cummin(jnp.where(is_last, each + 1, n), reverse=True)
    is_first = live & (graph.parent == each)
    place = jnp.where(is_first, jnp.cumsum(is_first) - 1, n)
    classes = jnp.zeros(n, jnp.int32).at[place].set(each, mode="drop")
    count = jnp.zeros(n_ops + 1, jnp.int32).at[op].add(1)
    start = (jnp.cumsum(count) - count).at[0].set(n)
    count = count.at[0].set(jnp.sum(is_first)).at[n_ops].set(0)
    by_op = jnp.concatenate([by_op, classes])
    return Index(by_class, class_key, run_end, by_op, start, count)


def _sorted_by(key: jax.Array, items: jax.Array, limit: int) -> jax.Array:
    """Return items [N] sorted by key[item] < limit, and otherwise in their order.

    A word holds a part of the key and a place: sorting one array of words takes XLA:CPU a fifth of
    the time of sorting two arrays.
    """
    n = items.shape[0]
    bits, done = (n - 1).bit_length(), 0
    while done < (limit - 1).bit_length():
        part = (key[items].astype(jnp.uint32) >> done) << bits
        words = jnp.sort(part | jnp.arange(n, dtype=jnp.uint32))
        items = items[words & jnp.uint32((1 << bits) - 1)]
        done += 32 - bits
    return items


class _Rows(NamedTuple):
    """Rows of a level: those of level k have k operators bound."""

    tree: jax.Array  # [C]
    nodes: jax.Array  # [C, E] the e-nodes bound
    start: jax.Array  # [C] where the e-nodes begin that the next operator may be
    ends: jax.Array  # [C] number of extended rows up to and including this one
    done: jax.Array  # int32, how many of the extended rows were made


class Matching(NamedTuple):
    """A search for matches that is under way: rows of all levels, and matches found."""

    levels: _Rows  # [E, C, ...]
    tree: jax.Array  # [2 C] of matches that wait to be taken
    bound: jax.Array  # [2 C, P]
    n: jax.Array  # int32, how many wait
    index: Index

    @property
    def more(self) -> jax.Array:
        """Whether there may be matches to take."""
        return jnp.any(_left(self.levels)) | (self.n > 0)


def _left(levels: _Rows) -> jax.Array:
    return levels.ends[:, -1] > levels.done


def begin(
    patterns: Patterns, active: jax.Array, graph: EGraph, n_ops: int, window: int
) -> Matching:
    """Begin to match the active trees [T] in a rebuilt e-graph.

    Args:
      n_ops: number of operators of the language.
      window: C, at least the number of trees.
    """
    index = _index_of(graph, n_ops)
    n_trees, n_levels = patterns.op.shape
    tree = jnp.arange(window, dtype=jnp.int32) % n_trees
    exists = (jnp.arange(window) < n_trees) & active[tree]
    none = jnp.zeros((window, n_levels), jnp.int32)
    first = _with_ranges(patterns, graph, index, n_ops, tree, none, exists, jnp.int32(0))
    levels = jax.tree.map(lambda x: jnp.zeros((n_levels, *x.shape), x.dtype).at[0].set(x), first)
    waiting = jnp.zeros(2 * window, jnp.int32), jnp.zeros((2 * window, P), jnp.int32)
    return Matching(levels, *waiting, jnp.int32(0), index)


def take(
    patterns: Patterns,
    graph: EGraph,
    n_ops: int,
    matching: Matching,
    wanted: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> tuple[Matching, Matches]:
    """Return the next window of matches [C]; fewer only if there are no more.

    Args:
      graph, n_ops: those that matching began with.
      wanted: from trees [C] and what their positions stand for [C, P], which matches to return;
        all by default.
    """
    window, n_levels = matching.levels.tree.shape[1], matching.levels.tree.shape[0]
    index = matching.index

    def extend(carry: Matching) -> Matching:
        levels = carry.levels
        level = n_levels - 1 - jnp.argmax(_left(levels)[::-1]).astype(jnp.int32)
        rows = jax.tree.map(lambda x: x[level], levels)
        tree, nodes, exists = _extended(patterns, graph, index, rows, level)
        levels = levels._replace(done=levels.done.at[level].add(window))

        def deeper() -> Matching:
            new = _with_ranges(patterns, graph, index, n_ops, tree, nodes, exists, level + 1)
            put = jax.tree.map(lambda old, x: old.at[level + 1].set(x), levels, new)
            return carry._replace(levels=put)

        def collect() -> Matching:
            bound, ok = _bind(patterns, graph, tree, nodes, exists)
            ok = ok if wanted is None else ok & wanted(tree, bound)
            at = jnp.where(ok, carry.n + jnp.cumsum(ok) - 1, 2 * window)
            return carry._replace(
                levels=levels,
                tree=carry.tree.at[at].set(tree, mode="drop"),
                bound=carry.bound.at[at].set(bound, mode="drop"),
                n=carry.n + jnp.sum(ok, dtype=jnp.int32),
            )

        return jax.lax.cond(level == n_levels - 1, collect, deeper)

    matching = jax.lax.while_loop(
        lambda c: jnp.any(_left(c.levels)) & (c.n < window), extend, matching
    )
    ok = jnp.arange(window) < matching.n
    taken = Matches(matching.tree[:window], matching.bound[:window], ok)
    rest = matching._replace(
        tree=jnp.roll(matching.tree, -window),
        bound=jnp.roll(matching.bound, -window, axis=0),
        n=jnp.maximum(matching.n - window, 0),
    )
    return rest, taken


def _with_ranges(
    patterns: Patterns,
    graph: EGraph,
    index: Index,
    n_ops: int,
    tree: jax.Array,
    nodes: jax.Array,
    exists: jax.Array,
    level: jax.Array,
) -> _Rows:
    """Return rows with the e-nodes that operator `level` of their trees may be."""
    op = patterns.op[tree, level]
    root_count, root_start = index.op_count[jnp.maximum(op, 0)], index.op_start[jnp.maximum(op, 0)]
    reader = jnp.take_along_axis(nodes, patterns.under[tree, level][:, None], axis=1)[:, 0]
    key = graph.args[reader, patterns.slot[tree, level]] * n_ops + op
    begin = jnp.searchsorted(index.class_key, key).astype(jnp.int32)
    at = jnp.minimum(begin, graph.bucket - 1)
    count = jnp.where(index.class_key[at] == key, index.run_end[at] - begin, 0)
    is_root, none = level == 0, op < 0
    start = jnp.where(is_root, root_start, begin)
    count = jnp.where(none, jnp.where(is_root, 0, 1), jnp.where(is_root, root_count, count))
    ends = jnp.cumsum(jnp.where(exists, count, 0), dtype=jnp.int32)
    return _Rows(tree, nodes, start, ends, jnp.int32(0))


def _extended(
    patterns: Patterns, graph: EGraph, index: Index, rows: _Rows, level: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the next window of extended rows: trees, e-nodes, and which rows exist."""
    window = rows.tree.shape[0]
    number = rows.done + jnp.arange(window, dtype=jnp.int32)
    exists = number < rows.ends[-1]
    row = jnp.searchsorted(rows.ends, number, side="right").astype(jnp.int32)
    row = jnp.minimum(row, window - 1)
    before = jnp.where(row > 0, rows.ends[row - 1], 0)
    place = jnp.clip(rows.start[row] + number - before, 0, 2 * graph.bucket - 1)
    node = jnp.where(
        level == 0, index.by_op[place], index.by_class[jnp.minimum(place, graph.bucket - 1)]
    )
    tree = rows.tree[row]
    node = jnp.where(patterns.op[tree, level] >= 0, node, 0)
    value, arity = patterns.value[tree, level], patterns.arity[tree, level]
    exists &= (value == NO_VALUE) | (graph.data[node, 0] == value)
    exists &= (patterns.op[tree, level] <= 0) | (jnp.sum(graph.args[node] > 0, axis=1) == arity)
    return tree, rows.nodes[row].at[:, level].set(node), exists


def _bind(
    patterns: Patterns, graph: EGraph, tree: jax.Array, nodes: jax.Array, exists: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return what the positions of rows stand for, and which rows match: a variable stands for the
    same class wherever it is.
    """
    at, slot, same = patterns.at[tree], patterns.at_slot[tree], patterns.same[tree]
    node = jnp.take_along_axis(nodes, jnp.maximum(at, 0), axis=1)
    bound = jnp.where(slot >= 0, graph.args[node, jnp.maximum(slot, 0)], node)
    bound = jnp.where(at >= 0, bound, 0)
    equal = jnp.take_along_axis(bound, jnp.maximum(same, 0), axis=1) == bound
    return bound, exists & jnp.all((same < 0) | equal, axis=1)
