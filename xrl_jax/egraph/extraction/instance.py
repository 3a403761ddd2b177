"""What extraction works on: classes, e-nodes, costs, and choices among them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

NONE = -1


class InstanceError(ValueError):
    """An e-graph that cannot be read; the message names what is wrong."""


@dataclass(frozen=True, eq=False)
class Instance:
    """Classes and e-nodes with costs.

    Letters: N e-nodes, C classes.

    Attributes:
      cost: [N], not negative.
      owner: [N] the class of each e-node, ascending.
      children: for each e-node the classes that it reads, each once.
      roots: classes that are wanted.
      names: of the e-nodes.
      n_classes: C.
    """

    cost: np.ndarray
    owner: np.ndarray
    children: tuple[tuple[int, ...], ...]
    roots: tuple[int, ...]
    names: tuple[str, ...]
    n_classes: int

    @cached_property
    def first(self) -> np.ndarray:
        """[C + 1]: the e-nodes of class c are first[c] to first[c + 1] - 1."""
        return np.searchsorted(self.owner, np.arange(self.n_classes + 1))

    @cached_property
    def padded(self) -> np.ndarray:
        """[N, most children]: children, padded by class C, which does not exist."""
        width = max(1, *map(len, self.children))
        table = np.full((len(self.cost), width), self.n_classes)
        for n, classes in enumerate(self.children):
            table[n, : len(classes)] = classes
        return table

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each class, the e-nodes that read it."""
        found: list[list[int]] = [[] for _ in range(self.n_classes)]
        for n, classes in enumerate(self.children):
            for c in classes:
                found[c].append(n)
        return tuple(map(tuple, found))

    def nodes_of(self, c: int) -> range:
        """Return the e-nodes of a class."""
        return range(int(self.first[c]), int(self.first[c + 1]))


def instance_of(
    nodes: Sequence[tuple[str, int, float, Sequence[int]]],
    roots: Sequence[int],
    n_classes: int,
    class_names: Sequence[str] | None = None,
) -> Instance:
    """Return the instance of e-nodes given as name, class, cost and children.

    E-nodes that no acyclic choice contains, and those that another one of their class replaces at
    no more cost and with no more children, are left out.

    Raises:
      InstanceError: a root has no e-node that can be chosen, or a cost is negative or not finite.
    """
    kept = []
    for name, owner, cost, children in nodes:
        if not 0 <= cost < float("inf"):
            raise InstanceError(f"e-node {name} costs {cost}: costs are finite and not negative")
        if owner not in children:
            kept.append((owner, float(cost), tuple(dict.fromkeys(children)), name))
    kept = _possible(kept)
    kept = _undominated(kept)
    there = {owner for owner, *_ in kept}
    missing = [r for r in roots if r not in there]
    if missing:
        name = missing[0] if class_names is None else class_names[missing[0]]
        raise InstanceError(f"class {name} has no e-node that can be chosen")
    return Instance(
        np.array([cost for _, cost, _, _ in kept], np.float64),
        np.array([owner for owner, *_ in kept], np.int64),
        tuple(children for _, _, children, _ in kept),
        tuple(dict.fromkeys(roots)),
        tuple(name for *_, name in kept),
        n_classes,
    )


_Row = tuple[int, float, tuple[int, ...], str]


def _possible(rows: Sequence[_Row]) -> list[_Row]:
    """Return the rows that can be built from leaves; each has its children once."""
    readers: dict[int, list[int]] = {}
    for i, (_, _, children, _) in enumerate(rows):
        for c in children:
            readers.setdefault(c, []).append(i)
    missing = [len(children) for _, _, children, _ in rows]
    ready = deque(i for i, n in enumerate(missing) if n == 0)
    built: set[int] = set()
    possible = []
    while ready:
        row = rows[ready.popleft()]
        possible.append(row)
        if row[0] not in built:
            built.add(row[0])
            for i in readers.get(row[0], ()):
                missing[i] -= 1
                if missing[i] == 0:
                    ready.append(i)
    return possible


def _undominated(rows: Sequence[_Row]) -> list[_Row]:
    """Return the rows in the order of classes, without dominated ones."""
    kept: list[_Row] = []
    of_class: dict[int, list[tuple[float, frozenset[int]]]] = {}
    for row in sorted(rows, key=lambda r: (r[0], r[1], len(r[2]))):
        better = of_class.setdefault(row[0], [])
        children = frozenset(row[2])
        if not any(other <= children for _, other in better):
            better.append((row[1], children))
            kept.append(row)
    return kept


def from_json(text: str) -> Instance:
    """Read an e-graph in the format of extraction-gym. An e-node without a cost costs 1; those that
    are subsumed or cost infinitely much (also as null, which Rust writes) are not chosen.

    Raises:
      InstanceError: the text is something else, a node or class is missing, or there is no root.
    """
    try:
        given: dict[str, Any] = json.loads(text)
        nodes = given["nodes"]
        number = {
            name: i for i, name in enumerate(dict.fromkeys(n["eclass"] for n in nodes.values()))
        }
        rows = [
            (
                name,
                number[n["eclass"]],
                _cost_of(n),
                [number[nodes[child]["eclass"]] for child in n.get("children", ())],
            )
            for name, n in nodes.items()
        ]
        wanted = [number[r] for r in given["root_eclasses"]]
    except KeyError as error:
        raise InstanceError(f"the e-graph has no {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        what = error if isinstance(error, ValueError) else "not the right kind of value somewhere"
        raise InstanceError(f"not an e-graph of extraction-gym: {what}") from None
    if not wanted:
        raise InstanceError("the e-graph names no root: root_eclasses is empty")
    rows = [r for r in rows if r[2] != float("inf")]
    return instance_of(rows, wanted, len(number), class_names=list(number))


def _cost_of(node: dict[str, Any]) -> float:
    cost = node.get("cost", 1.0)
    return float("inf") if cost is None or node.get("subsumed") else float(cost)


class Choice(NamedTuple):
    """A chosen e-node for each class, NONE where none is needed, and what they cost."""

    node: np.ndarray  # [C]
    cost: float


def used_classes(instance: Instance, node: np.ndarray) -> list[int] | None:
    """Return the classes that a choice needs, arguments first; None if a class has no e-node or
    there is a cycle.
    """
    state = bytearray(instance.n_classes)  # 1 while its children are visited, 2 when done
    children, chosen = instance.children, node
    order: list[int] = []
    for root in instance.roots:
        stack = [root]
        while stack:
            c = stack[-1]
            if state[c]:
                stack.pop()
                if state[c] == 1:
                    state[c] = 2
                    order.append(c)
                continue
            n = chosen[c]
            if n < 0:
                return None
            state[c] = 1
            for d in children[n]:
                if state[d] == 1:
                    return None
                if not state[d]:
                    stack.append(d)
    return order


def valued(instance: Instance, node: np.ndarray) -> Choice:
    """Return a choice with its cost, infinite if it is not complete or not acyclic; classes that it
    does not need are left out.
    """
    used = used_classes(instance, node)
    if used is None:
        return Choice(node, float("inf"))
    kept = np.full(instance.n_classes, NONE)
    kept[used] = node[used]
    return Choice(kept, float(np.sum(instance.cost[node[used]])))
