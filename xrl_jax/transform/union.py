"""The graphs of a program as one tensor graph of several parts, and back.

What sees a folded program at once (an environment, a policy) works on this: bodies stay apart, for
no edge leads from one to another, and each node knows which graph of the program it belongs to.
Work on weights alone is out of sight (`transform.weight_work`).
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

# What operators may come to on the way: a converted convolution has transposes of image, kernel and
# result; a shift and a scale that are folded (batch norm) leave work on weights behind.
_ROOM = {"conv": 3, "sub": 2, "mul": 1}

Part = tuple[list[Node], tuple[int, ...], Hidden]


def united(program: Program, *, bucket: int | None = None) -> tuple[TensorGraph, jax.Array]:
    """All graphs of a program as one, and to which each node belongs.

    Args:
      bucket: number of slots, at least; by default `united_bucket`.

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
    """The smallest bucket with room to rewrite `united`, also where every batch norm is folded and
    the layout of every convolution is converted before any of the transposes are cancelled.

    Raises:
      GraphError: there is none.
    """
    return _bucket([node for nodes, _, _ in _parts(program) for node in nodes])


def united_size(program: Program) -> int:
    """How many nodes `united` gives."""
    return sum(len(nodes) for nodes, _, _ in _parts(program))


def _bucket(nodes: Sequence[Node]) -> int:
    return bucket_for(len(nodes), room=sum(_ROOM.get(n.op, 0) for n in nodes))


def _parts(program: Program) -> list[Part]:
    """The nodes that are to be seen of each graph, its outputs, and what is hidden."""
    parts: list[Part] = []
    first = len(program.bindings)
    for graph in program.graphs:
        parts.append(hide(graph, first))
        first += len(parts[-1][2].stubs)
    return parts


def divided(program: Program, graph: TensorGraph, owner: jax.Array) -> Program:
    """The program with its graphs taken from a rewritten union.

    Args:
      program: the one that the union was made of.
      owner: [N] as `united` gives it, for the nodes that are there now.

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
