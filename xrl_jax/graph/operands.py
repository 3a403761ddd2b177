"""Operands of `opaque` and `call` nodes: any number of them, through chains of packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, pack_attrs


def is_pinned(node: Node) -> bool:
    return node.op in ("opaque", "call") and node.attr("pinned") == 1


def attach(nodes: list[Node], node: Node, operands: Sequence[int], after: int | None = None) -> int:
    """Append an `opaque` or `call` node with any number of operands; return its index.

    Args:
      node: a node without arguments; its `n_args` is set here.
      operands: if there are more than a node can hold, they go through a chain of packs.
      after: the pinned node that must run before it, if any; a node with one is itself pinned.
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
    """Return the operands of an `opaque` or `call` node as indices into `nodes`, in order.

    Packs are opened (argument 0 of a pack may be the pack of the operands before it). The link of a
    pinned node (`link_of`), which follows its `n_args` operands, is left out.
    """
    return _unpacked_args(nodes, node)[: node.scalar_attr("n_args")]


def link_of(nodes: Sequence[Node], node: Node) -> int | None:
    """Return the pinned node that must run before this one; None if there is none."""
    held, n = _unpacked_args(nodes, node), node.scalar_attr("n_args")
    return held[n] if len(held) > n else None


def _unpacked_args(nodes: Sequence[Node], node: Node) -> list[int]:
    held = list(node.args)
    while held and nodes[held[0]].op == "pack":
        held[:1] = nodes[held[0]].args
    return held
