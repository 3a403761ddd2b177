"""Checks, on the host, that a graph is well formed; messages show the offending node.

`check_program` checks whole programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn

import jax
import numpy as np

from xrl_jax.graph import attributes, ops
from xrl_jax.graph.bindings import Array, Binding, Call, Equation, Input
from xrl_jax.graph.graph import (
    GraphError,
    Node,
    TensorGraph,
    infer,
    node_at,
    padded,
)
from xrl_jax.graph.operands import flat_operands
from xrl_jax.graph.text import format_node, format_type

_REF_KINDS: Mapping[str, type] = MappingProxyType(
    {
        "input": Input,
        "weight": Input,
        "array": Array,
        "const": Array,
        "opaque": Equation,
        "call": Call,
    }
)
_HOLDERS = ("opaque", "call", "pack", "proj")  # may read arrays of more than MAX_RANK dimensions


class View:
    """A graph on the host, indexed by slot, with error messages that show a slot."""

    def __init__(self, graph: TensorGraph, name: str) -> None:
        host = jax.tree.map(np.asarray, graph)
        self.name = name
        self.f = host.nodes
        self.graph = host
        self.n = len(self.f.op)
        self.table = host.senders.reshape(-1, ops.MAX_ARGS) if len(host.senders) else host.senders
        self.live = [int(i) for i in np.flatnonzero(self.f.op != ops.HOLE)]

    def args(self, slot: int) -> list[int]:
        return [int(a) for a in self.table[slot] if a]

    def op(self, slot: int) -> str:
        code = int(self.f.op[slot])
        return ops.OP_NAMES[code] if 0 <= code < ops.N_OPS else f"op code {code}"

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes by slot, with `args` as slots; all op codes must be known."""
        return [self.node(slot) for slot in range(self.n)]

    def node(self, slot: int) -> Node:
        return node_at(self.f, slot, self.args(slot))

    def text(self, slot: int) -> str:
        """Describe a slot in one line, even if its node is malformed."""
        if not 0 <= slot < self.n:
            return f"%{slot}: outside the bucket of {self.n}"
        op, args = self.op(slot), self.args(slot)
        if op not in ops.OPS or not 0 <= self.f.dtype[slot] < len(ops.DTYPES):
            names = ", ".join(f"%{a}" for a in args)
            return f"%{slot}: dtype code {int(self.f.dtype[slot])} = {op}({names})"
        if op == "hole":
            return f"%{slot}: hole"
        first = args[0] if args and 0 <= args[0] < self.n else 0
        rank = int(self.f.rank[first]) if args else 0
        return format_node(self.node(slot), f"%{slot}", [f"%{a}" for a in args], rank)

    def fail(self, slot: int, message: str) -> NoReturn:
        """Raise GraphError with a message that shows the node, its arguments and its consumers."""
        lines = [f"{self.name}: node %{slot} ({self.op(slot)}): {message}"]
        lines.append("  " + self.text(slot))
        args = dict.fromkeys(self.args(slot))
        users = [u for u in self.live if slot in self.args(u)][:8]
        for title, slots in (("its arguments", args), ("used by", users)):
            if slots:
                lines += [f"{title}:", *("  " + self.text(s) for s in slots)]
        raise GraphError("\n".join(lines))


def _check_edges(view: View) -> None:
    g, n = view.graph, view.n
    width = ops.MAX_ARGS
    slots = np.repeat(np.arange(n), width)
    columns = np.tile(np.arange(width), n)
    if any(len(column) != n * width for column in (g.senders, g.receivers, g.edges)):
        raise GraphError(f"{view.name}: {n} nodes need {n * width} edges")
    if list(g.n_node) != [n] or list(g.n_edge) != [n * width]:
        raise GraphError(f"{view.name}: n_node and n_edge must be {n} and {n * width}")
    wrong = np.flatnonzero((g.receivers != slots) | (g.edges != columns))
    if len(wrong):
        at = int(wrong[0])
        view.fail(
            int(slots[at]),
            f"edges are not in (receiver, slot) order: edge {at} is ({int(g.receivers[at])}, "
            f"{int(g.edges[at])}), not ({int(slots[at])}, {int(columns[at])})",
        )


