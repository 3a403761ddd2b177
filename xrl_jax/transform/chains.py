"""Loop-carried values of bodies whose calls feed one another, as the layers of a network do.

Inside a folded layer, the producer of an input is not visible. The cost of reading the input
depends on that producer, which is the same layer, one call earlier. The input is therefore marked
with the result of the layer that it carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xrl_jax.graph.bindings import Binding, call_of, position_of
from xrl_jax.graph.graph import pack_attrs
from xrl_jax.graph.operands import flat_operands
from xrl_jax.program.host import HostGraph, HostProgram


def with_loop_carried(host: HostProgram) -> HostProgram:
    """Return the program with `carried` set on loop-carried inputs of inlined bodies.

    An input is loop-carried if it is the same result of the previous call in all calls but the
    first.
    """
    carried: dict[int, dict[int, int]] = {}  # by body: result by input position
    shared: set[int] = set()  # bodies called from several graphs or by control flow
    for graph in (host.main, *host.bodies):
        for body, found in _links(graph, host.bindings).items():
            if body in carried or body in shared:
                shared.add(body)
            carried[body] = found
        for node in graph.nodes:
            call = call_of(node, host.bindings)
            if call is not None and call.kind != "inline":
                shared.update(call.bodies)
    bodies = tuple(
        body if b in shared else _marked(body, carried.get(b, {}), host.bindings)
        for b, body in enumerate(host.bodies)
    )
    return replace(host, bodies=bodies)


def _links(graph: HostGraph, bindings: Sequence[Binding]) -> dict[int, dict[int, int]]:
    """Return, for each body that is inlined, which result of the previous call each input is."""
    last: dict[int, int] = {}  # the latest call of each body
    links: dict[int, dict[int, int]] = {}
    for i, node in enumerate(graph.nodes):
        inlined = call_of(node, bindings, "inline")
        if inlined is None:
            continue
        body, here = inlined.bodies[0], {}
        for position, o in enumerate(flat_operands(graph.nodes, node)):
            made = graph.nodes[o]
            call, result = (made.args[0], made.attrs[0]) if made.op == "proj" else (o, 0)
            if call == last.get(body):
                here[position] = result
        if body in last:
            before = links.get(body, here)
            links[body] = {p: r for p, r in here.items() if before.get(p) == r}
        last[body] = i
    return {body: links.get(body, {}) for body in last}


def _marked(body: HostGraph, carried: dict[int, int], bindings: Sequence[Binding]) -> HostGraph:
    nodes = list(body.nodes)
    for i, node in enumerate(nodes):
        position = position_of(node, bindings)
        if node.op == "input" and position in carried:
            attrs = pack_attrs("input", {"carried": carried[position] + 1})
            nodes[i] = replace(node, attrs=attrs)
    return replace(body, nodes=tuple(nodes))
