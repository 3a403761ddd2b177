"""What follows an operator and can be computed with it, before its result is written: a bias, a
sum, a rectifier.

XLA fuses elementwise operators with each other, never into the call of a library. So where a form
absorbs what follows it, the chain of nodes becomes one call.
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
    """A node whose form absorbs those that follow, up to `last`, which has the value of them all.

    Attributes:
      anchor: index of the node.
      last: index of the last one absorbed.
      bias: index of a vector [N] or [1, .., N] that is added along the last axis first.
      addend: index of an array of the result's shape that is added then.
      relu: whether negative values become 0 in the end.
    """

    anchor: int
    last: int
    bias: int | None = None
    addend: int | None = None
    relu: bool = False

    def epilogue(self, values: Sequence[Any]) -> Epilogue:
        """What the form takes beside the node's arguments, given the values of all nodes."""
        bias, addend = (None if i is None else values[i] for i in (self.bias, self.addend))
        return Epilogue(bias, addend, self.relu)


def chains(
    nodes: Sequence[Node], outputs: Sequence[int], weight_only: Sequence[bool]
) -> tuple[dict[int, Chain], set[int]]:
    """Chains by their last node, and the nodes that need no value of their own.

    Work on weights alone is done once, before the call, and begins no chain: with what follows it
    would be done in every call.

    Args:
      nodes: in topological order.
      weight_only: of every node, whether it depends on weights and constants alone.
    """
    users: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for a in node.args:
            users.setdefault(a, []).append(i)
    found: dict[int, Chain] = {}
    inner: set[int] = set()

    def is_there(i: int) -> bool:
        """Whether the node's value is written anyhow, not computed where it is used."""
        written = weight_only[i] or i in found or len(users[i]) > 1
        return written or nodes[i].spec.shape != "elementwise"

    def longer(chain: Chain) -> Chain | None:
        """The chain with the only node that uses its last; None where it ends."""
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
        if operand.shape == shape and is_there(other):
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
    """Whether the node repeats a vector (or [1, .., N]) along all axes but the last."""
    dims, rank, n = broadcast.attr("dims"), len(operand.shape), broadcast.shape[-1]
    assert isinstance(dims, tuple)
    last = rank > 0 and dims[rank - 1] == len(broadcast.shape) - 1
    return last and operand.shape[-1] == n == math.prod(operand.shape)
