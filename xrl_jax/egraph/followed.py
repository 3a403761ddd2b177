"""A program that is followed through an e-graph while it grows, so that costs can be computed as if
it was chosen.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.tensor_graph import COMMUTATIVE, data_of, notes_of
from xrl_jax.graph.graph import Nodes, TensorGraph, args_of
from xrl_jax.runtime.engine_jit import engine_jit


class Followed(NamedTuple):
    """The choice in an e-graph that stands for a program. It is acyclic, since each e-node reads
    classes of smaller rank.
    """

    node: jax.Array  # [N] int32, e-node of each class, in the slot of its name; 0 for none
    lowering: jax.Array  # [N] int32, of these e-nodes
    rank: jax.Array  # [N] int32, of each class


def nothing(bucket: int) -> Followed:
    """Return that no program is followed."""
    return Followed(*jnp.zeros((3, bucket), jnp.int32))


def followed(graph: EGraph, program: TensorGraph) -> Followed:
    """Return a program's choice in an e-graph; nothing where the e-graph lacks a node of it."""
    op, parent = np.asarray(graph.op), np.asarray(graph.parent)
    args, data = np.asarray(graph.args).tolist(), np.asarray(graph.data).tolist()
    enodes = np.flatnonzero(op != HOLE).tolist()
    known = {(int(op[e]), *data[e], *args[e]): e for e in enodes}
    host: TensorGraph = jax.tree.map(np.asarray, program)
    nodes, reads, words = host.nodes, args_of(host), np.asarray(_data_now(program.nodes)).tolist()
    live = np.flatnonzero(nodes.op != HOLE)
    place = np.zeros(len(nodes.op), np.int32)  # classes of the program's nodes
    node, lowering, rank = np.zeros((3, graph.bucket), np.int32)
    for i, slot in enumerate(live[np.argsort(host.globals.depth[live], kind="stable")].tolist()):
        classes = place[reads[slot]].tolist()
        if COMMUTATIVE[nodes.op[slot]]:
            classes[:2] = sorted(classes[:2])
        found = known.get((int(nodes.op[slot]), *words[slot], *classes))
        if found is None:
            return nothing(graph.bucket)
        c = place[slot] = parent[found]
        if node[c] == HOLE:  # of nodes in one class, the first has the smallest rank
            node[c], lowering[found], rank[c] = found, nodes.lowering[slot], i
    return Followed(*map(jnp.asarray, (node, lowering, rank)))


def moved(program: Followed, place: jax.Array, parent: jax.Array) -> Followed:
    """Return the same program after an iteration. Of classes that became one, the choice of the
    smallest rank is kept.

    Args:
      place: [N], where each e-node is now.
      parent: [N], of the e-graph now.
    """
    n = len(place)
    there = program.node > 0
    c = jnp.where(there, parent[place], n)
    rank = jnp.full(n, n, jnp.int32).at[c].min(program.rank, mode="drop")
    kept = there & (program.rank == rank[jnp.minimum(c, n - 1)])
    node = jnp.zeros(n, jnp.int32)
    return Followed(
        node.at[jnp.where(kept, c, n)].set(place[program.node], mode="drop"),
        node.at[place].max(program.lowering).at[HOLE].set(0),
        jnp.where(rank < n, rank, 0),
    )


@engine_jit
def _data_now(nodes: Nodes) -> jax.Array:
    return data_of(notes_of(nodes))