def _check_args(view: View) -> None:
    if view.n and view.f.op[0] != ops.HOLE:
        view.fail(0, "slot 0 must be a hole: it stands for 'no argument'")
    for slot in range(view.n):
        op = view.op(slot)
        row = view.table[slot]
        args = view.args(slot)
        if op not in ops.OPS:
            view.fail(slot, f"unknown op code (known: 0 to {ops.N_OPS - 1})")
        if op == "hole":
            if args:
                view.fail(slot, f"a hole has arguments {args}")
            continue
        for a in args:
            if not 0 <= a < view.n:
                view.fail(slot, f"argument %{a} is outside the bucket of {view.n}")
            if view.f.op[a] == ops.HOLE:
                view.fail(slot, f"argument %{a} is a hole")
        if np.any(row[: len(args)] == 0):
            view.fail(slot, f"there is a gap in its arguments {row.tolist()}")
        least, most = ops.OPS[op].arity
        if not least <= len(args) <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            view.fail(slot, f"takes {wanted} arguments, got {len(args)}")


def _check_depth(view: View) -> None:
    depth = view.graph.globals.depth
    bad = [s for s in view.live if any(depth[a] >= depth[s] for a in view.args(s))]
    if not bad:
        return
    left = set(view.live)
    while ready := [s for s in left if not left.intersection(view.args(s))]:
        left.difference_update(ready)
    if left:
        path = [min(left)]
        while path[-1] not in path[:-1]:
            path.append(next(a for a in view.args(path[-1]) if a in left))
        cycle = path[path.index(path[-1]) :]
        view.fail(cycle[0], f"is part of a cycle: {' <- '.join(f'%{s}' for s in cycle)}")
    own, args = int(depth[bad[0]]), {f"%{a}": int(depth[a]) for a in view.args(bad[0])}
    view.fail(bad[0], f"depth {own} is not greater than those of its arguments, {args}")


def _check_types(view: View, lowerings: Mapping[str, int] | None) -> None:
    for slot in view.live:
        if not 0 <= view.f.dtype[slot] < len(ops.DTYPES):
            view.fail(slot, f"unknown dtype code {int(view.f.dtype[slot])}")
    for slot in view.live:
        rank, op = int(view.f.rank[slot]), view.op(slot)
        node = view.nodes[slot]
        args = [view.nodes[a] for a in node.args]
        if rank < 0:
            view.fail(slot, f"rank {rank} is negative")
        if np.any(view.f.shape[slot] < 0) or np.any(view.f.shape[slot][rank:] != 1):
            view.fail(slot, f"shape {view.f.shape[slot].tolist()} must be {rank} sizes, then ones")
        most = None if lowerings is None else lowerings.get(op, 1)
        if node.lowering < 0 or (most is not None and node.lowering >= most):
            known = "" if most is None else f" (known: 0 to {most - 1})"
            view.fail(slot, f"lowering {node.lowering} is out of range{known}")
        if wrong := attributes.error(node, [len(a.shape) for a in args]):
            view.fail(slot, wrong)
        same = {args[i].dtype for i in node.spec.one_dtype if i < len(args)}
        if len(same) > 1:
            view.fail(slot, f"arguments must have one dtype, got {', '.join(sorted(same))}")
        wide = [a for a in args if len(a.shape) > ops.MAX_RANK]
        if wide and op not in _HOLDERS:
            view.fail(slot, f"takes arrays of at most {ops.MAX_RANK} dimensions")
        if node.spec.shape == "given":
            continue
        found = infer(op, node.attrs, args)
        if found is None:
            view.fail(slot, "arguments and attributes do not fit its shape rule")
        if found != (node.shape, node.dtype):
            has, should = format_type(node.shape, node.dtype), format_type(*found)
            view.fail(slot, f"has type {has}, but its shape rule gives {should}")


def matches(node: Node, aval: Any) -> bool:
    dtype = str(aval.dtype)
    dtype = dtype if dtype in ops.DTYPE_CODE else "extended"
    same_rank = len(node.shape) == len(aval.shape)
    return same_rank and padded(node.shape) == padded(aval.shape) and node.dtype == dtype


def aval_type(aval: Any) -> str:
    return format_type(aval.shape, str(aval.dtype))


def _equation(binding: Binding) -> Equation | None:
    binding = binding.equation if isinstance(binding, Call) and binding.equation else binding
    return binding if isinstance(binding, Equation) else None


