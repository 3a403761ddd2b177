"""Work on weights alone, out of sight and back.

Most nodes of a network are its weights and what is made of them once, before the first call: of
InceptionV3 three in four. A rewrite looks no further into them than to the vector that is repeated
and the kernel that is read. So what sees a whole program at once is shown `weight` nodes that stand
for such work (stubs), and gets the work back when it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, TensorGraph, nodes_of, pack_attrs, renumber
from xrl_jax.graph.operands import attach, flat_operands, is_pinned, link_of

_HOLDERS = ("opaque", "call")
_LATER = -1  # the place of what comes with what holds it


@dataclass(frozen=True)
class Value:
    """A stub that stands for the value of a node, without its dimensions of size one where it is
    of a lower rank.
    """

    node: int


@dataclass(frozen=True)
class Operands:
    """A stub that stands for some operands of an opaque equation or a call.

    Attributes:
      nodes: the operands.
      places: theirs among all operands of the equation.
    """

    nodes: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class Hidden:
    """What stubs stand for.

    Attributes:
      nodes: of the graph that they were made from.
      first: the `ref` of the first stub; the next has the next.
      stubs: in this order.
    """

    nodes: tuple[Node, ...]
    first: int
    stubs: tuple[Value | Operands, ...]

    def of(self, node: Node) -> Value | Operands | None:
        """What a node stands for; None for any that is no stub."""
        is_stub = node.op == "weight" and node.ref >= self.first
        return self.stubs[node.ref - self.first] if is_stub else None


def hide(graph: TensorGraph, first: int) -> tuple[list[Node], tuple[int, ...], Hidden]:
    """The graph as nodes and outputs without its work on weights.

    What is left of it: weights and constants that are read, and vectors that are repeated
    (`broadcast`, several in a row as one), whose dimensions of size one are the repetition's.

    Args:
      first: more than any `ref` of the graph.
    """
    nodes, outputs, slots = nodes_of(graph)
    seen = _Seen(nodes, np.asarray(graph.nodes.weight_only)[slots], first)
    place = {i: seen.shown(i) for i in range(len(nodes)) if seen.is_shown(i)}
    ends = [place[o] if o in place else seen.weight(o) for o in outputs]
    kept = _needed(seen.out, [*ends, *(i for i, n in enumerate(seen.out) if is_pinned(n))])
    return *renumber(seen.out, ends, kept), Hidden(tuple(nodes), first, tuple(seen.stubs))


class _Seen:
    """The nodes that are shown, as they are made."""

    def __init__(self, nodes: Sequence[Node], fixed: np.ndarray, first: int) -> None:
        self.nodes, self.fixed, self.first = nodes, fixed, first
        self.out: list[Node] = []
        self.stubs: list[Value | Operands] = []
        self._place: dict[int, int] = {}
        self._weights: dict[tuple[int, bool], int] = {}

    def is_shown(self, i: int) -> bool:
        """Whether a node is no work on weights; packs come with what holds them."""
        return not self.fixed[i] and self.nodes[i].op != "pack"

    def shown(self, i: int) -> int:
        """A node that is no work on weights; its arguments of that kind are there already."""
        node = self.nodes[i]
        if node.op in _HOLDERS:
            self._place[i] = self._holder(node)
        else:
            args = (self.weight(a) if self.fixed[a] else self._place[a] for a in node.args)
            self._place[i] = self._put(replace(node, args=tuple(args)))
        return self._place[i]

    def weight(self, i: int, *, repeated: bool = False) -> int:
        """Work on weights, as far as it is to be seen."""
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
        """A broadcast of a node that is shown; of another broadcast, as one."""
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
    """The nodes, rewritten since `hide`, with the work on weights that stubs among them stand for,
    and the outputs.
    """
    back = _Back(hidden)
    place: list[int] = []
    for node in nodes:
        what = hidden.of(node)
        if isinstance(what, Value):
            place.append(back.value(what.node, node))
        elif isinstance(what, Operands) or node.op == "pack":
            place.append(_LATER)
        elif node.op in _HOLDERS:
            operands = flat_operands(nodes, node)
            ending = hidden.of(nodes[operands[-1]]) if operands else None
            held = [place[a] for a in operands if place[a] != _LATER]
            if isinstance(ending, Operands):
                for p, i in zip(ending.places, ending.nodes, strict=True):  # places ascend
                    held.insert(p, back.original(i))
            link = link_of(nodes, node)
            after = None if link is None else place[link]
            place.append(attach(back.out, replace(node, args=()), held, after))
        else:
            place.append(back.put(replace(node, args=tuple(place[a] for a in node.args))))
    return back.out, tuple(place[o] for o in outputs)


class _Back:
    """The nodes with what was hidden, as they are made."""

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
        """A node that was hidden, and what leads to it."""
        nodes = self.hidden.nodes
        for j in _needed(nodes, [i]):
            if j not in self._place:
                args = tuple(self._place[a] for a in nodes[j].args)
                self._place[j] = self.put(replace(nodes[j], args=args))
        return self._place[i]

    def value(self, i: int, stub: Node) -> int:
        """The same in the shape of its stub."""
        found = self.original(i)
        if self.hidden.nodes[i].shape == stub.shape:
            return found
        attrs = pack_attrs("reshape", {"shape": stub.shape, "rank": len(stub.shape)})
        return self.put(replace(stub, op="reshape", args=(found,), attrs=attrs, ref=-1))


def _needed(nodes: Sequence[Node], ends: Sequence[int]) -> list[int]:
    """What leads to some nodes, and these; ascending."""
    needed, todo = set(ends), list(ends)
    while todo:
        more = set(nodes[todo.pop()].args) - needed
        needed |= more
        todo += more
    return sorted(needed)
