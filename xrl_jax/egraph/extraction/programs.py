"""Extraction as a mixed-integer program, with some classes free and the others fixed.

Variables: x of an e-node of a free class, 1 if it is chosen; y of a class, 1 if it is needed. A
chosen e-node needs its children; so does a fixed class that is needed. Cycles are excluded by
numbers of classes that fall from an e-node to its children, or only once they occur: a solution
with one is cut off, and the program solved again, which is quicker where cycles are rare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import numpy as np

from xrl_jax.egraph.extraction.instance import Choice, Instance, valued
from xrl_jax.runtime.milp import Milp, MilpSolver

Cut = frozenset[int]  # e-nodes that must not be chosen together
_MOST_CUTS = 200


class Program:
    """The program of an instance with free classes.

    Args:
      full: [C], the e-node of each fixed class, NONE where it has none.
      free: classes whose e-node is chosen anew.
      numbered: whether numbers of classes exclude all cycles.
    """

    def __init__(
        self,
        instance: Instance,
        full: np.ndarray,
        free: Collection[int],
        *,
        numbered: bool = False,
    ) -> None:
        self.instance, self.full, self.free = instance, full, free
        self.classes = self._closure()
        self.nodes = [n for c in self.classes for n in self._nodes_of(c)]
        self.y = {c: i for i, c in enumerate(self.classes)}
        self.x = {n: len(self.classes) + i for i, n in enumerate(self.nodes)}
        self.component = self._components() if numbered else {}
        count = len(self.classes) + len(self.nodes)
        self.number = {c: count + i for i, c in enumerate(self.component)}

    def _nodes_of(self, c: int) -> Collection[int]:
        if c in self.free:
            return self.instance.nodes_of(c)
        return (int(self.full[c]),) if self.full[c] >= 0 else ()

    def _closure(self) -> list[int]:
        """Return the classes that some choice may need."""
        seen = set(self.instance.roots)
        stack = list(seen)
        while stack:
            for n in self._nodes_of(stack.pop()):
                for d in self.instance.children[n]:
                    if d not in seen:
                        seen.add(d)
                        stack.append(d)
        return sorted(seen)

    def _components(self) -> dict[int, int]:
        """Return the strongly connected component of each class that may be on a cycle."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        edges = {
            (self.y[int(self.instance.owner[n])], self.y[d])
            for n in self.nodes
            for d in self.instance.children[n]
        }
        at = np.array(sorted(edges), np.int64).reshape(-1, 2)
        size = len(self.classes)
        graph = coo_array((np.ones(len(at)), (at[:, 0], at[:, 1])), shape=(size, size))
        _, label = connected_components(graph, connection="strong")
        many = np.bincount(label)[label] > 1
        return {c: int(label[i]) for i, c in enumerate(self.classes) if many[i]}

    def milp(self, cuts: Collection[Cut], below: float) -> Milp:
        """Return the program.

        Args:
          cuts: what earlier solutions did wrong.
          below: only solutions that cost no more are of interest.
        """
        rows: list[tuple[int, int, float]] = []
        low: list[float] = []

        def row(entries: list[tuple[int, float]], least: float) -> None:
            rows.extend((len(low), column, value) for column, value in entries)
            low.append(least)

        children = self.instance.children
        for c in self.classes:
            own = [(self.x[n], 1.0) for n in self._nodes_of(c)]
            row([*own, (self.y[c], -1.0)], 0.0)
            row([*((i, -1.0) for i, _ in own), (self.y[c], 1.0)], 0.0)
            reading: dict[int, list[tuple[int, float]]] = {}
            for n in self._nodes_of(c):
                for d in children[n]:
                    reading.setdefault(d, []).append((self.x[n], -1.0))
            for d, entries in reading.items():
                row([(self.y[d], 1.0), *entries], 0.0)
        sizes = Counter(self.component.values())
        for n in self.nodes:
            c = int(self.instance.owner[n])
            for d in children[n]:
                if c in self.component and self.component[c] == self.component.get(d):
                    most = float(sizes[self.component[c]])
                    numbers = [(self.number[c], 1.0), (self.number[d], -1.0)]
                    row([*numbers, (self.x[n], -most)], 1.0 - most)
        for cut in cuts:
            row([(self.x[n], -1.0) for n in cut if n in self.x], 1.0 - len(cut))
        size = len(self.classes) + len(self.nodes) + len(self.number)
        cost = np.zeros(size)
        for n in self.nodes:
            cost[self.x[n]] = self.instance.cost[n]
        if np.isfinite(below):
            row([(int(i), -float(cost[i])) for i in np.flatnonzero(cost)], -below)
        least = np.zeros(size)
        least[[self.y[r] for r in self.instance.roots]] = 1.0
        integral = np.zeros(size)
        integral[list(self.x.values())] = 1
        most_x = np.ones(size)
        for c, i in self.number.items():
            most_x[i] = sizes[self.component[c]] - 1.0
        at = np.array(rows)
        return Milp(
            cost,
            at[:, 0].astype(np.int64),
            at[:, 1].astype(np.int64),
            at[:, 2],
            np.array(low),
            least,
            most_x,
            integral,
        )

    def choice(self, x: np.ndarray) -> np.ndarray:
        """Return the e-nodes [C] that a solution chooses; the fixed ones elsewhere."""
        chosen = self.full.copy()
        for c in self.classes:
            nodes = list(self._nodes_of(c))
            if nodes:
                chosen[c] = max(nodes, key=lambda n: x[self.x[n]])
        return chosen


def cycles(instance: Instance, node: np.ndarray) -> list[Cut]:
    """Return cycles of a choice, at most one through each class, as the e-nodes on them."""
    state = np.zeros(instance.n_classes, np.int8)
    found: list[Cut] = []
    for root in instance.roots:
        path: list[int] = []
        stack = [(root, False)]
        while stack:
            c, leaving = stack.pop()
            if leaving:
                state[c] = 2
                path.pop()
                continue
            if state[c] == 2 or node[c] < 0:
                continue
            if state[c] == 1:
                loop = path[path.index(c) :]
                found.append(frozenset(int(node[d]) for d in loop))
                continue
            state[c] = 1
            path.append(c)
            stack.append((c, True))
            stack.extend((d, False) for d in instance.children[node[c]])
    return found


def solved(
    program: Program, best: Choice, solver: MilpSolver, left: Callable[[], float]
) -> tuple[np.ndarray | None, bool]:
    """Return a choice [C] that is cheaper than `best`, or None; and whether it is proven that none
    is cheaper than the better of the two.

    Args:
      left: seconds left.
    """
    instance = program.instance
    cuts: set[Cut] = set()
    while left() > 0 and len(cuts) < _MOST_CUTS:
        found = solver.solve(program.milp(cuts, best.cost), left())
        if found.x is None:
            return None, found.infeasible
        chosen = program.choice(found.x)
        value = valued(instance, chosen)
        if np.isfinite(value.cost):
            return (chosen if value.cost < best.cost else None), found.optimal
        new = set(cycles(instance, chosen)) - cuts
        if not new:
            return None, False
        cuts |= new
    return None, False
