"""What folded bodies take and return, laid out features last.

A transpose cannot be rewritten across the border of a body, for a body is called from several
places. Here all images that cross a border are turned at once: inside and outside, each by a pair
of transposes that undo each other, which rewriting then moves and cancels on either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from xrl_jax.backends.plain import conv_layouts
from xrl_jax.frontends.host import HostGraph, assemble, attach, disassemble
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, flat_operands, pack_attrs
from xrl_jax.graph.program import Binding, Call, Input, Program

LAST = (0, 2, 3, 1)  # N C H W -> N H W C
FIRST = (0, 3, 1, 2)


def features_last(program: Program) -> Program:
    """The program with the images (float, four dimensions, not weights) that enter and leave its
    bodies laid out N H W C; the program itself where no body convolves N C H W images.
    """
    host = disassemble(program)
    turned = {
        b: _crossing(body, program.bindings)
        for b, body in enumerate(host.bodies)
        if _inline_only(program.bindings, b) and any(map(_convolves_first, body.nodes))
    }
    turned = {b: places for b, places in turned.items() if any(places[0]) or any(places[1])}
    if not turned:
        return program
    bodies = []
    for b, body in enumerate(host.bodies):
        ins, outs = turned.get(b, ((False,) * len(body.in_avals), (False,) * len(body.outputs)))
        bodies.append(_turn(body, ins, outs, turned, program.bindings))
    nothing = (False,) * len(host.main.in_avals), (False,) * len(host.main.outputs)
    main = _turn(host.main, *nothing, turned, program.bindings)
    return assemble(
        replace(host, main=main, bodies=tuple(bodies)),
        program.weights,
        in_tree=program.in_tree,
        out_tree=program.out_tree,
        fn=program.fn,
    )


Places = tuple[tuple[bool, ...], tuple[bool, ...]]  # which inputs and which outputs are turned


def _crossing(body: HostGraph, bindings: Sequence[Binding]) -> Places:
    """Which inputs and outputs of a body are images."""
    ins = [False] * len(body.in_avals)
    for node in body.nodes:
        if node.op == "input" and _is_image(node):
            ins[_position(node, bindings)] = True
    return tuple(ins), tuple(_is_image(body.nodes[o]) for o in body.outputs)


def _is_image(node: Node) -> bool:
    return len(node.shape) == 4 and node.dtype in ops.FLOAT_DTYPES


def _convolves_first(node: Node) -> bool:
    return node.op == "conv" and conv_layouts(node)[0] == (0, 1, 2, 3)


def _inline_only(bindings: Sequence[Binding], body: int) -> bool:
    """Whether the body belongs to no control flow, which fixes what crosses its border."""
    calls = [c for c in bindings if isinstance(c, Call) and body in c.bodies]
    return all(c.kind == "inline" for c in calls)


def _position(node: Node, bindings: Sequence[Binding]) -> int:
    binding = bindings[node.ref]
    assert isinstance(binding, Input)
    return binding.position


def _permuted(shape: Sequence[int], perm: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[p] for p in perm)


def _turn(
    graph: HostGraph,
    ins: Sequence[bool],
    outs: Sequence[bool],
    turned: dict[int, Places],
    bindings: Sequence[Binding],
) -> HostGraph:
    """A graph with these inputs and outputs features last, and the calls of turned bodies too."""
    nodes: list[Node] = []

    def transposed(index: int, perm: tuple[int, ...]) -> int:
        node = nodes[index]
        attrs = pack_attrs("transpose", {"perm": perm})
        shape = _permuted(node.shape, perm)
        nodes.append(Node("transpose", (index,), attrs, shape=shape, dtype=node.dtype))
        return len(nodes) - 1

    new: list[int] = []  # for each old node the new one of the same value
    for node in graph.nodes:
        places = _places_of(node, turned, bindings)
        if places is None:
            nodes.append(replace(node, args=tuple(new[a] for a in node.args)))
        else:
            operands = [
                transposed(new[a], LAST) if turn else new[a]
                for a, turn in zip(flat_operands(graph.nodes, node), places[0], strict=True)
            ]
            attach(nodes, node, operands)
        new.append(len(nodes) - 1)
        if node.op == "input":
            turn = ins[_position(node, bindings)]
        elif node.op == "proj":
            places = _places_of(graph.nodes[node.args[0]], turned, bindings)
            turn = places is not None and places[1][int(node.attr("index"))]  # type: ignore[arg-type]
        else:
            turn = places is not None and node.dtype != "tuple" and places[1][0]
        if turn:
            nodes[-1] = replace(nodes[-1], shape=_permuted(node.shape, LAST))
            new[-1] = transposed(new[-1], FIRST)
    outputs = tuple(
        transposed(new[o], LAST) if t else new[o] for o, t in zip(graph.outputs, outs, strict=True)
    )
    avals = tuple(
        jax.ShapeDtypeStruct(_permuted(a.shape, LAST), a.dtype) if t else a
        for a, t in zip(graph.in_avals, ins, strict=True)
    )
    return replace(graph, nodes=tuple(nodes), outputs=outputs, in_avals=avals)


def _places_of(node: Node, turned: dict[int, Places], bindings: Sequence[Binding]) -> Places | None:
    call = bindings[node.ref] if node.op == "call" else None
    if isinstance(call, Call) and call.kind == "inline":
        return turned.get(call.bodies[0])
    return None
