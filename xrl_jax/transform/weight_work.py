"""Hides weight-only work of a graph behind stubs, and restores it.

Most nodes of a network are weights and values that are computed from them once, before the first
call: three in four for InceptionV3. A rewrite inspects no more of this work than the vector that is
broadcast and the kernel that is read. Components that process a whole program at once therefore get
stubs, `weight` nodes that stand for such work, and the work is restored afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, TensorGraph, nodes_of, pack_attrs, renumber
from xrl_jax.graph.operands import attach, flat_operands, is_pinned, link_of

_HOLDERS = ("opaque", "call")
_LATER = -1  # place of a node that is appended with the node that holds it


@dataclass(frozen=True)
class Value:
    """A stub for the value of a node.

    If the stub has a lower rank, the node's dimensions of size one are left out.
    """

    node: int


@dataclass(frozen=True)
class Operands:
    """A stub for some operands of an opaque equation or a call.

    Attributes:
      nodes: the operands.
      places: their positions among all operands of the equation.
    """

    nodes: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Hidden:
    """The work that stubs stand for.

    Attributes:
      nodes: nodes of the graph that the stubs were created from.
      first: `ref` of the first stub; the following stubs count up from it.
      stubs: in the order of their `ref`.
    """

    nodes: tuple[Node, ...]
    first: int
    stubs: tuple[Value | Operands, ...]

    def of(self, node: Node) -> Value | Operands | None:
        """Return the work that a node stands for; None if it is not a stub."""
        is_stub = node.op == "weight" and node.ref >= self.first
        return self.stubs[node.ref - self.first] if is_stub else None


def hide(graph: TensorGraph, first: int) -> tuple[list[Node], tuple[int, ...], Hidden]:
    """Return the nodes and outputs of the graph without its weight-only work, and that work.

    Weights, constants and stubs that are read remain visible, as do broadcast vectors. Several
    broadcasts in a row are merged into one, which also adds the vector's dimensions of size one.

    Args:
      first: an integer above every `ref` of the graph.
    """
    nodes, outputs, slots = nodes_of(graph)
    hider = _Hider(nodes, np.asarray(graph.nodes.weight_only)[slots], first)
    place = {i: hider.add_visible(i) for i in range(len(nodes)) if hider.is_visible(i)}
    ends = [place[o] if o in place else hider.weight(o) for o in outputs]
    kept = _needed(hider.out, [*ends, *(i for i, n in enumerate(hider.out) if is_pinned(n))])
    return *renumber(hider.out, ends, kept), Hidden(tuple(nodes), first, tuple(hider.stubs))


class _Hider:
    """Builds the visible nodes."""

    def __init__(self, nodes: Sequence[Node], fixed: np.ndarray, first: int) -> None:
        self.nodes, self.fixed, self.first = nodes, fixed, first
        self.out: list[Node] = []
        self.stubs: list[Value | Operands] = []
        self._place: dict[int, int] = {}
        self._weights: dict[tuple[int, bool], int] = {}

    def is_visible(self, i: int) -> bool:
        """Return whether a node is visible on its own; packs come with the node that holds them."""
        return not self.fixed[i] and self.nodes[i].op != "pack"

    def add_visible(self, i: int) -> int:
        """Append a visible node, whose visible arguments are already there."""
        node = self.nodes[i]
        if node.op in _HOLDERS:
            self._place[i] = self._holder(node)
        else:
            args = (self.weight(a) if self.fixed[a] else self._place[a] for a in node.args)
            self._place[i] = self._put(replace(node, args=tuple(args)))
        return self._place[i]

    def weight(self, i: int, *, repeated: bool = False) -> int:
        """Append the visible part of weight-only work."""
        if (i, repeated) not in self._weights:
            self._weights[i, repeated] = self._weight(i, repeated)
        return self._weights[i, repeated]

    def _weight(self, i: int, repeated: bool) -> int:
        node = self.nodes[i]
        if node.op in ops.SOURCES:
            return self._put(node)
        if node.op == "broadcast":
            return self._repetition(node, self.weight(node.args[0], repeated=True))
        wide = tuple(d for d, size in enumerate(node.shape) if size != 1)
        whole = not repeated or len(wide) == len(node.shape) or len(node.shape) > ops.MAX_RANK
        shape = node.shape if whole else tuple(node.shape[d] for d in wide)
        stub = self._stub(Value(i), Node("weight", shape=shape, dtype=node.dtype))
        if whole:
            return stub
        attrs = {"shape": node.shape, "rank": len(node.shape), "dims": wide}
        attrs = pack_attrs("broadcast", attrs)
        return self._put(Node("broadcast", (stub,), attrs, shape=node.shape, dtype=node.dtype))

    def _repetition(self, node: Node, of: int) -> int:
        """Append a broadcast of a visible node, merged with that node if it is a broadcast."""
        inner, dims = self.out[of], node.dims("dims")
        if inner.op != "broadcast":
            return self._put(replace(node, args=(of,)))
        rank = len(self.out[inner.args[0]].shape)
        attrs = {
            "shape": node.shape,
            "rank": len(node.shape),
            "dims": [dims[d] for d in inner.dims("dims", rank)],
        }
        return self._put(replace(node, args=inner.args, attrs=pack_attrs("broadcast", attrs)))

    def _holder(self, node: Node) -> int:
        operands, link = flat_operands(self.nodes, node), link_of(self.nodes, node)
        fixed = tuple(p for p, a in enumerate(operands) if self.fixed[a])
        held = [self._place[a] for a in operands if not self.fixed[a]]
        if fixed:
            what = Operands(tuple(operands[p] for p in fixed), fixed)
            held.append(self._stub(what, Node("weight", dtype="tuple")))
        after = None if link is None else self._place[link]
        return attach(self.out, replace(node, args=()), held, after)

    def _stub(self, what: Value | Operands, node: Node) -> int:
        self.stubs.append(what)
        return self._put(replace(node, ref=self.first + len(self.stubs) - 1))

    def _put(self, node: Node) -> int:
        self.out.append(node)
        return len(self.out) - 1


def unhide(
    nodes: Sequence[Node], outputs: Sequence[int], hidden: Hidden
) -> tuple[list[Node], tuple[int, ...]]:
    """Replace stubs by the work they stand for, in nodes and outputs rewritten since `hide`."""
    restorer = _Restorer(hidden)
    place: list[int] = []
    for node in nodes:
        what = hidden.of(node)
        if isinstance(what, Value):
            place.append(restorer.value(what.node, node))
        elif isinstance(what, Operands) or node.op == "pack":
            place.append(_LATER)
        elif node.op in _HOLDERS:
            operands = flat_operands(nodes, node)
            ending = hidden.of(nodes[operands[-1]]) if operands else None
            held = [place[a] for a in operands if place[a] != _LATER]
            if isinstance(ending, Operands):
                for p, i in zip(ending.places, ending.nodes, strict=True):  # places ascend
                    held.insert(p, restorer.original(i))
            link = link_of(nodes, node)
            after = None if link is None else place[link]
            place.append(attach(restorer.out, replace(node, args=()), held, after))
        else:
            place.append(restorer.put(replace(node, args=tuple(place[a] for a in node.args))))
    return restorer.out, tuple(place[o] for o in outputs)


class _Restorer:
    """Builds the nodes together with the hidden work."""

    def __init__(self, hidden: Hidden) -> None:
        self.hidden = hidden
        self.out: list[Node] = []
        self._place: dict[int, int] = {}  # of nodes that were hidden
        self._sources: dict[Node, int] = {}

    def put(self, node: Node) -> int:
        if node.op in ops.SOURCES and node in self._sources:
            return self._sources[node]
        self.out.append(node)
        if node.op in ops.SOURCES:
            self._sources[node] = len(self.out) - 1
        return len(self.out) - 1

    def original(self, i: int) -> int:
        """Append a hidden node and the nodes it depends on."""
        nodes = self.hidden.nodes
        for j in _needed(nodes, [i]):
            if j not in self._place:
                args = tuple(self._place[a] for a in nodes[j].args)
                self._place[j] = self.put(replace(nodes[j], args=args))
        return self._place[i]

    def value(self, i: int, stub: Node) -> int:
        """Append a hidden node in the shape of its stub."""
        found = self.original(i)
        if self.hidden.nodes[i].shape == stub.shape:
            return found
        attrs = pack_attrs("reshape", {"shape": stub.shape, "rank": len(stub.shape)})
        return self.put(replace(stub, op="reshape", args=(found,), attrs=attrs, ref=-1))


def _needed(nodes: Sequence[Node], ends: Sequence[int]) -> list[int]:
    """Return these nodes and all nodes they depend on, in ascending order."""
    needed, todo = set(ends), list(ends)
    while todo:
        more = set(nodes[todo.pop()].args) - needed
        needed |= more
        todo += more
    return sorted(needed)
