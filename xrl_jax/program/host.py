"""Programs on the host while a front end builds them: lists of nodes, before they become arrays.

Tracing and folding work on a `HostProgram`. `assemble` turns it into the graphs and bodies of a
`Program`: it removes dead code, unused bodies and unused bindings, finds out which body inputs are
weights, and counts how often each body runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from xrl_jax.graph import graph as graph_lib
from xrl_jax.graph import ops
from xrl_jax.graph.bindings import (
    CONTROL_FLOW,
    Array,
    Binding,
    Call,
    Input,
    call_of,
    position_of,
    scan_sizes,
)
from xrl_jax.graph.graph import Node, pack_attrs
from xrl_jax.graph.operands import attach, flat_operands, is_pinned
from xrl_jax.program.program import Body, Program

# How often the condition and the body of a while loop run: an assumption, since the number is not
# known; a worthwhile loop runs more than a few times.
WHILE_COUNT = 8.0


@dataclass(frozen=True)
class HostGraph:
    """A graph as a list of nodes in trace order: arguments come before the nodes that use them.

    Attributes:
      nodes: sources included, each once.
      outputs: indices into `nodes`.
      in_avals: of the flat arguments, used or not.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    name: str = "body"


@dataclass(frozen=True)
class HostProgram:
    """A main graph, bodies (callees before callers) and the bindings that all nodes refer to."""

    main: HostGraph
    bodies: tuple[HostGraph, ...]
    bindings: tuple[Binding, ...]


class Bindings:
    """A growing list of bindings; equal ones share an index where they can be compared."""

    def __init__(self, start: Sequence[Binding] = ()) -> None:
        self.rows: list[Binding] = []
        self._index: dict[Any, int] = {}
        for binding in start:
            self._index.setdefault(_key(binding), len(self.rows))
            self.rows.append(binding)

    def add(self, binding: Binding) -> int:
        """Return the index of a binding equal to this one, appending it if necessary."""
        key = _key(binding)
        if key not in self._index:
            self._index[key] = len(self.rows)
            self.rows.append(binding)
        return self._index[key]


