"""E-graphs of tensors: from tensor graphs.

An e-node's data is a hash of 64 bits of its attributes, value, binding and type; its notes are
these themselves. All e-nodes of a class have the same type. Lowerings are left out: an e-node costs
what its cheapest lowering costs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.egraph import arrays
from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.graph import ops
from xrl_jax.graph.graph import GraphError, Node, Nodes, TensorGraph, args_of, build, node_at
from xrl_jax.graph.hash import dot_words
from xrl_jax.runtime.engine_jit import engine_jit

_K, _R = ops.MAX_ATTRS, ops.MAX_RANK
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


def egraph_of(graph: TensorGraph, bucket: int) -> EGraph:
    """Return the e-graph of a tensor graph; its roots are the outputs, then pinned nodes.

    Nodes that compute the same are one e-node.
    """
    n = graph.nodes.op.shape[0]
    nodes = graph.nodes
    holders = (nodes.op == ops.OPS["opaque"].code) | (nodes.op == ops.OPS["call"].code)
    pinned = jnp.flatnonzero(holders & (nodes.attrs[:, 0] == 1)).astype(jnp.int32)
    outputs = graph.globals.outputs
    roots = jnp.concatenate([outputs[outputs >= 0], pinned])
    live = nodes.op != HOLE
    notes = jnp.where(live[:, None], notes_of(nodes), 0)
    given = EGraph(
        nodes.op,
        jnp.where(live[:, None], args_of(graph), 0),
        jnp.where(live[:, None], data_of(notes), 0),
        notes,
        jnp.arange(n, dtype=jnp.int32),
        jnp.int32(n),
        roots,
    )
    return _rebuilt(arrays.grow(given, max(bucket, n)))


def extracted(graph: EGraph, chosen: np.ndarray, n_outputs: int) -> TensorGraph:
    """Return the tensor graph of a choice.

    Args:
      chosen: [N], in the slot of each class's name its e-node; acyclic.
      n_outputs: how many of the roots are outputs; the others are pinned nodes.

    Raises:
      GraphError: the choice has a cycle, or lacks an e-node.
    """
    features: Nodes = jax.tree.map(np.asarray, features_of(graph))
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
def _rebuilt(graph: EGraph) -> EGraph:
    return arrays.rebuild(graph, jnp.asarray(COMMUTATIVE))
