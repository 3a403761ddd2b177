"""Unrolling: short scans as calls of their bodies, one after the other.

Every time it runs, a scan copies the weights of each step out of the stacked weights, and passes
values from one step to the next through memory. Calls of a body, which are also rewritten together,
need neither: the weights are sliced once, and consecutive layers can be fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from xrl_jax.graph import ops
from xrl_jax.graph.bindings import Call, call_of, scan_sizes
from xrl_jax.graph.graph import Node
from xrl_jax.graph.operands import flat_operands, is_pinned
from xrl_jax.program.host import (
    Bindings,
    HostGraph,
    HostProgram,
    append_call,
    disassemble,
    live,
    reassemble,
)
from xrl_jax.program.program import Program
from xrl_jax.transform.chains import with_loop_carried
from xrl_jax.transform.rows import append_concat, append_reshape, append_slice

MOST_STEPS = 64
MOST_NODES = 8192  # of the main graph, the steps and the slices they read, together


def unrolled(program: Program) -> Program:
    """Return the program with scans of at most `MOST_STEPS` steps as inlined calls of their bodies.

    Scans that have effects, that use arrays outside the op table, or that would exceed `MOST_NODES`
    are kept.
    """
    host = disassemble(program)
    if not any(isinstance(b, Call) and b.kind == "scan" for b in host.bindings):
        return program
    unrolling = _Unrolling(Bindings(host.bindings), MOST_NODES - len(host.main.nodes))
    for body in host.bodies:
        unrolling.bodies.append(unrolling.graph(body))
    main = unrolling.graph(host.main)
    rows = tuple(unrolling.bindings.rows)
    return reassemble(program, with_loop_carried(HostProgram(main, tuple(unrolling.bodies), rows)))


@dataclass
class _Unrolling:
    bindings: Bindings
    left: int  # nodes that steps may still use
    bodies: list[HostGraph] = field(default_factory=list)  # without short scans

    def graph(self, graph: HostGraph) -> HostGraph:
        """Return the graph without its short scans."""
        nodes: list[Node] = []
        new: list[int] = []
        results: dict[int, list[int]] = {}  # by scan
        for i, node in enumerate(graph.nodes):
            call = call_of(node, self.bindings.rows, "scan")
            operands = flat_operands(graph.nodes, node) if call is not None else []
            if call is not None and self.takes(graph, node, call, operands):
                body = self.bodies[call.bodies[0]]
                results[i] = _steps(nodes, call, [new[o] for o in operands], body, self.bindings)
                # The tuple itself has no node: only its projections refer to it.
                new.append(results[i][0] if results[i] else -1)
            elif node.op == "proj" and node.args[0] in results:
                new.append(results[node.args[0]][node.attrs[0]])
            else:
                nodes.append(replace(node, args=tuple(new[a] for a in node.args)))
                new.append(len(nodes) - 1)
        outputs = tuple(new[o] for o in graph.outputs)
        return live(replace(graph, nodes=tuple(nodes), outputs=outputs)) if results else graph

    def takes(self, graph: HostGraph, node: Node, call: Call, operands: Sequence[int]) -> bool:
        """Return whether to unroll the scan; if so, reserve the nodes that it needs."""
        if call.equation is None or is_pinned(node):
            return False
        body, steps = self.bodies[call.bodies[0]], call.equation.params["length"]
        crossing = [*(graph.nodes[o] for o in operands), *(body.nodes[o] for o in body.outputs)]
        if any(n.dtype == "extended" or len(n.shape) >= ops.MAX_RANK for n in crossing):
            return False
        size = steps * (len(body.nodes) + 2 * len(crossing))
        if not 0 < steps <= MOST_STEPS or size > self.left:
            return False
        self.left -= size
        return True


def _steps(
    nodes: list[Node], call: Call, operands: Sequence[int], body: HostGraph, bindings: Bindings
) -> list[int]:
    """Append the calls of a scan's body; return its results: carried values, then stacked ones."""
    assert call.equation is not None
    params = call.equation.params
    n_consts, n_carry = scan_sizes(params)
    constants, carry = operands[:n_consts], list(operands[n_consts : n_consts + n_carry])
    scanned = operands[n_consts + n_carry :]
    ref = bindings.add(Call("inline", call.bodies))
    results = [body.nodes[o] for o in body.outputs]
    order = range(params["length"])
    rows: list[dict[int, int]] = [{} for _ in body.outputs[n_carry:]]
    for t in reversed(order) if params["reverse"] else order:
        given = [*constants, *carry]
        for x in scanned:
            given.append(
                append_reshape(nodes, append_slice(nodes, x, t, t + 1), nodes[x].shape[1:])
            )
        made = append_call(nodes, ref, given, results)
        carry = made[:n_carry]
        for row, y in zip(rows, made[n_carry:], strict=True):
            row[t] = y
    stacked = []
    for row in rows:
        parts = [append_reshape(nodes, row[t], (1, *nodes[row[t]].shape)) for t in order]
        stacked.append(append_concat(nodes, parts))
    return [*carry, *stacked]