def _check_refs(view: View, bindings: Sequence[Binding] | None) -> None:
    for slot in view.live:
        node = view.nodes[slot]
        kind = _REF_KINDS.get(node.op)
        if node.ref < -1 or (kind is None and node.ref != -1):
            view.fail(slot, f"refers to binding @{node.ref}, but {node.op} takes none")
        if kind is not None and node.ref < 0 and node.op != "const":
            view.fail(
                slot, f"refers to no binding, but {node.op} needs one of kind {kind.__name__}"
            )
        if node.op == "proj" and view.op(node.args[0]) not in ("opaque", "call"):
            view.fail(slot, "its argument must be an opaque node or a call")
        if node.op in ("opaque", "call"):
            wanted, got = node.scalar_attr("n_args"), len(flat_operands(view.nodes, node))
            if got != wanted:
                view.fail(slot, f"n_args is {wanted}, but it has {got} operands")
        if bindings is None or kind is None or node.ref < 0:
            continue
        if node.ref >= len(bindings):
            view.fail(
                slot, f"refers to binding @{node.ref}, but there are {len(bindings)} bindings"
            )
        binding = bindings[node.ref]
        if not isinstance(binding, kind):
            found = type(binding).__name__
            view.fail(slot, f"@{node.ref} is of kind {found}, but {node.op} needs {kind.__name__}")
        if isinstance(binding, Array) and not matches(node, binding.value):
            view.fail(slot, f"its type differs from @{node.ref}, {aval_type(binding.value)}")
        equation = _equation(binding)
        if equation and equation.n_outputs == 1 and not matches(node, equation.avals[0]):
            view.fail(
                slot,
                f"its type differs from the result of @{node.ref}, {aval_type(equation.avals[0])}",
            )
    if bindings is not None:
        _check_projections(view, bindings)


def _check_projections(view: View, bindings: Sequence[Binding]) -> None:
    for slot in view.live:
        node = view.nodes[slot]
        if node.op != "proj":
            continue
        equation = _equation(bindings[view.nodes[node.args[0]].ref])
        if equation is None:
            continue  # an inlined body: `check_program` checks its results
        index = node.scalar_attr("index")
        if index >= equation.n_outputs:
            view.fail(
                slot,
                f"index {index} is out of range: {equation.name} has {equation.n_outputs} results",
            )
        if not matches(node, equation.avals[index]):
            view.fail(
                slot, f"its type differs from result {index}, {aval_type(equation.avals[index])}"
            )


def _check_weight_only(view: View) -> None:
    flags = view.f.weight_only
    for slot in view.live:
        node = view.nodes[slot]
        if node.op in ("weight", "array", "const", "iota"):
            wanted = True
        elif node.op == "input" or (node.op in ("opaque", "call") and node.attr("pinned")):
            wanted = False
        else:
            wanted = all(flags[a] for a in node.args)
        if bool(flags[slot]) != wanted:
            view.fail(slot, f"weight_only is {bool(flags[slot])}, but must be {wanted}")


def _check_outputs(view: View) -> None:
    outputs = view.graph.globals.outputs
    n_out = int(np.sum(outputs >= 0))
    if np.any(outputs[:n_out] < 0) or np.any(outputs < -1):
        raise GraphError(f"{view.name}: outputs {outputs.tolist()} must be slots, then -1")
    for i, slot in enumerate(outputs[:n_out].tolist()):
        if slot >= view.n or view.f.op[slot] == ops.HOLE:
            raise GraphError(f"{view.name}: output {i} is not a node: {view.text(slot)}")


def check(
    graph: TensorGraph,
    *,
    bindings: Sequence[Binding] | None = None,
    lowerings: Mapping[str, int] | None = None,
    name: str = "graph",
) -> None:
    """Raise GraphError unless the graph is well formed.

    Args:
      bindings: the bindings that `ref` indexes; without them only the presence of refs is checked.
      lowerings: the number of lowerings of each op, 1 for a missing op; None allows any number.
      name: the name of the graph in messages.

    Raises:
      GraphError: names the first offending node by its slot and shows it with its neighbours.
    """
    view = View(graph, name)
    _check_edges(view)
    _check_args(view)
    _check_depth(view)
    _check_types(view, lowerings)
    _check_refs(view, bindings)
    _check_weight_only(view)
    _check_outputs(view)
