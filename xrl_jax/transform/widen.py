"""Widening: bfloat16 and float16 arithmetic in float32.

Without instructions for the narrow types, XLA:CPU converts every operand of a product to float32
and every result back, at each call, and rounds after every operator. Here the conversions are
nodes: activations are converted at the boundary of the program, weights once before the first
call, and what lies between is a float32 program like any other. It rounds less often than the
original, so its results are no less exact.

Inputs and outputs of the program, of opaque equations and of control flow keep their types. So do
values that are only moved, and weights that a product of few rows reads, because it takes as long
as reading them from memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
from jax import lax

from xrl_jax.graph import kinds, ops
from xrl_jax.graph.attributes import with_kind
from xrl_jax.graph.bindings import Binding, call_of, is_only_inlined, position_of
from xrl_jax.graph.graph import Node, pack_attrs
from xrl_jax.graph.operands import attach, flat_operands, link_of
from xrl_jax.libraries.xla.plain import dot_dims, dot_rows
from xrl_jax.program.host import HostGraph, depends_on_weights, disassemble, reassemble
from xrl_jax.program.program import Program
from xrl_jax.transform.batch import MOST_ROWS

WIDE_PLATFORMS = ("cpu",)  # JAX platforms whose arithmetic in float32 is at least as fast
_WIDE = "float32"
_BY_TYPE = ("nextafter",)  # operators whose meaning depends on the type, not only on the values
_MOVES = ("transpose", "reshape", "slice", "concat", "rev", "copy")


def widened(program: Program) -> Program:
    """Return the program with its bfloat16 and float16 arithmetic in float32.

    Returns `program` itself if it has none.
    """
    host = disassemble(program)
    if not any(n.dtype in ops.NARROW_DTYPES for g in (host.main, *host.bodies) for n in g.nodes):
        return program
    bindings = program.bindings
    wide_inputs = {
        b: _wide_inputs(body, bindings)
        for b, body in enumerate(host.bodies)
        if is_only_inlined(bindings, b)
    }
    bodies = [
        _Widening(bindings, wide_inputs).graph(body, wide_inputs.get(b))
        for b, body in enumerate(host.bodies)
    ]
    main = _Widening(bindings, wide_inputs).graph(host.main, None)
    return reassemble(program, replace(host, main=main, bodies=tuple(bodies)))


def operand_type(program: Program) -> str | None:
    """Return the narrow type of the operands of all products and convolutions of a program; None if
    they have no common one.
    """
    host = disassemble(program)
    found = {
        graph.nodes[a].dtype
        for graph in (host.main, *host.bodies)
        for node in graph.nodes
        if node.op in ("dot", "conv")
        for a in node.args
    }
    return found.pop() if len(found) == 1 and found <= set(ops.NARROW_DTYPES) else None


def _wide_inputs(body: HostGraph, bindings: Sequence[Binding]) -> frozenset[int]:
    """Return the positions of a body's inputs that become wide: those that are no weights."""
    return frozenset(
        position
        for node in body.nodes
        if node.op == "input" and node.dtype in ops.NARROW_DTYPES
        if (position := position_of(node, bindings)) is not None
    )


