"""E-graphs as arrays: classes, hash-consing and rebuilding.

An e-graph holds many programs at once: an e-node is an operator whose arguments are classes, and a
class is a set of e-nodes that are known to be equal (Willsey et al., POPL 2021). A class has the
number of its first e-node as its name.

E-nodes lie in a bucket of N slots. Slot 0 is a hole and stands for "no argument", as in tensor
graphs. New e-nodes are appended; `rebuild` restores the invariants: no two e-nodes are equal, all
arguments are names of classes, and slots are used without gaps. Everything is in the order of
slots, so results are the same bit for bit in each run.

Letters: N slots, A arguments, D words of data, X words of notes, H slots of the hash table.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.graph.hash import fold_words

HOLE = 0
_LOAD = 4  # slots of the hash table for each slot of the bucket


class ENodes(NamedTuple):
    """E-nodes [M]."""

    op: jax.Array  # [M] int32, code of the operator; 0 is a hole
    args: jax.Array  # [M, A] int32, classes; 0 stands for no argument
    data: jax.Array  # [M, D] int32, whatever else distinguishes e-nodes; the first word is hashed
    notes: jax.Array  # [M, X] int32, what is known about each, the same for equal ones


class EGraph(NamedTuple):
    """An e-graph; see the module's docstring."""

    op: jax.Array  # [N], as in `ENodes`
    args: jax.Array  # [N, A]
    data: jax.Array  # [N, D]
    notes: jax.Array  # [N, X]
    parent: jax.Array  # [N] int32, union-find; after `rebuild` the class of each e-node
    n: jax.Array  # int32, number of slots in use, the hole included
    roots: jax.Array  # [R] int32, classes that a user asks about; they stay the same ones

    @property
    def bucket(self) -> int:
        return self.op.shape[0]


def grow(graph: EGraph, bucket: int) -> EGraph:
    """Return the e-graph in a larger bucket."""
    more = bucket - graph.bucket

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1)))

    names = jnp.concatenate([graph.parent, jnp.arange(graph.bucket, bucket, dtype=jnp.int32)])
    nodes = jax.tree.map(padded, nodes_of(graph))
    return graph._replace(**nodes._asdict(), parent=names)


def nodes_of(graph: EGraph) -> ENodes:
    """Return the e-nodes of all slots."""
    return ENodes(graph.op, graph.args, graph.data, graph.notes)


def counts(graph: EGraph) -> tuple[jax.Array, jax.Array]:
    """Return the numbers of e-nodes and of classes of a rebuilt e-graph."""
    live = graph.op != HOLE
    first = graph.parent == jnp.arange(graph.bucket)
    return jnp.sum(live), jnp.sum(live & first)


