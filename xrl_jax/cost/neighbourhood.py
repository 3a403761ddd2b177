"""Neighbourhoods: a node of a graph with the nodes around it, as a program of its own.

A region has one operator and stands for all of its kind; a neighbourhood has the operators that XLA
may fuse with it in this very graph. Timing it takes a fraction of the network's time, and a change
that makes it faster is likely to make the network faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph.bindings import Input
from xrl_jax.graph.graph import Node, TensorGraph, build, nodes_of
from xrl_jax.program.arguments import flatten_args
from xrl_jax.program.program import Program

_EXCLUDED_OPS = ("input", "opaque", "call", "pack", "proj")  # never inside one
_NON_ARRAY_DTYPES = ("none", "extended", "tuple")


def neighbourhood(graph: TensorGraph, slot: int, radius: int) -> Program | None:
    """Return the operators within `radius` steps above and below the one at `slot` as a program, or
    None if one of its arguments would not be an array.

    Weight-only operators that these read are included, down to the weights, so that they are
    prepared as in the network. All other values read become arguments; values read outside become
    results. Weights and other arguments are numbered in the order of the graph.
    """
    nodes, graph_outputs, slots = nodes_of(graph)
    weight_only = np.asarray(graph.nodes.weight_only)[slots]
    readers: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        for a in set(node.args):
            readers[a].append(i)

    def work(indices: Iterable[int]) -> list[int]:
        return [i for i in indices if not weight_only[i] and nodes[i].op not in _EXCLUDED_OPS]

    place = slots.index(slot)
    inside = _within(place, radius, lambda i: work(nodes[i].args))
    inside |= _within(place, radius, lambda i: work(readers[i]))
    kept, edge = _with_weight_work(nodes, weight_only, inside)
    if any(nodes[i].dtype in _NON_ARRAY_DTYPES for i in edge):
        return None
    read_outside = {*graph_outputs, *(i for i in inside if set(readers[i]) - inside)}
    order = sorted(kept | edge)
    index = {old: new for new, old in enumerate(order)}
    position = {old: n for n, old in enumerate(sorted(edge))}
    return _program(
        [
            replace(nodes[i], args=tuple(index[a] for a in nodes[i].args))
            if i in kept
            else Node(
                "weight" if weight_only[i] else "input",
                shape=nodes[i].shape,
                dtype=nodes[i].dtype,
                ref=position[i],
            )
            for i in order
        ],
        [index[i] for i in sorted(inside & read_outside)],
    )


def _within(start: int, steps: int, near: Callable[[int], list[int]]) -> set[int]:
    """Return all nodes that can be reached from `start` in at most `steps` steps."""
    reached = last = {start}
    for _ in range(steps):
        last = {j for i in last for j in near(i)} - reached
        reached = reached | last
    return reached


def _with_weight_work(
    nodes: Sequence[Node], weight_only: np.ndarray, inside: set[int]
) -> tuple[set[int], set[int]]:
    """Return `inside` with the weight-only work it reads, and the other nodes that these read."""
    kept, edge = set(inside), set()
    todo = [a for i in inside for a in nodes[i].args]
    while todo:
        i = todo.pop()
        if i in kept or i in edge:
            continue
        if weight_only[i] and nodes[i].ref < 0 and nodes[i].op not in _EXCLUDED_OPS:
            kept.add(i)
            todo += nodes[i].args
        else:
            edge.add(i)
    return kept, edge


def _program(nodes: Sequence[Node], outputs: Sequence[int]) -> Program:
    """Return a program of one graph, whose sources' `ref` are positions among the arguments."""
    sources = sorted((n for n in nodes if n.ref >= 0), key=lambda n: n.ref)
    avals = tuple(jax.ShapeDtypeStruct(n.shape, jnp.dtype(n.dtype)) for n in sources)
    return Program(
        graph=build(nodes, outputs),
        bodies=(),
        bindings=tuple(Input(n.ref) for n in sources),
        in_avals=avals,
        weights=tuple(n.op == "weight" for n in sources),
        in_tree=flatten_args(avals, {})[1],
        out_tree=jax.tree.structure([0] * len(outputs)),
        n_outputs=len(outputs),
    )
