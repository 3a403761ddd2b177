"""Orders in which the arguments of e-nodes come before their readers, as far as cycles allow.

What is passed on from arguments to readers needs one pass in such an order, while with all e-nodes
at once it needs as many as a program is deep. A depth-first search finds one.

Letters: N slots, A arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from xrl_jax.egraph.arrays import HOLE, EGraph

_MET, _LEFT = 0, 1 << 30  # least values of `_Visiting.at` of classes that were met, and left

S = TypeVar("S")
T = TypeVar("T")


class Order(NamedTuple):
    """E-nodes in the order of a depth-first search; the first n count."""

    slots: jax.Array  # [N] int32
    n: jax.Array  # int32
    cyclic: jax.Array  # bool, whether the search met a class again below itself

    def passed_on(
        self, read: Callable[[jax.Array, S], T], write: Callable[[jax.Array, T, S], S], state: S
    ) -> S:
        """Return the state after `write(slot, read(slot, state), state)` for e-nodes in this order,
        again and again until the state stays the same.
        """

        def step(i: jax.Array, carry: tuple[S, T]) -> tuple[S, T]:
            # Read at the end of the step before, so that XLA copies no arrays.
            state = write(self.slots[i], carry[1], carry[0])
            return state, read(self.slots[jnp.minimum(i + 1, len(self.slots) - 1)], state)

        def once(carry: tuple[S, jax.Array]) -> tuple[S, jax.Array]:
            state = carry[0]
            new, _ = jax.lax.fori_loop(0, self.n, step, (state, read(self.slots[0], state)))
            pairs = zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True)
            return new, functools.reduce(jnp.logical_or, (jnp.any(a != b) for a, b in pairs))

        return jax.lax.while_loop(lambda c: c[1], once, (state, jnp.bool_(True)))[0]


def each_at(values: jax.Array, at: jax.Array) -> jax.Array:
    """Return values[at] for few places. XLA makes one kernel of a loop if it reads little, and
    counts all values as read by a gather.
    """
    return jnp.stack([values[at[k]] for k in range(len(at))])


def order_of(graph: EGraph) -> Order:
    """Return an order of the e-nodes of all classes that the roots may need."""
    n = graph.bucket
    owners = jnp.where(graph.op != HOLE, graph.parent, n)
    owners, slots = jax.lax.sort_key_val(owners, jnp.arange(n, dtype=jnp.int32))
    ends = jnp.searchsorted(owners, jnp.arange(n + 1, dtype=jnp.int32)).astype(jnp.int32)
    return _visited(graph, slots, ends[:-1], ends[1:])


def order_chosen(graph: EGraph, node: jax.Array) -> Order:
    """Return the order of the e-nodes that the roots need under a choice of e-nodes [N]; a hole
    where a class has none.
    """
    each = jnp.arange(graph.bucket, dtype=jnp.int32)
    return _visited(graph, node, each, each + 1)


class _Here(NamedTuple):
    """What a step reads; read at the end of the step before, so that XLA copies no arrays."""

    c: jax.Array  # int32, the last class of the path
    next: jax.Array  # int32, its next e-node, as an index of `slots`
    slot: jax.Array  # int32, this e-node; a hole for none
    args: jax.Array  # [A] its arguments
    at: jax.Array  # [A] `_Visiting.at` of these


class _Visiting(NamedTuple):
    """A search under way."""

    here: _Here
    at: jax.Array  # [N] of classes: the next e-node, as an index of `slots`; or not met, or left
    path: jax.Array  # [N] classes from a root
    depth: jax.Array  # int32, length of the path
    order: Order


def _visited(graph: EGraph, slots: jax.Array, first: jax.Array, end: jax.Array) -> Order:
    """Visit classes from the roots; the e-nodes of class c are slots[first[c]:end[c]]."""
    n = graph.bucket

    def read(at: jax.Array, path: jax.Array, depth: jax.Array) -> _Here:
        c = path[jnp.maximum(depth - 1, 0)]
        i = at[c]
        slot = jnp.where(i < end[c], slots[jnp.clip(i, 0, n - 1)], n)
        args = graph.args.at[slot].get(mode="fill", fill_value=HOLE)
        return _Here(c, i, slot, args, each_at(at, args))

    def step(v: _Visiting) -> _Visiting:
        """Go on to an argument of the next e-node, or pass it; leave its class after the last."""
        c, i, slot, args, at_args = v.here
        to = jnp.max(jnp.where(at_args < _MET, args, HOLE))
        deeper = to != HOLE
        leaves = ~deeper & (i + 1 >= end[c])
        again = (args > 0) & (at_args >= _MET) & (at_args < _LEFT)
        value = jnp.where(deeper, first[to], jnp.where(leaves, _LEFT, i + 1))
        at = v.at.at[jnp.where(deeper, to, c)].set(value)
        path = v.path.at[v.depth].set(to)
        depth = v.depth + deeper - leaves
        passed, n_passed, cyclic = v.order
        order = Order(
            passed.at[n_passed].set(slot),
            n_passed + (~deeper & (slot < n)),
            cyclic | jnp.any(again),
        )
        return _Visiting(read(at, path, depth), at, path, depth, order)

    def from_root(k: jax.Array, v: _Visiting) -> _Visiting:
        root = graph.roots[k]
        new = v.at[root] < _MET
        at = v.at.at[root].set(jnp.where(new, first[root], v.at[root]))
        path, depth = v.path.at[0].set(root), new.astype(jnp.int32)
        v = _Visiting(read(at, path, depth), at, path, depth, v.order)
        return jax.lax.while_loop(lambda v: v.depth > 0, step, v)

    none, zero = jnp.zeros(n, jnp.int32), jnp.int32(0)
    at = jnp.full(n, _MET - 1, jnp.int32)
    order = Order(none, zero, jnp.bool_(False))
    start = _Visiting(read(at, none, zero), at, none, zero, order)
    return jax.lax.fori_loop(0, len(graph.roots), from_root, start).order