def unite(parent: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the union-find after uniting classes a[i] and b[i] for every i.

    Every e-node points at the name of its class, before and after. Roots are hooked to the smallest
    root that they meet, until no pair is apart; then paths are compressed.
    """

    def hook(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        parent, low, high = carry
        parent = _compressed(parent.at[high].min(low))
        a, b = parent[low], parent[high]
        return parent, jnp.minimum(a, b), jnp.maximum(a, b)

    a, b = parent[a], parent[b]
    start = parent, jnp.minimum(a, b), jnp.maximum(a, b)
    return jax.lax.while_loop(lambda c: jnp.any(c[1] != c[2]), hook, start)[0]


def _compressed(parent: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda p: jnp.any(p[p] != p), lambda p: p[p], parent)


def united(
    graph: EGraph, a: jax.Array, b: jax.Array, commutative: jax.Array | None = None
) -> EGraph:
    """Return the rebuilt e-graph in which classes a[i] and b[i] are one."""
    return rebuild(graph._replace(parent=unite(graph.parent, a, b)), commutative)


class Table(NamedTuple):
    """A hash table of e-nodes, by open addressing."""

    slots: jax.Array  # [H] int32, e-nodes; the bucket's size for a free slot


def table_of(graph: EGraph) -> tuple[Table, jax.Array]:
    """Return the hash table of an e-graph, and for each e-node the first equal one [N]."""
    table, found, _ = _insert(graph, _no_table(graph), jnp.arange(graph.bucket), graph.op != HOLE)
    return table, found


def _no_table(graph: EGraph) -> Table:
    return Table(jnp.full(_LOAD * graph.bucket, graph.bucket, jnp.int32))


def _insert(
    graph: EGraph, table: Table, nodes: jax.Array, present: jax.Array
) -> tuple[Table, jax.Array, jax.Array]:
    """Insert e-nodes [M] that are in their slots already; return the first equal ones [M], and
    where they are in the table [M].

    All probe at once. Whoever finds a free slot claims it, and the smallest claim wins; whoever
    finds an equal e-node has its answer; the others go on to the next slot.
    """
    n, size = graph.bucket, table.slots.shape[0]
    given = jax.tree.map(lambda x: x[nodes], nodes_of(graph))

    def probe(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slots, at, found, going = carry
        claim = jnp.where(going & (slots[at] >= n), at, size)
        slots = slots.at[claim].min(nodes, mode="drop")
        there = jnp.minimum(slots[at], n - 1)
        same = _equal(graph, there, given)
        found = jnp.where(going & same, there, found)
        going &= ~same
        return slots, jnp.where(going, (at + 1) % size, at), found, going

    begin = table.slots, _start(given, size), nodes.astype(jnp.int32), present
    slots, at, found, _ = jax.lax.while_loop(lambda c: jnp.any(c[3]), probe, begin)
    return Table(slots), found, at


def add(
    graph: EGraph, table: Table, nodes: ENodes, present: jax.Array, most: jax.Array
) -> tuple[EGraph, Table, jax.Array]:
    """Add e-nodes [M] that are not there yet, as long as there is room.

    Args:
      nodes: their arguments are names of classes.
      present: [M] bool, those to add.
      most: int32, the most slots that may be in use afterwards, the hole included.

    Returns:
      The e-graph and its table; and for each e-node its slot, 0 where it is not present or there is
      no room for it.
    """
    n, size = graph.bucket, table.slots.shape[0]
    room = most - graph.n
    # Most e-nodes that rules make are there already: where room is short, these need none.
    known = jax.lax.cond(
        jnp.sum(present) > room,
        lambda: _find(graph, table, nodes, present),
        lambda: jnp.full(present.shape, n, jnp.int32),
    )
    tried = present & (known == n)
    tried &= jnp.cumsum(tried, dtype=jnp.int32) <= room
    place = jnp.where(tried, graph.n + jnp.cumsum(tried, dtype=jnp.int32) - 1, n)
    trial = _with(graph, place, nodes)
    claimed, found, at = _insert(trial, table, jnp.minimum(place, n - 1), tried)
    # Only new e-nodes keep a slot: they move to the front of those tried.
    new = tried & (found == place)
    slot = jnp.where(new, graph.n + jnp.cumsum(new, dtype=jnp.int32) - 1, n)
    grown = _with(_with(trial, place, jax.tree.map(jnp.zeros_like, nodes)), slot, nodes)
    grown = grown._replace(n=graph.n + jnp.sum(new, dtype=jnp.int32))
    slots = claimed.slots.at[jnp.where(new, at, size)].set(slot, mode="drop")
    return grown, Table(slots), jnp.where(tried, slots[at], jnp.where(known < n, known, HOLE))


def _find(graph: EGraph, table: Table, nodes: ENodes, present: jax.Array) -> jax.Array:
    """Return the slots [M] of e-nodes that are there; the bucket's size where not."""
    n, size = graph.bucket, table.slots.shape[0]

    def probe(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at, found, going = carry
        slot = table.slots[at]
        same = going & (slot < n) & _equal(graph, jnp.minimum(slot, n - 1), nodes)
        going &= (slot < n) & ~same
        return (at + 1) % size, jnp.where(same, slot, found), going

    begin = _start(nodes, size), jnp.full(present.shape, n, jnp.int32), present
    return jax.lax.while_loop(lambda c: jnp.any(c[2]), probe, begin)[1]


def _start(nodes: ENodes, size: int) -> jax.Array:
    """Return where to begin looking for e-nodes [M] in a hash table of this size."""
    words = jnp.concatenate([nodes.op[:, None], nodes.args, nodes.data[:, :1]], axis=1)
    hashed = fold_words(words.astype(jnp.uint32))[:, 0]
    return (hashed % jnp.uint32(size)).astype(jnp.int32)


def _equal(graph: EGraph, slots: jax.Array, nodes: ENodes) -> jax.Array:
    """Return whether e-nodes [M] equal those in these slots [M]."""
    same = (graph.op[slots] == nodes.op) & jnp.all(graph.args[slots] == nodes.args, axis=1)
    return same & jnp.all(graph.data[slots] == nodes.data, axis=1)


def _with(graph: EGraph, slots: jax.Array, nodes: ENodes) -> EGraph:
    """Return the e-graph with other e-nodes in these slots; those beyond the bucket are dropped."""
    put = jax.tree.map(lambda old, new: old.at[slots].set(new, mode="drop"), nodes_of(graph), nodes)
    return graph._replace(**put._asdict())


def rebuild(graph: EGraph, commutative: jax.Array | None = None) -> EGraph:
    """Restore the invariants.

    Args:
      commutative: see `closed`.
    """
    return compact(closed(graph, commutative)[0])


def closed(graph: EGraph, commutative: jax.Array | None = None) -> tuple[EGraph, jax.Array]:
    """Make equal e-nodes one, and unite their classes. The others keep their slots, so that there
    are gaps.

    Args:
      commutative: [O] bool, operators whose first two arguments are sorted; None for none.

    Returns:
      The e-graph; and for each e-node the slot of the equal one that is left [N].
    """
    each = jnp.arange(graph.bucket, dtype=jnp.int32)

    def once(carry: tuple[EGraph, jax.Array, jax.Array]) -> tuple[EGraph, jax.Array, jax.Array]:
        graph, left, _ = carry
        graph = graph._replace(args=in_order(graph.op, graph.parent[graph.args], commutative))
        _, first = table_of(graph)
        parent = unite(graph.parent, first, each)
        op = jnp.where(first != each, HOLE, graph.op)
        again = jnp.any(parent != graph.parent)
        return graph._replace(op=op, parent=parent), first[left], again

    return jax.lax.while_loop(lambda c: c[2], once, (graph, each, jnp.bool_(True)))[:2]


def in_order(op: jax.Array, args: jax.Array, commutative: jax.Array | None) -> jax.Array:
    """Return arguments [M, A] with the first two sorted where the operator is commutative."""
    if commutative is None:
        return args
    first = jnp.where(commutative[op][:, None], jnp.sort(args[:, :2], axis=1), args[:, :2])
    return jnp.concatenate([first, args[:, 2:]], axis=1)


def places(graph: EGraph, left: jax.Array) -> jax.Array:
    """Return where `compact` puts each e-node [N], from what `closed` returns; 0 for holes."""
    slot = _packed(graph.op != HOLE)[left]
    return jnp.where(slot < graph.bucket, slot, HOLE)


def compact(graph: EGraph) -> EGraph:
    """Move e-nodes to the front, and name each class after its first e-node."""
    n = graph.bucket
    live = graph.op != HOLE
    slot = _packed(live)
    name = jnp.full(n, n, jnp.int32).at[graph.parent].min(slot)
    name = jnp.where(name < n, name, 0).at[0].set(0)
    moved = name[graph.parent]

    def put(values: jax.Array, blank: jax.Array) -> jax.Array:
        return blank.at[slot].set(values, mode="drop")

    nodes = nodes_of(graph)._replace(args=moved[graph.args])
    nodes = jax.tree.map(lambda x: put(x, jnp.zeros_like(x)), nodes)
    return EGraph(
        nodes.op,
        nodes.args,
        nodes.data,
        nodes.notes,
        parent=put(moved, jnp.arange(n, dtype=jnp.int32)),
        n=jnp.sum(live, dtype=jnp.int32) + 1,
        roots=moved[graph.roots],
    )


def _packed(live: jax.Array) -> jax.Array:
    """Return the slots [N] from 1 on of what is live; the bucket's size for the others."""
    return jnp.where(live, jnp.cumsum(live, dtype=jnp.int32), len(live))
