"""Operands of nodes that have more than a node can hold."""

from __future__ import annotations

from tests.graph.test_graph import PINNED
from xrl_jax.graph.graph import Node, pack_attrs
from xrl_jax.graph.operands import attach, flat_operands, link_of


def test_operands_are_read_through_packs_and_without_the_order_link():
    inputs = [Node("input", ref=i) for i in range(8)]
    attrs = pack_attrs("opaque", {"pinned": 1, "n_args": 8})
    nodes = [
        *inputs,
        Node("pack", (0, 1, 2, 3, 4, 5)),
        Node("pack", (8, 6, 7)),
        PINNED,
        Node("opaque", (9, 10), attrs, ref=9),
    ]
    assert flat_operands(nodes, nodes[11]) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert link_of(nodes, nodes[11]) == 10
    assert link_of(nodes, PINNED) is None


def test_many_operands_are_attached_through_packs():
    nodes = [Node("input", ref=i) for i in range(8)]
    where = attach(nodes, Node("opaque", ref=9), range(8))
    assert [n.op for n in nodes[8:]] == ["pack", "pack", "opaque"]
    assert flat_operands(nodes, nodes[where]) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert link_of(nodes, nodes[where]) is None
