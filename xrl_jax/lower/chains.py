"""Chains of nodes that become one call: an operator and its epilogue (bias, addition, ReLU).

XLA fuses elementwise operators with each other, but never into a library call. So if the lowering
of an operator can apply an epilogue to its result before writing it, the operator and the nodes
that consume its result become one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from xrl_jax.graph.graph import Node
from xrl_jax.libraries.base import Epilogue
from xrl_jax.lower.table import absorbs


@dataclass(frozen=True)
class Chain:
    """A node whose lowering absorbs its consumers up to `last`; the call has the value of `last`.

    Attributes:
      anchor: index of the node.
      last: index of the last absorbed node.
      bias: index of a vector [N] or [1, .., N] that is added first, along the last axis.
      addend: index of an array of the result's shape that is added second.
      relu: whether negative values finally become 0.
    """

    anchor: int
    last: int
    bias: int | None = None
    addend: int | None = None
    relu: bool = False

    def epilogue(self, values: Sequence[Any]) -> Epilogue:
        """Return the epilogue for the anchor's lowering, given the values of all nodes."""
        bias, addend = (None if i is None else values[i] for i in (self.bias, self.addend))
        return Epilogue(bias, addend, self.relu)


def chains(
    nodes: Sequence[Node], outputs: Sequence[int], weight_only: Sequence[bool]
) -> tuple[dict[int, Chain], set[int]]:
    """Return the chains by their last node, and the nodes inside chains, whose values are not
    computed separately.

    A weight-only node never starts a chain: it is computed once, before the calls, but in a chain
    with its consumers it would be computed in every call.

    Args:
      nodes: in topological order.
      weight_only: for every node, whether it depends on weights and constants only.
    """
    users: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for a in node.args:
            users.setdefault(a, []).append(i)
    found: dict[int, Chain] = {}
    inner: set[int] = set()

    def is_written(i: int) -> bool:
        """Return whether the node's value is written to memory in any case, not fused."""
        written = weight_only[i] or i in found or len(users[i]) > 1
        return written or nodes[i].spec.shape != "elementwise"

    def longer(chain: Chain) -> Chain | None:
        """Return the chain extended by the sole user of its last node; None if it ends."""
        following = users.get(chain.last, [])
        if len(following) != 1 or chain.last in outputs or chain.relu:
            return None
        (last,) = following
        user, shape = nodes[last], nodes[chain.anchor].shape
        if last in found or last in inner or user.op not in ("add", "max") or user.shape != shape:
            return None
        (other,) = (a for a in user.args if a != chain.last)
        operand = nodes[other]
        if user.op == "max":
            is_zero = operand.op == "const" and operand.ref < 0 and operand.value == 0
            return replace(chain, last=last, relu=True) if is_zero else None
        if chain.addend is not None:
            return None
        if operand.op == "broadcast":
            is_bias = chain.bias is None and _is_vector(operand, nodes[operand.args[0]])
            return replace(chain, last=last, bias=operand.args[0]) if is_bias else None
        if operand.shape == shape and is_written(other):
            return replace(chain, last=last, addend=other)
        return None

    for i, node in enumerate(nodes):
        if not weight_only[i] and absorbs(node, tuple(nodes[a] for a in node.args)):
            chain, passed = Chain(i, i), []
            while after := longer(chain):
                passed.append(chain.last)
                chain = after
            if passed:
                found[chain.last] = chain
                inner.update(passed)
    return found, inner


def _is_vector(broadcast: Node, operand: Node) -> bool:
    """Return whether the node repeats a vector ([N] or [1, .., N]) along all but the last axis."""
    dims, rank, n = broadcast.attr("dims"), len(operand.shape), broadcast.shape[-1]
    assert isinstance(dims, tuple)
    last = rank > 0 and dims[rank - 1] == len(broadcast.shape) - 1
    return last and operand.shape[-1] == n == math.prod(operand.shape)
