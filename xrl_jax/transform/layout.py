"""Layout conversion of values that cross the boundary of a folded body.

A body is called from several places, so a rule cannot move a transpose across its boundary. This
pass inserts a pair of inverse transposes at every crossing value of one kind, one on each side of
the boundary; rewriting then moves and cancels them separately inside and outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax

from xrl_jax.graph import ops
from xrl_jax.graph.bindings import Binding, call_of, is_only_inlined, position_of
from xrl_jax.graph.graph import Node, pack_attrs
from xrl_jax.graph.operands import attach, flat_operands
from xrl_jax.libraries.xla.plain import conv_layouts, dot_dims
from xrl_jax.program.host import HostGraph, disassemble, reassemble
from xrl_jax.program.program import Program

Perm = tuple[int, ...]
Which = Callable[[Node], bool]


class Layout(NamedTuple):
    """A layout of activations.

    Attributes:
      name: its name in reports.
      perm: rank -> the permutation that transposes an array of that rank into the layout.
      concerns: graph -> predicate of the values that take this layout; None if there is nothing to
        gain.
      sources: whether a value that a graph's operators do not compute (an input, an opaque result)
        gets a transpose into the layout and one back where it originates, so that its consumers can
        follow.
    """

    name: str
    perm: Callable[[int], Perm]
    concerns: Callable[[HostGraph], Which | None]
    sources: bool


def _images(graph: HostGraph) -> Which | None:
    """Return a predicate of rank-4 float values; None unless the graph convolves NCHW images."""
    if not any(n.op == "conv" and conv_layouts(n)[0] == (0, 1, 2, 3) for n in graph.nodes):
        return None
    return lambda node: len(node.shape) == 4 and node.dtype in ops.FLOAT_DTYPES


def _rows(graph: HostGraph) -> Which | None:
    """Return a predicate of float values of rank 2 or 3; None if nothing is multiplied by a weight.

    The last dimension must have the size of one that a product with a weight contracts or produces.
    """
    fixed: list[bool] = []
    widths: set[int] = set()
    for node in graph.nodes:
        fixed.append(
            node.op in ("weight", "const") or (bool(node.args) and all(fixed[a] for a in node.args))
        )
        if node.op == "dot" and fixed[node.args[1]] and not fixed[node.args[0]]:
            lhs = graph.nodes[node.args[0]].shape
            ((contracted, _), _) = dot_dims(node)
            if contracted == (len(lhs) - 1,):
                widths |= {lhs[-1], node.shape[-1]}
    if not widths:
        return None
    return lambda node: (
        len(node.shape) in (2, 3) and node.shape[-1] in widths and node.dtype in ops.FLOAT_DTYPES
    )


FEATURES_LAST = Layout(
    "features-last", lambda rank: (0, *range(2, rank), 1), _images, sources=False
)
FEATURES_FIRST = Layout(
    "features-first", lambda rank: (rank - 1, *range(rank - 1)), _rows, sources=True
)


def convert_layout(program: Program, layout: Layout) -> Program:
    """Return the program with the inputs and outputs of its bodies in this layout.

    Returns `program` itself if the layout concerns nothing.
    """
    host = disassemble(program)
    by_body: TransposedPlaces = {}
    for b, body in enumerate(host.bodies):
        which = layout.concerns(body) if is_only_inlined(program.bindings, b) else None
        if which is not None:
            places = _crossing(body, which, program.bindings)
            if any(places[0]) or any(places[1]):
                by_body[b] = places
    sources = layout.concerns(host.main) if layout.sources else None
    if not by_body and sources is None:
        return program
    transposer = _Transposer(layout.perm, by_body, program.bindings)
    bodies = []
    for b, body in enumerate(host.bodies):
        ins, outs = by_body.get(b, ((False,) * len(body.in_avals), (False,) * len(body.outputs)))
        bodies.append(transposer.graph(body, ins, outs))
    nothing = (False,) * len(host.main.in_avals), (False,) * len(host.main.outputs)
    main = transposer.graph(host.main, *nothing, sources=sources or (lambda _: False))
    return reassemble(program, replace(host, main=main, bodies=tuple(bodies)))


Places = tuple[tuple[bool, ...], tuple[bool, ...]]  # which inputs and which outputs are transposed
TransposedPlaces = dict[int, Places]  # by body


def _crossing(body: HostGraph, which: Which, bindings: Sequence[Binding]) -> Places:
    """Return which inputs and outputs of a body are transposed."""
    ins = [False] * len(body.in_avals)
    for node in body.nodes:
        position = position_of(node, bindings)
        if node.op == "input" and position is not None and which(node):
            ins[position] = True
    return tuple(ins), tuple(which(body.nodes[o]) for o in body.outputs)


def _permuted(shape: Sequence[int], perm: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[p] for p in perm)


def _inverse(perm: Perm) -> Perm:
    return tuple(perm.index(d) for d in range(len(perm)))


class _Transposer(NamedTuple):
    perm: Callable[[int], Perm]
    by_body: TransposedPlaces
    bindings: Sequence[Binding]

    def graph(
        self,
        graph: HostGraph,
        ins: Sequence[bool],
        outs: Sequence[bool],
        *,
        sources: Which = lambda _: False,
    ) -> HostGraph:
        """Return a graph with these inputs and outputs transposed, and its calls adapted."""
        nodes: list[Node] = []

        def transposed(index: int, *, back: bool = False) -> int:
            node = nodes[index]
            perm = self.perm(len(node.shape))
            perm = _inverse(perm) if back else perm
            attrs = pack_attrs("transpose", {"perm": perm})
            shape = _permuted(node.shape, perm)
            nodes.append(Node("transpose", (index,), attrs, shape=shape, dtype=node.dtype))
            return len(nodes) - 1

        def in_layout(shape: tuple[int, ...]) -> tuple[int, ...]:
            return _permuted(shape, self.perm(len(shape)))

        new: list[int] = []  # for each old node, the new one of the same value
        for node in graph.nodes:
            places = self._places_of(node)
            if places is None:
                nodes.append(replace(node, args=tuple(new[a] for a in node.args)))
            else:
                operands = [
                    transposed(new[a]) if is_transposed else new[a]
                    for a, is_transposed in zip(
                        flat_operands(graph.nodes, node), places[0], strict=True
                    )
                ]
                attach(nodes, node, operands)
            new.append(len(nodes) - 1)
            position = position_of(node, self.bindings)
            if node.op == "input" and position is not None:
                is_transposed = ins[position]
            elif node.op == "proj":
                places = self._places_of(graph.nodes[node.args[0]])
                is_transposed = places is not None and places[1][node.scalar_attr("index")]
            else:
                is_transposed = places is not None and node.dtype != "tuple" and places[1][0]
            if is_transposed:
                nodes[-1] = replace(nodes[-1], shape=in_layout(node.shape))
                new[-1] = transposed(new[-1], back=True)
            elif node.op in _SOURCES and sources(node):
                new[-1] = transposed(transposed(new[-1]), back=True)
        outputs = tuple(
            transposed(new[o]) if t else new[o] for o, t in zip(graph.outputs, outs, strict=True)
        )
        avals = tuple(
            jax.ShapeDtypeStruct(in_layout(a.shape), a.dtype) if t else a
            for a, t in zip(graph.in_avals, ins, strict=True)
        )
        return replace(graph, nodes=tuple(nodes), outputs=outputs, in_avals=avals)

    def _places_of(self, node: Node) -> Places | None:
        call = call_of(node, self.bindings, "inline")
        return None if call is None else self.by_body.get(call.bodies[0])


_SOURCES = ("input", "opaque", "call", "proj")  # no rule moves a transpose past these
