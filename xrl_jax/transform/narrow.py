"""Narrow weights: products that read a weight in a type of fewer bytes than float32.

A product of few rows takes as long as reading its weight from memory. In bfloat16 or float16 the
weight takes half of that time, in int8 a quarter. The rounding is a `cast` of the weight, made
once, before the first call; it is the only operator that adds an error. For int8 each column of the
weight is first divided by a 127th of its largest element, and the product is multiplied by that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp

from xrl_jax.graph import ops
from xrl_jax.graph.bindings import Binding, is_only_inlined
from xrl_jax.graph.graph import Node, infer, pack_attrs
from xrl_jax.libraries.base import Library
from xrl_jax.libraries.xla.plain import dot_dims, dot_rows
from xrl_jax.lower.table import applicable, number_of
from xrl_jax.program.host import HostGraph, HostProgram, depends_on_weights, disassemble, reassemble
from xrl_jax.program.program import Program

STORAGE = ("float16", "bfloat16", "int8")  # types of weights, the most exact first
LEVELS = 127  # of int8 on either side of 0
LEAST_SCALE = float(jnp.finfo("float32").tiny)  # of a column of zeros


class Site(NamedTuple):
    """A product that may read a narrow weight: node `index` of graph `graph` of the program, as
    `disassemble` numbers them.
    """

    graph: int
    index: int


def sites(program: Program, *, most_rows: int | None = None) -> list[Site]:
    """Return the products of float32 activations with a weight of floats, in the order of the
    program; those inside loops and branches are left out.

    Args:
      most_rows: only products of at most so many rows; None for all.
    """
    host = disassemble(program)
    bodies = [b for b in range(len(host.bodies)) if is_only_inlined(host.bindings, b)]
    return [
        Site(g, i)
        for g, graph in ((0, host.main), *((b + 1, host.bodies[b]) for b in bodies))
        for i in _sites(graph, host.bindings)
        if most_rows is None or _rows(graph, i) <= most_rows
    ]


def _rows(graph: HostGraph, index: int) -> int:
    node = graph.nodes[index]
    return dot_rows(node, graph.nodes[node.args[0]].shape)


def _sites(graph: HostGraph, bindings: Sequence[Binding]) -> Iterator[int]:
    fixed = depends_on_weights(graph, bindings)
    for i, node in enumerate(graph.nodes):
        if node.op != "dot" or node.dtype != "float32" or fixed[i] or not fixed[node.args[1]]:
            continue
        (_, contracted), (batch, _) = dot_dims(node)
        args = [graph.nodes[a] for a in node.args]
        known = args[0].dtype == "float32" and args[1].dtype in ("float32", *ops.NARROW_DTYPES)
        if known and not batch and contracted and math.prod(args[1].shape):
            yield i


def narrower(program: Program, places: Sequence[Site]) -> dict[Site, tuple[str, ...]]:
    """Return the types of `STORAGE` that take fewer bytes than the weights of products do now."""
    host = disassemble(program)
    graphs = (host.main, *host.bodies)
    now = {s: graphs[s.graph].nodes[graphs[s.graph].nodes[s.index].args[1]].dtype for s in places}
    return {s: STORAGE if dtype == "float32" else ("int8",) for s, dtype in now.items()}


def narrowed(program: Program, chosen: Mapping[Site, str], library: Library) -> Program:
    """Return the program with the weights of these products in these types (of `STORAGE`), and the
    products in the lowering that the library prefers for them.
    """
    host = disassemble(program)
    graphs = []
    for g, graph in enumerate((host.main, *host.bodies)):
        own = {site.index: dtype for site, dtype in chosen.items() if site.graph == g}
        graphs.append(_Narrowing(library).graph(graph, own) if own else graph)
    return reassemble(program, HostProgram(graphs[0], tuple(graphs[1:]), host.bindings))


class _Narrowing:
    """A graph while its products get narrow weights."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.nodes: list[Node] = []
        self.stored: dict[tuple[int, str, int], tuple[int, int | None]] = {}

    def graph(self, graph: HostGraph, chosen: Mapping[int, str]) -> HostGraph:
        new: list[int] = []
        for i, node in enumerate(graph.nodes):
            node = replace(node, args=tuple(new[a] for a in node.args))
            if i in chosen:
                new.append(self._product(node, chosen[i]))
            else:
                new.append(self._append(node))
        outputs = tuple(new[o] for o in graph.outputs)
        return replace(graph, nodes=tuple(self.nodes), outputs=outputs)

    def _product(self, node: Node, dtype: str) -> int:
        """Return the product of a node with its weight in this type."""
        x, w = node.args
        (_, contracted), _ = dot_dims(node)
        key = w, dtype, ops.mask_of(contracted)
        if key not in self.stored:
            self.stored[key] = (
                self._in_int8(w, contracted)
                if dtype == "int8"
                else (self._add("cast", w, dtype=ops.DTYPE_CODE[dtype]), None)
            )
        narrow, scale = self.stored[key]
        node = self._lowered(replace(node, args=(x, narrow)))
        y = self._append(node)
        if scale is None:
            return y
        free = len(self.nodes[scale].shape)
        dims = tuple(range(len(node.shape) - free, len(node.shape)))
        return self._add("mul", y, self._broadcast(scale, node.shape, dims))

    def _in_int8(self, w: int, contracted: Sequence[int]) -> tuple[int, int]:
        """Return a weight in int8, and the factors of its columns."""
        if self.nodes[w].dtype != "float32":
            w = self._add("cast", w, dtype=ops.DTYPE_CODE["float32"])
        shape = self.nodes[w].shape
        kept = tuple(d for d in range(len(shape)) if d not in contracted)
        size = self._add("reduce_max", self._add("abs", w), axes=ops.mask_of(tuple(contracted)))
        scale = self._add("div", size, self._scalar(float(LEVELS)))
        scale = self._add("max", scale, self._scalar(LEAST_SCALE))
        levels = self._add("div", w, self._broadcast(scale, shape, kept))
        # To the nearest, ties to even.
        levels = self._add("round", levels, method=1)
        return self._add("cast", levels, dtype=ops.DTYPE_CODE["int8"]), scale

    def _lowered(self, node: Node) -> Node:
        args = tuple(self.nodes[a] for a in node.args)
        fit = applicable(node, args)
        names = self.library.preferred(node, args)
        numbers = [n for n in (number_of(node.op, name) for name in names) if n in fit]
        return replace(node, lowering=numbers[0] if numbers else 0)

    def _broadcast(self, x: int, shape: Sequence[int], dims: Sequence[int]) -> int:
        return self._add("broadcast", x, shape=shape, rank=len(shape), dims=dims)

    def _scalar(self, value: float) -> int:
        return self._append(Node("const", value=value))

    def _add(self, op: str, *args: int, **attrs: int | Sequence[int]) -> int:
        packed = pack_attrs(op, attrs)
        found = infer(op, packed, [self.nodes[a] for a in args])
        assert found is not None, (op, attrs)
        shape, dtype = found
        return self._append(Node(op, args, packed, shape=shape, dtype=dtype))

    def _append(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1
