"""The graphs of a program as one tensor graph of several parts, and back.

Components that process a folded program as a whole (an environment, a policy) work on this union:
bodies stay separate, since no edge connects them, and each node knows which graph of the program it
belongs to. Weight-only work is hidden (`transform.weight_work`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph.graph import GraphError, Node, TensorGraph, bucket_for, build, nodes_of
from xrl_jax.program.program import Program
from xrl_jax.transform.weight_work import Hidden, hide, unhide

# Additional nodes that an operator may need during rewriting: a converted convolution gets
# transposes of image, kernel and result; a folded shift and scale (batch norm) leave weight-only
# work behind.
_ROOM = {"conv": 3, "sub": 2, "mul": 1}

Part = tuple[list[Node], tuple[int, ...], Hidden]


def united(program: Program, *, bucket: int | None = None) -> tuple[TensorGraph, jax.Array]:
    """Return all graphs of a program as one, and the graph that each node belongs to.

    Args:
      bucket: minimum number of slots; by default `united_bucket`.

    Returns:
      The graph; and [N] int32 indices into `Program.graphs`, 0 on holes.
    """
    nodes: list[Node] = []
    outputs: list[int] = []
    owner: list[int] = []
    for index, (own, own_outputs, _) in enumerate(_parts(program)):
        first = len(nodes)
        nodes += [replace(n, args=tuple(a + first for a in n.args)) for n in own]
        outputs += [o + first for o in own_outputs]
        owner += [index] * len(own)
    size = max(bucket or _bucket(nodes), bucket_for(len(nodes)))
    graph = build(nodes, outputs, bucket=size)
    return graph, jnp.zeros(size, jnp.int32).at[1 : len(owner) + 1].set(jnp.asarray(owner))


def united_bucket(program: Program) -> int:
    """Return the smallest bucket with room to rewrite `united`.

    There is room to fold every batch norm and to convert the layout of every convolution before any
    of the transposes are cancelled.

    Raises:
      GraphError: no bucket is large enough.
    """
    return _bucket([node for nodes, _, _ in _parts(program) for node in nodes])


def united_size(program: Program) -> int:
    """Return the number of nodes of `united`."""
    return sum(len(nodes) for nodes, _, _ in _parts(program))


def _bucket(nodes: Sequence[Node]) -> int:
    return bucket_for(len(nodes), room=sum(_ROOM.get(n.op, 0) for n in nodes))


def _parts(program: Program) -> list[Part]:
    """Return the visible nodes of each graph, its outputs, and the hidden ones."""
    parts: list[Part] = []
    first = len(program.bindings)
    for graph in program.graphs:
        parts.append(hide(graph, first))
        first += len(parts[-1][2].stubs)
    return parts


def split_union(program: Program, graph: TensorGraph, owner: jax.Array) -> Program:
    """Return the program with its graphs taken from a rewritten union.

    Args:
      program: the program that the union was created from.
      owner: [N], as `united` returns it, for the nodes of `graph`.

    Raises:
      GraphError: a node has an argument that belongs to another graph.
    """
    nodes, outputs, slots = nodes_of(graph)
    owners = np.asarray(owner)[slots]
    graphs, end = [], 0
    for index, (_, own_outputs, hidden) in enumerate(_parts(program)):
        end += len(own_outputs)
        own = [i for i in range(len(nodes)) if owners[i] == index]
        place = {old: new for new, old in enumerate(own)}
        strange = next((i for i in own if any(a not in place for a in nodes[i].args)), None)
        if strange is not None:
            raise GraphError(f"node %{slots[strange]} has an argument in another graph")
        part = [replace(nodes[i], args=tuple(place[a] for a in nodes[i].args)) for i in own]
        ends = [place[o] for o in outputs[end - len(own_outputs) : end]]
        graphs.append(build(*unhide(part, ends, hidden)))
    return program.with_graphs(graphs)
