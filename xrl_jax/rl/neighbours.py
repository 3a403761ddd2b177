"""Sums over neighbours in a graph, which a GPU, too, adds up in one order.

Scattering adds up in any order, or, where it is always to be the same, as good as one after the
other, which takes a GPU long. So where steps are wide small graphs are multiplied by the matrix of
their edges; of large ones, whose matrices are nearly all zeros and would be most of what is read,
the edges are put in order of where they end and added up by a scan that begins anew there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from xrl_jax.graph.engine_jit import wide
from xrl_jax.rl.features import GraphFeatures

Neighbours = Callable[[jax.Array], jax.Array]  # [N, D] -> [N, D], sums over neighbours

_DENSE = 512  # nodes of the largest graph whose matrix is multiplied


def neighbours_of(graph: GraphFeatures) -> tuple[Neighbours, Neighbours]:
    """Sums along the edges, and against them."""
    n = graph.form.shape[0]
    exists = graph.senders > 0
    if not wide():
        return (
            lambda x: _scattered(x, exists, graph.senders, graph.receivers),
            lambda x: _scattered(x, exists, graph.receivers, graph.senders),
        )
    if n <= _DENSE:
        edges = jnp.zeros((n, n), jnp.int32).at[graph.receivers, graph.senders].add(exists)
        edges = edges.astype(jnp.float32)
        return (lambda x: edges @ x), (lambda x: edges.T @ x)
    there = _sorted(exists, graph.senders, graph.receivers, n)
    back = _sorted(exists, graph.receivers, graph.senders, n)
    return (lambda x: _summed(x, there, back)), (lambda x: _summed(x, back, there))


def _scattered(x: jax.Array, exists: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    return jraph.segment_sum(jnp.where(exists[:, None], x[start], 0.0), end, len(x))


class _Runs(NamedTuple):
    """Edges in order of the nodes where they end."""

    start: jax.Array  # [E] nodes
    first: jax.Array  # [E] bool, of those that end there
    last: jax.Array  # [N] places of the last edges that end there; -1 where none does


def _sorted(exists: jax.Array, start: jax.Array, end: jax.Array, n: int) -> _Runs:
    end = jnp.where(exists, end, n)
    order = jnp.argsort(end)
    counts = jnp.zeros(n, jnp.int32).at[end].add(1, mode="drop")
    end = end[order]
    first = jnp.concatenate([jnp.ones(1, bool), end[1:] != end[:-1]])
    return _Runs(start[order], first, jnp.where(counts > 0, jnp.cumsum(counts) - 1, -1))


@jax.custom_vjp
def _summed(x: jax.Array, there: _Runs, back: _Runs) -> jax.Array:
    """Sums over where the edges that end in each node start; `back` has the edges turned round,
    along which the gradient goes.
    """

    def add(a: Any, b: Any) -> Any:
        return a[0] | b[0], jnp.where(b[0][:, None], b[1], a[1] + b[1])

    sums = jax.lax.associative_scan(add, (there.first, x[there.start]))[1]
    return jnp.where((there.last >= 0)[:, None], sums[there.last], 0.0)


def _forward(x: jax.Array, there: _Runs, back: _Runs) -> tuple[jax.Array, tuple[_Runs, _Runs]]:
    return _summed(x, there, back), (there, back)


def _backward(runs: tuple[_Runs, _Runs], gradient: jax.Array) -> tuple[Any, ...]:
    there, back = runs
    none = jax.tree.map(lambda v: np.zeros(v.shape, jax.dtypes.float0), runs)
    return _summed(gradient, back, there), *none


_summed.defvjp(_forward, _backward)
