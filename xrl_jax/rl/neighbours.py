"""Sums over neighbours in a graph, which a GPU, too, adds up in one order.

Scattering adds up in any order, or, where it is always to be the same, as good as one after the
other, which takes a GPU long; the matrix of a graph's edges is nearly all zeros and most of what a
product with it reads. So where steps are wide a node adds up its few arguments as they are listed,
and its users, of which there may be many, are put in order of what they read and added up by a scan
that begins anew with each node.
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
    """Sums along the edges, and against them."""
    exists = graph.senders > 0
    if not wide():
        return (
            lambda x: _scattered(x, exists, graph.senders, graph.receivers),
            lambda x: _scattered(x, exists, graph.receivers, graph.senders),
        )
    edges = _edges(graph, exists)
    return (lambda x: _along(x, edges)), (lambda x: _against(x, edges))


def _scattered(x: jax.Array, exists: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    return jraph.segment_sum(jnp.where(exists[:, None], x[start], 0.0), end, len(x))


class _Edges(NamedTuple):
    """The edges of a graph from both sides."""

    args: jax.Array  # [N, MAX_ARGS] what each node reads; 0 for nothing
    users: jax.Array  # [E] what reads, in order of what it reads
    first: jax.Array  # [E] bool, of those that read the same
    last: jax.Array  # [N] places of the last users of each node; -1 where it has none


def _edges(graph: GraphFeatures, exists: jax.Array) -> _Edges:
    n, slot = graph.lowering.shape[0], jnp.arange(ops.MAX_ARGS)
    reads = jnp.zeros(n, jnp.int32).at[graph.receivers].add(exists)
    at = (jnp.cumsum(reads) - reads)[:, None] + slot  # edges are in order of their receivers
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


def _with_gradient(total: _Sum, turned: _Sum) -> _Sum:
    """A sum along edges, whose gradient is that along the same edges turned round."""

    def forward(x: jax.Array, edges: _Edges) -> tuple[jax.Array, _Edges]:
        return total(x, edges), edges

    def backward(edges: _Edges, gradient: jax.Array) -> tuple[jax.Array, Any]:
        none = jax.tree.map(lambda v: np.zeros(v.shape, jax.dtypes.float0), edges)
        return turned(gradient, edges), none

    found = jax.custom_vjp(total)
    found.defvjp(forward, backward)
    return found


_along = _with_gradient(_of_args, _of_users)
_against = _with_gradient(_of_users, _of_args)
