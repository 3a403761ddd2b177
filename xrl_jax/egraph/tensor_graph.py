"""E-graphs of tensors: from tensor graphs.

An e-node's data is a hash of 64 bits of its attributes, value, binding and type; its notes are
these themselves. All e-nodes of a class have the same type. Lowerings are left out: an e-node costs
what its cheapest lowering costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.egraph import arrays
from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.graph import ops
from xrl_jax.graph.graph import (
    Globals,
    GraphError,
    Node,
    Nodes,
    TensorGraph,
    args_of,
    build,
    node_at,
)
from xrl_jax.graph.hash import dot_words
from xrl_jax.runtime.engine_jit import engine_jit

_K, _R = ops.MAX_ATTRS, ops.MAX_RANK
BUCKETS = (2048, 16384, 65536)
COMMUTATIVE = tuple(spec.commutative for spec in ops.OPS.values())


def notes_of(nodes: Nodes) -> jax.Array:
    """Pack node features [M, ...] into notes [M, X]."""
    value = jax.lax.bitcast_convert_type(nodes.value, jnp.int32)
    columns = nodes.rank, nodes.dtype, value, nodes.ref, nodes.weight_only.astype(jnp.int32)
    return jnp.concatenate([nodes.attrs, nodes.shape, *(c[:, None] for c in columns)], axis=1)


def data_of(notes: jax.Array) -> jax.Array:
    """Return the data [M, 2] of e-nodes with these notes: what tells equal ones apart."""
    words = dot_words(notes[:, :-1].astype(jnp.uint32))
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def features_of(graph: EGraph) -> Nodes:
    """Return the features of all e-nodes [N]; an e-node is weight-only if its class is."""
    attrs, shape, rest = jnp.split(graph.notes, [_K, _K + _R], axis=1)
    rank, dtype, value, ref, weight_only = jnp.moveaxis(rest, 1, 0)
    fixed = jnp.zeros(graph.bucket, bool).at[graph.parent].max(weight_only != 0)
    return Nodes(
        graph.op,
        attrs,
        jnp.zeros_like(graph.op),
        shape,
        rank,
        dtype,
        jax.lax.bitcast_convert_type(value, jnp.float32),
        ref,
        fixed[graph.parent],
        jnp.zeros(graph.bucket, jnp.float32),
    )


def as_tensor_graph(nodes: Nodes, args: jax.Array, outputs: jax.Array | None = None) -> TensorGraph:
    """Return e-nodes as the nodes of a tensor graph, for functions that look at nodes with their
    arguments; it has neither an order nor edges.
    """
    nothing: Any = None
    given = nothing if outputs is None else Globals(outputs, nothing)
    return TensorGraph(nodes, nothing, nothing, args.reshape(-1), given, nothing, nothing)


def egraph_of(graphs: Sequence[TensorGraph], bucket: int | None = None) -> EGraph:
    """Return the e-graph of tensor graphs that compute the same; its roots are their outputs, then
    pinned nodes, and the last of these again, so that few numbers of roots occur. Nodes that
    compute the same are one e-node.

    Args:
      bucket: by default the smallest of `BUCKETS` that these nodes leave half empty.

    Raises:
      GraphError: there are several graphs with pinned nodes, which must not be run twice; or the
        bucket is too small.
    """
    hosts: list[TensorGraph] = jax.tree.map(np.asarray, list(graphs))
    parts, equal, n = [], [], 1
    for host in hosts:
        live = np.flatnonzero(host.nodes.op != HOLE)
        place = np.zeros(len(host.nodes.op), np.int32)
        place[live] = n + np.arange(len(live))
        roots = roots_of(host)
        if len(hosts) > 1 and len(roots) > np.sum(host.globals.outputs >= 0):
            raise GraphError("graphs with pinned nodes cannot share an e-graph")
        nodes = jax.tree.map(lambda x, live=live: x[live], host.nodes)
        parts.append((nodes, place[np.asarray(args_of(host))[live]]))
        equal.append(place[roots])
        n += len(live)
    bucket = bucket_for(2 * n) if bucket is None else bucket
    if n > bucket:
        raise GraphError(f"{n - 1} nodes do not fit into an e-graph of {bucket}")
    nodes, args = jax.tree.map(lambda *x: np.concatenate(x), *parts)

    def padded(x: np.ndarray) -> jax.Array:
        return jnp.asarray(np.pad(x, [(1, bucket - n), *[(0, 0)] * (x.ndim - 1)]))

    each = jnp.arange(bucket, dtype=jnp.int32)
    n_roots = len(equal[0])
    size = max(8, 1 << (n_roots - 1).bit_length())
    same = jnp.asarray(
        np.pad(equal, ((0, -len(equal) % 4), (0, size - n_roots)), "edge"), jnp.int32
    )
    data, notes = jnp.zeros((bucket, 2), jnp.int32), padded(np.asarray(notes_of(nodes)))
    given = EGraph(padded(nodes.op), padded(args), data, notes, each, jnp.int32(n), same[0])
    return _rebuilt(given, same)


def roots_of(graph: TensorGraph) -> np.ndarray:
    """Return the outputs of a graph, then its pinned nodes."""
    holders = np.isin(np.asarray(graph.nodes.op), [ops.OPS[o].code for o in ("opaque", "call")])
    pinned = np.flatnonzero(holders & (np.asarray(graph.nodes.attrs)[:, 0] == 1))
    outputs = np.asarray(graph.globals.outputs)
    return np.concatenate([outputs[outputs >= 0], pinned]).astype(np.int32)


def bucket_for(nodes: int) -> int:
    """Return the smallest bucket with room for so many e-nodes, or the largest."""
    return next((b for b in BUCKETS if nodes < b), BUCKETS[-1])


def extracted(
    graph: EGraph, chosen: np.ndarray, n_outputs: int, lowering: np.ndarray | None = None
) -> TensorGraph:
    """Return the tensor graph of a choice.

    Args:
      chosen: [N], in the slot of each class's name its e-node; acyclic.
      n_outputs: how many of the roots are outputs; the others are pinned nodes.
      lowering: [N], of each e-node; the plain ones by default.

    Raises:
      GraphError: the choice has a cycle, or lacks an e-node.
    """
    features: Nodes = jax.tree.map(np.asarray, features_of(graph))
    if lowering is not None:
        features = features._replace(lowering=lowering)  # type: ignore[arg-type]
    args, roots = np.asarray(graph.args), np.asarray(graph.roots).tolist()
    place: dict[int, int] = {}  # of a class among the nodes made
    under_way: set[int] = set()
    nodes: list[Node] = []
    stack = roots[::-1]
    while stack:
        c = stack[-1]
        slot = int(chosen[c])
        if c in place:
            stack.pop()
            continue
        if slot == HOLE:
            raise GraphError(f"class {c} has no e-node")
        needed = [int(a) for a in args[slot] if a]
        missing = [a for a in needed if a not in place]
        if not missing:
            place[c] = len(nodes)
            nodes.append(node_at(features, slot, [place[a] for a in needed]))
            stack.pop()
        elif c in under_way:
            raise GraphError(f"the choice has a cycle through class {c}")
        else:
            under_way.add(c)
            stack.extend(missing[::-1])
    return build(nodes, [place[c] for c in roots[:n_outputs]])


@engine_jit
def _rebuilt(graph: EGraph, equal: jax.Array) -> EGraph:
    """Return the e-graph with its data set; `equal` [G, R] are the roots of each graph."""
    data = jnp.where((graph.op != HOLE)[:, None], data_of(graph.notes), 0)
    first = jnp.broadcast_to(equal[0], equal.shape)
    graph = graph._replace(data=data)
    return arrays.united(graph, first.reshape(-1), equal.reshape(-1), jnp.asarray(COMMUTATIVE))


def with_equal(graph: EGraph, pairs: Sequence[tuple[int, int]]) -> EGraph:
    """Return the e-graph in which these pairs of classes are equal."""
    size = max(64, 1 << (len(pairs) - 1).bit_length())  # few sizes are compiled
    padded = np.zeros((size, 2), np.int32)
    padded[: len(pairs)] = pairs
    return _united(graph, jnp.asarray(padded))


@engine_jit
def _united(graph: EGraph, pairs: jax.Array) -> EGraph:
    return arrays.united(graph, pairs[:, 0], pairs[:, 1], jnp.asarray(COMMUTATIVE))