def _key(binding: Binding) -> Any:
    """Return a key of a binding: equal keys mean equal bindings.

    Arrays and bindings with unhashable parameters are equal only to themselves.
    """
    if isinstance(binding, Input):
        return ("input", binding.position)
    if isinstance(binding, Array):
        value = binding.value
        if isinstance(value, np.ndarray) and value.ndim == 0:
            return ("scalar", str(value.dtype), value.tobytes())
        return ("array", id(value))
    if isinstance(binding, Call) and binding.equation is None:
        return ("call", binding.kind, binding.bodies)
    equation = binding.equation if isinstance(binding, Call) else binding
    assert equation is not None
    params, bodies = equation.params, ()
    if isinstance(binding, Call):  # the bodies stand for the jaxprs
        bodies = binding.bodies
        params = {k: v for k, v in params.items() if k not in CONTROL_FLOW[binding.kind]}
    key = (
        equation.name,
        bodies,
        tuple(sorted(params.items(), key=lambda p: p[0])),
        equation.avals,
    )
    try:
        hash(key)
    except TypeError:
        return ("equation", id(equation))
    return key


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype in `ops.DTYPES`; "extended" if the table does not have it."""
    name = getattr(dtype, "name", str(dtype))
    return name if name in ops.DTYPE_CODE else "extended"


def exact_float32(value: np.ndarray) -> float | None:
    """Return the scalar if float32 holds it exactly; None otherwise, and for NaN and subnormals."""
    if value.dtype.kind == "c":
        return None
    narrow = np.asarray(value).astype(np.float32)
    if not np.isfinite(narrow) and not np.isinf(value):
        return None
    if narrow != 0 and abs(narrow) < np.finfo(np.float32).tiny:
        return None
    if value.dtype.kind in "iub":
        return float(narrow) if int(narrow) == int(value) else None
    return float(narrow) if narrow == value else None


def struct(aval: Any) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and weak type of an abstract value or array."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False))
    )


def source_key(node: Node) -> Any:
    """Return a key that is equal for sources with the same value."""
    bits = np.float32(node.value).tobytes()
    return (node.op, node.attrs, node.shape, node.dtype, bits, node.ref)


def append_holder(
    nodes: list[Node],
    node: Node,
    operands: Sequence[int],
    types: Sequence[tuple[tuple[int, ...], str]],
    after: int | None = None,
) -> tuple[int, list[int]]:
    """Append an `opaque` or `call` node whose results have these shapes and dtypes.

    Args:
      node, operands, after: as for `operands.attach`.

    Returns:
      The index of the node, and the indices of its results: the node itself, or its projections.
    """
    if len(types) == 1:
        ((shape, dtype),) = types
        index = attach(nodes, replace(node, shape=shape, dtype=dtype), operands, after)
        return index, [index]
    index = attach(nodes, replace(node, dtype="tuple"), operands, after)
    for k, (shape, dtype) in enumerate(types):
        attrs = pack_attrs("proj", {"index": k})
        nodes.append(Node("proj", (index,), attrs, shape=shape, dtype=dtype))
    return index, list(range(index + 1, len(nodes)))


def append_call(
    nodes: list[Node], ref: int, operands: Sequence[int], made: Sequence[Node]
) -> list[int]:
    """Append a call of a body with results like `made`; return the indices of the results."""
    return append_holder(
        nodes, Node("call", ref=ref), operands, [(n.shape, n.dtype) for n in made]
    )[1]


def live(graph: HostGraph) -> HostGraph:
    """Return the graph without nodes that no output or pinned node depends on; order is kept."""
    needed = [False] * len(graph.nodes)
    for o in graph.outputs:
        needed[o] = True
    for i in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[i]
        needed[i] = needed[i] or is_pinned(node)
        if needed[i]:
            for a in node.args:
                needed[a] = True
    keep = [i for i, n in enumerate(needed) if n]
    nodes, outputs = graph_lib.renumber(graph.nodes, graph.outputs, keep)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)


def weight_only(
    graph: HostGraph, inputs: Sequence[bool], bindings: Sequence[Binding]
) -> list[bool]:
    """Return, for each node, whether it depends only on constants and weight inputs."""
    known: list[bool] = []
    for node in graph.nodes:
        position = position_of(node, bindings)
        if position is not None:
            known.append(inputs[position])
        else:
            known.append(not is_pinned(node) and all(known[a] for a in node.args))
    return known


def depends_on_weights(graph: HostGraph, bindings: Sequence[Binding]) -> list[bool]:
    """Return, for each node of a graph whose inputs are marked, whether it is weight-only."""
    inputs = [False] * len(graph.in_avals)
    for node in graph.nodes:
        if (position := position_of(node, bindings)) is not None:
            inputs[position] = node.op == "weight"
    return weight_only(graph, inputs, bindings)


def call_sites(call: Call, flags: Sequence[bool]) -> list[tuple[int, float, list[bool]]]:
    """Return how a call uses each of its bodies.

    Args:
      flags: for each operand of the call node, whether it is weight-only.

    Returns:
      For each body: (body, runs per run of the caller, which inputs are weights).
    """
    if call.equation is None:
        return [(call.bodies[0], 1.0, list(flags))]
    params = call.equation.params
    if call.kind == "scan":
        first, n_carry = scan_sizes(params)
        last = first + n_carry
        inputs = [f and not first <= i < last for i, f in enumerate(flags)]
        return [(call.bodies[0], float(params["length"]), inputs)]
    if call.kind == "while":
        n_cond = params["cond_nconsts"]
        n_both = n_cond + params["body_nconsts"]
        carries = [False] * (len(flags) - n_both)
        return [
            (call.bodies[0], WHILE_COUNT, [*flags[:n_cond], *carries]),
            (call.bodies[1], WHILE_COUNT, [*flags[n_cond:n_both], *carries]),
        ]
    share = 1.0 / len(call.bodies)
    return [(b, share, list(flags[1:])) for b in call.bodies]


def _argument(node: Node, *, is_weight: bool) -> Node:
    if is_weight:
        return replace(node, op="weight", attrs=Node("weight").attrs)
    return replace(node, op="input")


def _mark_weights(host: HostProgram, weights: Sequence[bool]) -> tuple[HostProgram, list[float]]:
    """Mark the weight inputs of all graphs; return also how often each body runs."""
    graphs = [host.main, *host.bodies]
    inputs: list[list[bool]] = [list(weights)] + [[True] * len(b.in_avals) for b in host.bodies]
    counts = [1.0] + [0.0] * len(host.bodies)
    # Bodies come before their callers, so graphs are visited from the end: all call sites of a body
    # are known when the body is reached.
    for g in [0, *range(len(graphs) - 1, 0, -1)]:
        known = weight_only(graphs[g], inputs[g], host.bindings)
        for node in graphs[g].nodes:
            call = call_of(node, host.bindings)
            if call is None:
                continue
            flags = [known[a] for a in flat_operands(graphs[g].nodes, node)]
            for body, runs, are_weights in call_sites(call, flags):
                counts[body + 1] += counts[g] * runs
                inputs[body + 1] = [
                    a and b for a, b in zip(inputs[body + 1], are_weights, strict=True)
                ]
        nodes = list(graphs[g].nodes)
        for i, node in enumerate(nodes):
            if (position := position_of(node, host.bindings)) is not None:
                nodes[i] = _argument(node, is_weight=inputs[g][position])
        graphs[g] = replace(graphs[g], nodes=tuple(nodes))
    return replace(host, main=graphs[0], bodies=tuple(graphs[1:])), counts[1:]


def _prune(host: HostProgram) -> HostProgram:
    """Return the program without dead code, uncalled bodies and unreferenced bindings."""
    graphs = [live(host.main), *(live(b) for b in host.bodies)]
    called: set[int] = set()
    for g in [0, *range(len(graphs) - 1, 0, -1)]:
        if g == 0 or g - 1 in called:
            for node in graphs[g].nodes:
                if (call := call_of(node, host.bindings)) is not None:
                    called.update(call.bodies)
    kept = sorted(called)
    new_body = {old: new for new, old in enumerate(kept)}
    graphs = [graphs[0], *(graphs[b + 1] for b in kept)]
    new_ref: dict[int, int] = {-1: -1}
    rows: list[Binding] = []
    for node in (n for g in graphs for n in g.nodes):
        if node.ref not in new_ref:
            new_ref[node.ref] = len(rows)
            row = host.bindings[node.ref]
            if isinstance(row, Call):
                row = replace(row, bodies=tuple(new_body[b] for b in row.bodies))
            rows.append(row)
    graphs = [
        replace(g, nodes=tuple(replace(n, ref=new_ref[n.ref]) for n in g.nodes)) for g in graphs
    ]
    return HostProgram(graphs[0], tuple(graphs[1:]), tuple(rows))


def assemble(
    host: HostProgram,
    weights: Sequence[bool],
    *,
    in_tree: Any,
    out_tree: Any,
    fn: Any,
    weak_outputs: Sequence[int] = (),
) -> Program:
    """Return the program of a host program.

    Args:
      weights: for each flat argument, whether it stays the same between calls.
      in_tree, out_tree, fn, weak_outputs: as in `Program`.
    """
    host, counts = _mark_weights(_prune(host), weights)
    bodies = tuple(
        Body(graph_lib.build(b.nodes, b.outputs), b.in_avals, len(b.outputs), count, b.name)
        for b, count in zip(host.bodies, counts, strict=True)
    )
    return Program(
        graph=graph_lib.build(host.main.nodes, host.main.outputs),
        bodies=bodies,
        bindings=host.bindings,
        in_avals=host.main.in_avals,
        weights=tuple(weights),
        in_tree=in_tree,
        out_tree=out_tree,
        n_outputs=len(host.main.outputs),
        fn=fn,
        weak_outputs=tuple(weak_outputs),
    )


def reassemble(program: Program, host: HostProgram) -> Program:
    """Return the program with its graphs and bindings replaced by those of `host`."""
    return assemble(
        host,
        program.weights,
        in_tree=program.in_tree,
        out_tree=program.out_tree,
        fn=program.fn,
        weak_outputs=program.weak_outputs,
    )


def disassemble(program: Program) -> HostProgram:
    """Return the host program of a program, in trace order if its graphs are still as traced."""

    def host_graph(graph: graph_lib.TensorGraph, in_avals: Any, name: str) -> HostGraph:
        nodes, outputs, slots = graph_lib.nodes_of(graph)
        if all(slots[a] < slots[i] for i, n in enumerate(nodes) for a in n.args):
            order = sorted(range(len(nodes)), key=lambda i: slots[i])
            nodes, outputs = graph_lib.renumber(nodes, outputs, order)
        return HostGraph(tuple(nodes), outputs, tuple(in_avals), name)

    return HostProgram(
        host_graph(program.graph, program.in_avals, "main"),
        tuple(host_graph(b.graph, b.in_avals, b.name) for b in program.bodies),
        program.bindings,
    )
