"""Narrow types: products and convolutions that read or multiply in fewer bits than float32.

A product of few rows takes as long as reading its weight from memory. In bfloat16 or float16 the
weight takes half of that time, in int8 a quarter. The rounding is a `cast` of the weight, made
once, before the first call. For int8 each column of the weight is first divided by a 127th of its
largest element, and the product is multiplied by that.

A product of more rows, and a convolution, takes as long as multiplying. In a narrower type the
processor multiplies more numbers at a time, where it has the instructions; so both operands are
rounded, by a lowering of the library. Either way sums are in float32, or exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.bindings import Binding, call_of, is_only_inlined
from xrl_jax.graph.graph import Node, infer, pack_attrs
from xrl_jax.libraries.base import LEAST_SCALE, LEVELS, Library, Rounding
from xrl_jax.libraries.xla.plain import dot_dims, dot_rows
from xrl_jax.lower.table import LOWERINGS, applicable, narrow, number_of
from xrl_jax.program.host import HostGraph, HostProgram, depends_on_weights, disassemble, reassemble
from xrl_jax.program.program import Program
from xrl_jax.transform.batch import MOST_ROWS
from xrl_jax.transform.signs import never_negative

_STORED, _MULTIPLIED = "weight-in-", "operands-in-"
# What a product or convolution may be given, most exact first: its weight in a type, or both
# operands in one. Where weights are in int8 the first operand may be in uint8, if never negative.
STORAGE = tuple(f"{_STORED}{dtype}" for dtype in ("float16", "bfloat16", "int8"))
OPERANDS = tuple(f"{_MULTIPLIED}{dtype}" for dtype in ("int16", "bfloat16", "uint8", "int8"))
PRECISIONS = (*STORAGE, *OPERANDS)


def type_of(precision: str) -> str:
    """Return the type of one of `PRECISIONS`."""
    return precision.removeprefix(_STORED).removeprefix(_MULTIPLIED)


class Site(NamedTuple):
    """A product or convolution that may have a lower precision: node `index` of graph `graph` of
    the program, as `disassemble` numbers them.
    """

    graph: int
    index: int


def sites(program: Program, library: Library) -> dict[Site, tuple[str, ...]]:
    """Return the products and convolutions of float32 activations with a weight of floats, in the
    order of the program, each with the precisions that it may have; those inside loops and branches
    are left out.
    """
    host = disassemble(program)
    graphs, signs = (host.main, *host.bodies), never_negative(host)
    return {
        Site(g, i): found
        for g in _inlined(graphs, host.bindings)
        for i, found in _sites(graphs[g], signs[g], host.bindings, library)
    }


def _inlined(graphs: Sequence[HostGraph], bindings: Sequence[Binding]) -> list[int]:
    """Return the indices of the main graph and of the bodies that only it calls, in turn."""
    inside = {b + 1 for b in range(len(graphs) - 1) if is_only_inlined(bindings, b)}
    for g in range(len(graphs) - 1, 0, -1):  # callers before callees
        if g not in inside:
            calls = (call_of(n, bindings, "inline") for n in graphs[g].nodes)
            inside -= {b + 1 for call in calls if call is not None for b in call.bodies}
    return [0, *sorted(inside)]


def _sites(
    graph: HostGraph, unsigned: Sequence[bool], bindings: Sequence[Binding], library: Library
) -> Iterator[tuple[int, tuple[str, ...]]]:
    fixed = depends_on_weights(graph, bindings)
    for i, node in enumerate(graph.nodes):
        if node.op not in ("dot", "conv") or node.dtype != "float32" or fixed[i]:
            continue
        x, w = (graph.nodes[a] for a in node.args)
        known = x.dtype == "float32" and w.dtype in ("float32", *ops.NARROW_DTYPES)
        if not known or not fixed[node.args[1]] or not math.prod(w.shape):
            continue
        found = _stored(node, x, w) or _multiplied(
            node, (x, w), library, unsigned=unsigned[node.args[0]]
        )
        if found:
            yield i, found


def _stored(node: Node, x: Node, w: Node) -> tuple[str, ...]:
    """Return the types of fewer bytes that the weight of a product of few rows may have."""
    if node.op != "dot":
        return ()
    (_, contracted), (batch, _) = dot_dims(node)
    if batch or not contracted or dot_rows(node, x.shape) > MOST_ROWS:
        return ()
    return STORAGE if w.dtype == "float32" else STORAGE[-1:]


def _multiplied(
    node: Node, args: tuple[Node, ...], library: Library, *, unsigned: bool
) -> tuple[str, ...]:
    """Return the types in which the library multiplies faster.

    Args:
      unsigned: whether the first operand is never negative.
    """
    rows = [LOWERINGS[node.op][n] for n in narrow(node, args)]
    fast = [row.rounds for row in rows if library.is_fast(row, node, args)]
    types = {rounds.dtype for rounds in fast if rounds is not None}
    types -= {"int8" if unsigned and "uint8" in types else "uint8"}  # the more exact one is left
    return tuple(p for p in OPERANDS if type_of(p) in types)


def rounding(node: Node, precision: str) -> Rounding:
    """Return how operands are rounded to this one of `OPERANDS`."""
    found = LOWERINGS[node.op][in_precision(node, precision).lowering].rounds
    assert found is not None
    return found


def stored(node: Node, w: np.ndarray, precision: str) -> np.ndarray:
    """Return the weight of a product, of float32, rounded to this one of `STORAGE`."""
    dtype = type_of(precision)
    if dtype != "int8":
        with np.errstate(over="ignore"):
            return w.astype(jnp.dtype(dtype)).astype(np.float32)
    (_, contracted), _ = dot_dims(node)
    size = np.max(np.abs(w), axis=contracted, keepdims=True)
    scale = np.maximum(size / LEVELS, LEAST_SCALE)
    return np.round(w / scale) * scale


def in_precision(node: Node, precision: str) -> Node:
    """Return a product or convolution with the lowering that rounds its operands to this one of
    `OPERANDS`.
    """
    rounds = (row.rounds for row in LOWERINGS[node.op])
    types = [r and r.dtype for r in rounds]
    return replace(node, lowering=types.index(type_of(precision)))


def narrowed(program: Program, chosen: Mapping[Site, str], library: Library) -> Program:
    """Return the program with these of its sites in these precisions (of `PRECISIONS`), and
    products with narrow weights in the lowering that the library prefers for them.
    """
    host = disassemble(program)
    graphs = []
    for g, graph in enumerate((host.main, *host.bodies)):
        own = {site.index: dtype for site, dtype in chosen.items() if site.graph == g}
        graphs.append(_Narrowing(library).graph(graph, own) if own else graph)
    return reassemble(program, HostProgram(graphs[0], tuple(graphs[1:]), host.bindings))


class _Narrowing:
    """A graph while precisions are lowered."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.nodes: list[Node] = []
        self.stored: dict[tuple[int, str, int], tuple[int, int | None]] = {}

    def graph(self, graph: HostGraph, chosen: Mapping[int, str]) -> HostGraph:
        new: list[int] = []
        for i, node in enumerate(graph.nodes):
            node = replace(node, args=tuple(new[a] for a in node.args))
            if chosen.get(i) in OPERANDS:
                new.append(self._append(in_precision(node, chosen[i])))
            elif i in chosen:
                new.append(self._product(node, type_of(chosen[i])))
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
