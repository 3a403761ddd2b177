"""Congruence closure that can explain why two terms are equal (Nieuwenhuis, Oliveras, RTA 2005).

Terms are an operator with terms for arguments. Each union is an edge of a forest: two terms are
equal by the edges on the path between them. An edge has the number of the rewrite that it stands
for, or none, where the terms are equal because their arguments are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Operator = tuple[int, ...]  # its code, then whatever else distinguishes it


class Edge(NamedTuple):
    """An edge of the proof forest, to another term.

    Attributes:
      rewrite: number of the rewrite; -1 for terms whose arguments are equal.
      crossed: whether the first two arguments are equal crosswise.
    """

    to: int
    rewrite: int
    crossed: bool = False


class Congruence:
    """Terms and what is known to be equal.

    Args:
      commutative: codes of operators whose first two arguments may be exchanged.
    """

    def __init__(self, commutative: frozenset[int] = frozenset()) -> None:
        self.commutative = commutative
        self.operator: list[Operator] = []
        self.args: list[tuple[int, ...]] = []
        self._numbers: dict[tuple[Operator, tuple[int, ...]], int] = {}
        self._parent: list[int] = []  # union-find
        self._readers: list[list[int]] = []  # of a class, in the slot of its name
        self._signatures: dict[tuple[Operator, tuple[int, ...]], int] = {}
        self._edge: list[Edge | None] = []

    def term(self, operator: Operator, args: Sequence[int]) -> int:
        """Return the number of a term, which is added if it is new."""
        key = operator, tuple(args)
        if key in self._numbers:
            return self._numbers[key]
        number = self._numbers[key] = len(self.operator)
        self.operator.append(operator)
        self.args.append(key[1])
        self._parent.append(number)
        self._readers.append([])
        self._edge.append(None)
        for name in {self.find(a) for a in args}:
            self._readers[name].append(number)
        self._meet([number])
        return number

    def find(self, term: int) -> int:
        """Return the name of a term's class."""
        while self._parent[term] != term:
            self._parent[term] = term = self._parent[self._parent[term]]
        return term

    def signature(self, operator: Operator, names: Sequence[int]) -> tuple:
        """Return what is the same for all terms with this operator and arguments of these
        classes.
        """
        if operator[0] in self.commutative:
            return operator, (*sorted(names[:2]), *names[2:])
        return operator, tuple(names)

    def known(self, operator: Operator, names: Sequence[int]) -> int | None:
        """Return a term with this operator and arguments of these classes, if there is one."""
        return self._signatures.get(self.signature(operator, names))

    def unite(self, a: int, b: int, rewrite: int) -> None:
        """Make two terms equal by a rewrite."""
        self._meet(self._joined(a, Edge(b, rewrite)))

    def _joined(self, a: int, edge: Edge) -> list[int]:
        """Unite the classes of a term and of the one that an edge leads to; return the terms whose
        arguments have changed their class.
        """
        one, other = self.find(a), self.find(edge.to)
        if one == other:
            return []
        if len(self._readers[one]) > len(self._readers[other]):
            a, edge = edge.to, edge._replace(to=a)
            one, other = other, one
        self._lead_to(a)
        self._edge[a] = edge
        self._parent[one] = other
        changed, self._readers[one] = self._readers[one], []
        self._readers[other] += changed
        return changed

    def _lead_to(self, term: int) -> None:
        """Turn the edges around on the path from a term to its root, which it becomes."""
        previous: tuple[int, Edge] | None = None
        at: int | None = term
        while at is not None:
            edge = self._edge[at]
            self._edge[at] = None if previous is None else previous[1]._replace(to=previous[0])
            previous = None if edge is None else (at, edge)
            at = None if edge is None else edge.to

    def _meet(self, terms: Sequence[int]) -> None:
        """Unite terms with others of the same signature, and whatever follows from it."""
        waiting = list(terms)
        while waiting:
            term = waiting.pop()
            names = [self.find(a) for a in self.args[term]]
            other = self._signatures.setdefault(self.signature(self.operator[term], names), term)
            if self.find(other) != self.find(term):
                there = [self.find(a) for a in self.args[other]]
                waiting += self._joined(term, Edge(other, -1, names != there))

    def explain(self, a: int, b: int) -> set[int]:
        """Return the numbers of the rewrites by which two terms are equal.

        Raises:
          ValueError: they are not known to be equal.
        """
        if self.find(a) != self.find(b):
            raise ValueError("the terms are not known to be equal")
        used: set[int] = set()
        seen: set[tuple[int, int]] = set()
        waiting = [(a, b)]
        while waiting:
            pair = waiting.pop()
            if pair[0] == pair[1] or pair in seen:
                continue
            seen.add(pair)
            for term, edge in self._path(*pair):
                if edge.rewrite >= 0:
                    used.add(edge.rewrite)
                    continue
                ours, theirs = self.args[term], self.args[edge.to]
                if edge.crossed:
                    theirs = (theirs[1], theirs[0], *theirs[2:])
                waiting += zip(ours, theirs, strict=True)
        return used

    def _path(self, a: int, b: int) -> list[tuple[int, Edge]]:
        """Return the edges of the forest between two terms of a class, each with its term."""
        above = self._to_root(a)
        place = {term: i for i, term in enumerate(above)}
        path, at = [], b
        while at not in place:
            edge = self._edge[at]
            assert edge is not None  # both have the same root
            path.append((at, edge))
            at = edge.to
        for term in above[: place[at]]:
            edge = self._edge[term]
            assert edge is not None
            path.append((term, edge))
        return path

    def _to_root(self, term: int) -> list[int]:
        path = [term]
        while (edge := self._edge[path[-1]]) is not None:
            path.append(edge.to)
        return path
