"""Values that are never negative, whatever the inputs are."""

from __future__ import annotations

from collections.abc import Sequence

from xrl_jax.graph.bindings import Binding, call_of, is_only_inlined, position_of
from xrl_jax.graph.graph import Node
from xrl_jax.graph.operands import flat_operands
from xrl_jax.libraries.xla.plain import number
from xrl_jax.program.host import HostGraph, HostProgram

_ALWAYS = frozenset("exp exp2 logistic sqrt rsqrt abs square softmax".split())
# Operators that are never negative if none of their arguments is.
_KEEP = frozenset(
    "min add mul div select clamp transpose reshape broadcast concat slice pad rev copy cast cbrt "
    "floor ceil round tanh erf sign reduce_sum reduce_max reduce_min reduce_prod window_sum "
    "window_max window_min cumsum cummax cummin cumprod log1p expm1".split()
)


def never_negative(host: HostProgram) -> list[list[bool]]:
    """Return for each node of each graph, the main one first, whether no element of its value is
    below 0; one that is NaN may be.

    An input of a body that is only inlined is never negative if no operand for it is. All are
    assumed to be so at first, until an operand shows otherwise.
    """
    graphs, bindings = (host.main, *host.bodies), host.bindings
    assumed = [
        set(range(len(graph.in_avals))) if g and is_only_inlined(bindings, g - 1) else set[int]()
        for g, graph in enumerate(graphs)
    ]
    while True:
        found = _with_assumed(graphs, bindings, assumed)
        refuted = [
            (body + 1, position)
            for graph, flags in zip(graphs, found, strict=True)
            for node in graph.nodes
            if (call := call_of(node, bindings, "inline")) is not None
            for body in call.bodies
            for position, operand in enumerate(flat_operands(graph.nodes, node))
            if position in assumed[body + 1] and not flags[operand]
        ]
        if not refuted:
            return found
        for g, position in refuted:
            assumed[g].discard(position)


def _with_assumed(
    graphs: Sequence[HostGraph], bindings: Sequence[Binding], assumed: Sequence[set[int]]
) -> list[list[bool]]:
    """Return whether nodes are never negative, given the inputs of graphs that are not."""
    found: list[list[bool]] = [[] for _ in graphs]
    for g in (*range(1, len(graphs)), 0):  # callees before callers
        flags = found[g]
        for node in graphs[g].nodes:
            call = call_of(node, bindings, "inline")
            position = position_of(node, bindings)
            if node.op == "proj":
                maker = graphs[g].nodes[node.args[0]]
                call, which = call_of(maker, bindings, "inline"), number(node, "index")
            else:
                which = 0
            if call is not None:
                body = call.bodies[0] + 1
                flags.append(found[body][graphs[body].outputs[which]])
            elif position is not None:
                flags.append(position in assumed[g])
            else:
                flags.append(_is_never_negative(node, [flags[a] for a in node.args]))
    return found


def _is_never_negative(node: Node, args: Sequence[bool]) -> bool:
    if node.op in _ALWAYS or (node.op == "mul" and node.args[0] == node.args[1]):
        return True
    if node.op == "const":
        return node.ref < 0 and node.value >= 0
    if node.op == "max":
        return any(args)
    values = args[1:] if node.op == "select" else args  # without the predicate
    return node.op in _KEEP and all(values)
