"""What follows an operator and can be computed with it, before its result is written: a bias, a
sum, a rectifier.

XLA fuses elementwise operators with each other, never into the call of a library. So where a form
absorbs what follows it, the chain of nodes becomes one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xrl_jax.backends.lowerings import LOWERINGS
from xrl_jax.graph.graph import Node


@dataclass(frozen=True)
class Chain:
    """A node whose form absorbs those that follow, up to `last`, which has the value of them all.

    Attributes:
      anchor: index of the node.
      last: index of the last one absorbed.
      bias: index of a vector that is added along the last axis first.
      addend: index of an array of the result's shape that is added then.
      relu: whether negative values become 0 in the end.
    """

    anchor: int
    last: int
    bias: int | None = None
    addend: int | None = None
    relu: bool = False

    def arguments(self, values: Sequence[Any]) -> dict[str, Any]:
        """What the form's function takes beside the node and its arguments."""
        named = {"bias": self.bias, "addend": self.addend}
        return {"relu": self.relu} | {k: values[i] for k, i in named.items() if i is not None}


def chains(nodes: Sequence[Node], outputs: Sequence[int]) -> tuple[dict[int, Chain], set[int]]:
    """Chains by their last node, and the nodes that need no value of their own.

    Args:
      nodes: in topological order.
    """
    users: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for a in node.args:
            users.setdefault(a, []).append(i)
    for o in outputs:
        users.setdefault(o, []).append(-1)
    found: dict[int, Chain] = {}
    inner: set[int] = set()
    for i, node in enumerate(nodes):
        if LOWERINGS[node.op][node.lowering].absorbs(node, tuple(nodes[a] for a in node.args)):
            chain, passed = Chain(i, i), []
            while longer := _extended(nodes, users.get(chain.last, []), chain, inner | set(found)):
                passed.append(chain.last)
                chain = longer
            if passed:
                found[chain.last] = chain
                inner.update(passed)
    return found, inner


def _extended(
    nodes: Sequence[Node], users: Sequence[int], chain: Chain, taken: set[int]
) -> Chain | None:
    """The chain with the one node that uses its last; None where it ends."""
    if len(users) != 1 or users[0] < 0 or users[0] in taken or chain.relu:
        return None
    user, shape = nodes[users[0]], nodes[chain.anchor].shape
    if user.op not in ("add", "max") or user.shape != shape:
        return None
    (other,) = (a for a in user.args if a != chain.last)
    operand = nodes[other]
    if user.op == "max":
        zero = operand.op == "const" and operand.ref < 0 and operand.value == 0
        return Chain(chain.anchor, users[0], chain.bias, chain.addend, True) if zero else None
    if _is_bias(operand, nodes) and chain.bias is None and chain.addend is None:
        return Chain(chain.anchor, users[0], operand.args[0])
    if operand.shape == shape and chain.addend is None:
        return Chain(chain.anchor, users[0], chain.bias, other)
    return None


def _is_bias(node: Node, nodes: Sequence[Node]) -> bool:
    """Whether it is a vector, repeated along all axes but the last."""
    if node.op != "broadcast" or len(nodes[node.args[0]].shape) != 1:
        return False
    dims = node.attr("dims")
    assert isinstance(dims, tuple)
    return dims[0] == len(node.shape) - 1 and nodes[node.args[0]].shape[0] == node.shape[-1]
