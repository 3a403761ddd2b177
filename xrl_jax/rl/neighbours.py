"""Sums over the neighbours of a graph's nodes, in a deterministic order on a GPU as well.

A scatter adds in any order or, if it has to be deterministic, almost sequentially, which is slow on
a GPU. A product with the adjacency matrix is no better: that matrix is most of what the product
reads, and nearly all zeros. So on a wide device a node adds its few arguments in the order they are
listed. Its users, which may be many, are sorted by the node they read and added by a segmented
scan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.rl.features import GraphFeatures
from xrl_jax.runtime.engine_jit import wide

Neighbours = Callable[[jax.Array], jax.Array]  # [N, D] -> [N, D], sums over neighbours


def neighbours_of(graph: GraphFeatures) -> tuple[Neighbours, Neighbours]:
    """Return two functions: one sums over each node's arguments, the other over its users."""
    exists = graph.senders > 0
    if not wide():
        return (
            lambda x: _scattered(x, exists, graph.senders, graph.receivers),
            lambda x: _scattered(x, exists, graph.receivers, graph.senders),
        )
    edges = _edges(graph, exists)
    return (lambda x: _sum_over_args(x, edges)), (lambda x: _sum_over_users(x, edges))


def _scattered(x: jax.Array, exists: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    return jraph.segment_sum(jnp.where(exists[:, None], x[start], 0.0), end, len(x))


class _Edges(NamedTuple):
    """The edges of a graph, listed by their receivers and by their senders."""

    args: jax.Array  # [N, MAX_ARGS] arguments of each node; 0 for none
    users: jax.Array  # [E] receivers of the edges, sorted by sender
    first: jax.Array  # [E] bool, whether it is the first user of its sender
    last: jax.Array  # [N] position in `users` of each node's last user; -1 if it has none


def _edges(graph: GraphFeatures, exists: jax.Array) -> _Edges:
    n, slot = graph.lowering.shape[0], jnp.arange(ops.MAX_ARGS)
    reads = jnp.zeros(n, jnp.int32).at[graph.receivers].add(exists)
    at = (jnp.cumsum(reads) - reads)[:, None] + slot  # edges are sorted by their receivers
    args = jnp.where(slot < reads[:, None], graph.senders[at], 0)
    read = jnp.where(exists, graph.senders, n)
    order = jnp.argsort(read)
    uses = jnp.zeros(n, jnp.int32).at[read].add(1, mode="drop")
    read = read[order]
    first = jnp.concatenate([jnp.ones(1, bool), read[1:] != read[:-1]])
    last = jnp.where(uses > 0, jnp.cumsum(uses) - 1, -1)
    return _Edges(args, graph.receivers[order], first, last)


def _of_args(x: jax.Array, edges: _Edges) -> jax.Array:
    return jnp.sum(jnp.where((edges.args > 0)[..., None], x[edges.args], 0.0), axis=1)


def _of_users(x: jax.Array, edges: _Edges) -> jax.Array:
    def add(a: Any, b: Any) -> Any:
        return a[0] | b[0], jnp.where(b[0][:, None], b[1], a[1] + b[1])

    sums = jax.lax.associative_scan(add, (edges.first, x[edges.users]))[1]
    return jnp.where((edges.last >= 0)[:, None], sums[edges.last], 0.0)


_Sum = Callable[[jax.Array, _Edges], jax.Array]


def _with_gradient(total: _Sum, reversed_sum: _Sum) -> _Sum:
    """Return the sum `total` along edges, with the sum along the reversed edges as its gradient."""

    def forward(x: jax.Array, edges: _Edges) -> tuple[jax.Array, _Edges]:
        return total(x, edges), edges

    def backward(edges: _Edges, gradient: jax.Array) -> tuple[jax.Array, Any]:
        none = jax.tree.map(lambda v: np.zeros(v.shape, jax.dtypes.float0), edges)
        return reversed_sum(gradient, edges), none

    found = jax.custom_vjp(total)
    found.defvjp(forward, backward)
    return found


_sum_over_args = _with_gradient(_of_args, _of_users)
_sum_over_users = _with_gradient(_of_users, _of_args)
