"""An e-graph in plain Python, written for clarity: what `xrl_jax.egraph` is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from xrl_jax.language.rule import Pattern, Rule, Term, Var
from xrl_jax.language.terms import Expression
from xrl_jax.language.vocabulary import ANY, NUMBER

Node = tuple  # (operator, argument classes ...), ("number", value) or ("symbol", name)
Bindings = dict[str, int]


class PlainEGraph:
    """Classes are integers; `nodes` maps each e-node to its class."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.nodes: dict[Node, int] = {}

    def find(self, a: int) -> int:
        while self.parent[a] != a:
            a = self.parent[a]
        return a

    def add(self, node: Node) -> int:
        node = self.canonical(node)
        if node not in self.nodes:
            self.nodes[node] = len(self.parent)
            self.parent.append(len(self.parent))
        return self.find(self.nodes[node])

    def add_expression(self, e: Expression) -> int:
        if isinstance(e, str):
            return self.add(("symbol", e))
        if isinstance(e, tuple):
            return self.add((e[0], *map(self.add_expression, e[1:])))
        return self.add((NUMBER, e))

    def canonical(self, node: Node) -> Node:
        if node[0] in (NUMBER, "symbol"):
            return node
        return (node[0], *map(self.find, node[1:]))

    def unite(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        self.parent[max(a, b)] = min(a, b)

    def rebuild(self) -> None:
        """Unite the classes of equal e-nodes until there are none."""
        while True:
            new: dict[Node, int] = {}
            for node, c in self.nodes.items():
                node = self.canonical(node)
                if node in new:
                    self.unite(new[node], c)
                else:
                    new[node] = c
            done = new == self.nodes
            self.nodes = {n: self.find(c) for n, c in new.items()}
            if done:
                return

    def counts(self) -> tuple[int, int]:
        return len(self.nodes), len(set(map(self.find, self.nodes.values())))

    def iterate(self, rules: Sequence[Rule]) -> list[int]:
        """Apply all rules once, and return the number of matches of each."""
        classes: dict[int, list[Node]] = {}
        for node, c in self.nodes.items():
            classes.setdefault(c, []).append(node)
        found = [
            [(c, b) for c in classes for b in matches(rule.lhs[0], c, classes, {})]
            for rule in rules
        ]
        found = [
            [(c, b) for c, b in of_rule if all(holds(g, b, classes) for g in rule.conditions)]
            for rule, of_rule in zip(rules, found, strict=True)
        ]
        for rule, of_rule in zip(rules, found, strict=True):
            for c, bindings in of_rule:
                self.unite(c, self.add_term(rule.rhs[0], bindings))
        self.rebuild()
        return [len(of_rule) for of_rule in found]

    def add_term(self, term: Term | Var, bindings: Bindings) -> int:
        if isinstance(term, Var):
            return bindings[term.name]
        if term.op == NUMBER:
            return self.add((NUMBER, term.value))
        return self.add((term.op, *(self.add_term(t, bindings) for t in term.args)))


def matches(
    pattern: Pattern | Var, c: int, classes: dict[int, list[Node]], bindings: Bindings
) -> Iterator[Bindings]:
    """Yield the extensions of `bindings` under which the pattern stands for class `c`."""
    if isinstance(pattern, Var) or pattern.op == ANY:
        if bindings.get(pattern.name, c) == c:
            yield {**bindings, pattern.name: c}
        return
    for node in classes[c]:
        if pattern.op == NUMBER and node == (NUMBER, pattern.value):
            yield bindings
        if pattern.op != NUMBER and node[0] == pattern.op:
            extended = [bindings]
            for arg, d in zip(pattern.args, node[1:], strict=True):
                extended = list(
                    itertools.chain.from_iterable(matches(arg, d, classes, b) for b in extended)
                )
            yield from extended


def holds(guard, bindings: Bindings, classes: dict[int, list[Node]]) -> bool:
    bound = [bindings[e.text] for e in guard.items[1:]]
    values = [n[1] for n in classes[bound[0]] if n[0] == NUMBER]
    match guard.head:
        case "number":
            return bool(values)
        case "symbol":
            return any(n[0] == "symbol" for n in classes[bound[0]])
        case "nonzero":
            return not values or values[0] != 0
        case "differ":
            return bound[0] != bound[1]
    raise AssertionError(guard.head)
