"""Operands of nodes that hold any number: opaque equations and calls, through chains of packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, pack_attrs


def is_pinned(node: Node) -> bool:
    return node.op in ("opaque", "call") and node.attr("pinned") == 1


def attach(nodes: list[Node], node: Node, operands: Sequence[int], after: int | None = None) -> int:
    """Append an `opaque` or `call` node with any number of operands; returns its index.

    Args:
      node: without arguments; its `n_args` is set here.
      operands: more than a node can hold go through a chain of packs.
      after: the pinned node that must run before it; None where it has no effects.
    """
    link = () if after is None else (after,)
    room = ops.MAX_ARGS - len(link)
    rest = list(operands)
    if len(rest) > room:
        head = rest[: ops.MAX_ARGS]
        rest = rest[ops.MAX_ARGS :]
        nodes.append(Node("pack", tuple(head), dtype="tuple"))
        while rest:
            head, rest = rest[: ops.MAX_ARGS - 1], rest[ops.MAX_ARGS - 1 :]
            nodes.append(Node("pack", (len(nodes) - 1, *head), dtype="tuple"))
        rest = [len(nodes) - 1]
    pinned = after is not None or is_pinned(node)
    attrs = pack_attrs(node.op, {"pinned": int(pinned), "n_args": len(operands)})
    nodes.append(replace(node, args=(*rest, *link), attrs=attrs))
    return len(nodes) - 1


def flat_operands(nodes: Sequence[Node], node: Node) -> list[int]:
    """The operands of an `opaque` or `call` node of `nodes`, in order.

    Packs are opened (argument 0 of a pack may be the pack of the operands before it), and what a
    pinned node holds beyond its `n_args` operands (`link_of`) is left out.
    """
    return _held(nodes, node)[: node.number("n_args")]


def link_of(nodes: Sequence[Node], node: Node) -> int | None:
    """The pinned node that must run before this one; None where that does not matter."""
    held, n = _held(nodes, node), node.number("n_args")
    return held[n] if len(held) > n else None


def _held(nodes: Sequence[Node], node: Node) -> list[int]:
    held = list(node.args)
    while held and nodes[held[0]].op == "pack":
        held[:1] = nodes[held[0]].args
    return held