@dataclass
class _Widening:
    """A graph while it is widened.

    Attributes:
      wide_inputs: for each body that is only inlined, which of its inputs are wide; its outputs
        all are.
      nodes: the nodes of the new graph so far.
      narrowed: by a node of a wide value and a type, the node of that value in that type.
      stored: by a node of a wide value, the narrow node that was widened.
    """

    bindings: Sequence[Binding]
    wide_inputs: Mapping[int, frozenset[int]]
    nodes: list[Node] = field(default_factory=list)
    narrowed: dict[tuple[int, str], int] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)

    def graph(self, graph: HostGraph, wide_inputs: frozenset[int] | None) -> HostGraph:
        """Return the graph, widened.

        Args:
          wide_inputs: which of its inputs become wide; None if neither inputs nor outputs do.
        """
        old, new = graph.nodes, [-1] * len(graph.nodes)  # the wide value of each old node
        fixed = depends_on_weights(graph, self.bindings)
        for i, node in enumerate(old):
            if node.op == "pack":
                continue  # made anew with the node that it belongs to
            if node.op in ("opaque", "call"):
                index = self._holder(old, node, new)
            elif wide_inputs and position_of(node, self.bindings) in wide_inputs:
                index = self._appended(replace(node, dtype=_WIDE))
            else:
                index = self._operator(old, node, new, fixed)
            new[i] = self._as_wide(index)
        outputs = [new[o] for o in graph.outputs]
        avals = list(graph.in_avals)
        if wide_inputs is None:
            outputs = [self._as_narrow(new[o], old[o].dtype) for o in graph.outputs]
        for position in wide_inputs or ():
            avals[position] = jax.ShapeDtypeStruct(avals[position].shape, _WIDE)
        return replace(
            graph, nodes=tuple(self.nodes), outputs=tuple(outputs), in_avals=tuple(avals)
        )

    def _operator(
        self, old: Sequence[Node], node: Node, new: Sequence[int], fixed: Sequence[bool]
    ) -> int:
        """Return an operator on wide values, or a source or projection in its own type.

        Args:
          fixed: which of the old nodes depend on weights only.
        """
        args = tuple(new[a] for a in node.args)
        if node.op in _BY_TYPE or (node.op in _MOVES and self._are_stored(args, node.dtype)):
            args = tuple(self._as_narrow(new[a], old[a].dtype) for a in node.args)
        elif node.op == "proj":
            if self._inlined_inputs(old[node.args[0]]) is not None:
                node = replace(node, dtype=_wide(node.dtype))
        elif node.op == "cast" and self.nodes[args[0]].dtype == _wide(node.dtype):
            return args[0]
        elif node.op not in ("input", "weight", "array"):
            if any(old[a].dtype in ops.NARROW_DTYPES for a in node.args):
                node = replace(node, attrs=_without_algorithm(node))
            if node.dtype in ops.NARROW_DTYPES:
                attrs = with_kind(node, kinds.DTYPE, ops.DTYPE_CODE[_WIDE])
                node = replace(node, attrs=attrs, dtype=_WIDE)
            if node.op == "dot" and node.dtype == _WIDE and fixed[node.args[1]]:
                args = args[0], self._as_read(node, *args)
        return self._appended(replace(node, args=args))

    def _as_read(self, node: Node, x: int, w: int) -> int:
        """Return the weight of a product as stored if the rows are few, else in float32."""
        _, (batch, _) = dot_dims(node)
        is_short = not batch and dot_rows(node, self.nodes[x].shape) <= MOST_ROWS
        return self.stored.get(w, w) if is_short else w

    def _are_stored(self, values: Sequence[int], dtype: str) -> bool:
        """Whether these are all values of this type that were widened."""
        return all(v in self.stored and self.nodes[self.stored[v]].dtype == dtype for v in values)

    def _holder(self, old: Sequence[Node], node: Node, new: Sequence[int]) -> int:
        """Return an opaque equation or a call, on narrow values except where an inlined body takes
        wide ones.
        """
        inputs = self._inlined_inputs(node)
        given = [
            new[o] if inputs and position in inputs else self._as_narrow(new[o], old[o].dtype)
            for position, o in enumerate(flat_operands(old, node))
        ]
        if inputs is not None:
            node = replace(node, dtype=_wide(node.dtype))
        link = link_of(old, node)
        link = None if link is None else new[link]
        return attach(self.nodes, replace(node, args=()), given, link)

    def _inlined_inputs(self, node: Node) -> frozenset[int] | None:
        """Return which operands of a call are wide; None if it is not of a body with wide ones."""
        call = call_of(node, self.bindings, "inline")
        return None if call is None else self.wide_inputs.get(call.bodies[0])

    def _as_wide(self, index: int) -> int:
        """Return the node's value in float32 if it is narrow, else the node itself."""
        node = self.nodes[index]
        if node.dtype not in ops.NARROW_DTYPES:
            return index
        wide = self._cast(index, _WIDE)
        self.narrowed[wide, node.dtype] = self.stored[wide] = index
        return wide

    def _as_narrow(self, index: int, dtype: str) -> int:
        """Return a wide value in the type that it had before."""
        if self.nodes[index].dtype == dtype:
            return index
        if (index, dtype) not in self.narrowed:
            self.narrowed[index, dtype] = self._cast(index, dtype)
        return self.narrowed[index, dtype]

    def _cast(self, index: int, dtype: str) -> int:
        attrs = pack_attrs("cast", {"dtype": ops.DTYPE_CODE[dtype]})
        shape = self.nodes[index].shape
        return self._appended(Node("cast", (index,), attrs, shape=shape, dtype=dtype))

    def _appended(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1


def _wide(dtype: str) -> str:
    return _WIDE if dtype in ops.NARROW_DTYPES else dtype


def _without_algorithm(node: Node) -> tuple[int, ...]:
    """Return the attributes without a precision that names an algorithm for narrow operands."""
    for f in node.spec.of_kind(kinds.PRECISION):
        if isinstance(ops.decode_precision(node.attrs[f.offset]), lax.DotAlgorithmPreset):
            return with_kind(node, kinds.PRECISION, 0)
    return node.attrs
