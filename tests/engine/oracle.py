"""A matcher and rewriter in plain Python, with which the engine is compared.

It tries each rule at each node with backtracking and uses neither the rule table nor its bytecode:
patterns are followed as the `Rule` states them, commutative operators are tried in both orders, and
conditions are interpreted as expressions. TASO's matcher works in this way (Jia et al. 2019).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, TensorGraph, infer, pack_attrs
from xrl_jax.language.rule import Pattern, Rule, Term, Var
from xrl_jax.language.sexpr import Atom, SExpr
from xrl_jax.lower.table import applicable, number_of

K, R = ops.MAX_ATTRS, ops.MAX_RANK
Vector = list[int]
Binding = dict[str, int]  # variable or node name -> slot


@dataclass(frozen=True)
class Graph:
    """A graph on the host: nodes by slot (None for a hole), whose arguments are slots."""

    nodes: tuple[Node | None, ...]
    outputs: tuple[int, ...]

    def node(self, slot: int) -> Node:
        node = self.nodes[slot]
        assert node is not None
        return node

    def slots(self) -> list[int]:
        return [i for i, n in enumerate(self.nodes) if n is not None]


class Candidate(NamedTuple):
    """A place where a rule applies; `partner` is the second root, 0 for none."""

    rule: Rule
    root: int
    partner: int
    binding: Binding
    numbers: dict[str, Vector]


def host_graph(graph: TensorGraph) -> Graph:
    """Return the graph on the host; nodes keep their slots."""
    host = jax.tree.map(np.asarray, graph)
    f, table = host.nodes, host.senders.reshape(-1, ops.MAX_ARGS)
    nodes = [
        Node(
            ops.OP_NAMES[f.op[i]],
            tuple(int(a) for a in table[i] if a),
            tuple(f.attrs[i].tolist()),
            int(f.lowering[i]),
            tuple(f.shape[i, : f.rank[i]].tolist()),
            ops.DTYPES[f.dtype[i]],
            float(f.value[i]),
            int(f.ref[i]),
        )
        if f.op[i] != ops.HOLE
        else None
        for i in range(len(f.op))
    ]
    return Graph(tuple(nodes), tuple(int(o) for o in host.globals.outputs if o >= 0))


# --- matching ------------------------------------------------------------------------------------


def matches(pattern: Pattern | Var, slot: int, graph: Graph, binding: Binding) -> Iterator[Binding]:
    """Yield each extension of `binding` with which the pattern matches at a node."""
    if isinstance(pattern, Var):
        if binding.get(pattern.name, slot) == slot:
            yield {**binding, pattern.name: slot}
        return
    node = graph.node(slot)
    if node.op != pattern.op or len(node.args) != len(pattern.args):
        return
    if pattern.name:
        binding = {**binding, pattern.name: slot}
    orders = [node.args]
    if node.spec.commutative and node.args[0] != node.args[1]:
        orders.append((node.args[1], node.args[0]))
    for order in orders:
        yield from _match_args(list(zip(pattern.args, order, strict=True)), graph, binding)


def _match_args(
    pairs: Sequence[tuple[Pattern | Var, int]], graph: Graph, binding: Binding
) -> Iterator[Binding]:
    if not pairs:
        yield binding
        return
    for extended in matches(*pairs[0], graph, binding):
        yield from _match_args(pairs[1:], graph, extended)


def candidates(rules: Sequence[Rule], graph: Graph) -> list[Candidate]:
    """Return all places where rules apply; the roots of a symmetric rule are in the order of their
    slots.
    """
    found: list[Candidate] = []
    for rule in rules:
        rule = _with_names(rule)
        for binding in _places(rule, graph):
            root, partner = binding[_ROOTS[0]], binding.get(_ROOTS[1], 0)
            numbers = _numbers(rule, graph, binding)
            if numbers is None:
                continue
            candidate = Candidate(rule, root, partner, binding, numbers)
            if _right_side(graph, candidate) is not None:
                found.append(candidate)
    return found


_ROOTS = ("the first root", "the second root")


def _with_names(rule: Rule) -> Rule:
    """Return the rule with a name for every operator of the left-hand side, so that its attributes
    can be read.
    """
    count = itertools.count()

    def named(p: Pattern | Var) -> Pattern | Var:
        if isinstance(p, Var):
            return p
        name = p.name or f"operator {next(count)}"
        return replace(p, name=name, args=tuple(named(a) for a in p.args))

    return replace(rule, lhs=tuple(named(p) for p in rule.lhs))


def _places(rule: Rule, graph: Graph) -> Iterator[Binding]:
    slots = graph.slots()
    for root in slots:
        for first in matches(rule.lhs[0], root, graph, {}):
            if len(rule.lhs) == 1:
                yield {**first, _ROOTS[0]: root}
                continue
            for partner in slots:
                if partner == root or (rule.symmetric and partner < root):
                    continue
                for both in matches(rule.lhs[1], partner, graph, first):
                    if not depends(graph, root, partner) and not depends(graph, partner, root):
                        yield {**both, _ROOTS[0]: root, _ROOTS[1]: partner}


def depends(graph: Graph, slot: int, on: int) -> bool:
    """Return whether a path of arguments leads from `slot` to `on`."""
    stack, seen = [slot], set()
    while stack:
        at = stack.pop()
        if at == on:
            return True
        if at not in seen:
            seen.add(at)
            stack += graph.node(at).args
    return False


def _numbers(rule: Rule, graph: Graph, binding: Binding) -> dict[str, Vector] | None:
    """Return the integer vectors that the pattern's attributes and `let` bind; None if an attribute
    or a condition does not hold.
    """
    numbers: dict[str, Vector] = {}
    queue: list[Pattern | Var] = []
    for root in rule.lhs:
        queue = [root]
        while queue:
            p = queue.pop(0)
            if isinstance(p, Var):
                continue
            node = graph.node(binding[p.name])
            for key, wanted in p.attrs:
                got = _field(node, key)
                if got != (
                    [wanted] * K if isinstance(wanted, int) else numbers.setdefault(wanted, got)
                ):
                    return None
            queue += p.args
    for name, e in rule.lets:
        numbers[name] = evaluate(e, graph, binding, numbers)
    if all(all(evaluate(e, graph, binding, numbers)) for e in rule.conditions):
        return numbers
    return None


# --- expressions ---------------------------------------------------------------------------------


def _wrapped(n: int) -> int:
    """Wrap an integer to 32 bits."""
    return (n + 2**31) % 2**32 - 2**31


def _clip(n: int, low: int, high: int) -> int:
    return max(low, min(n, high))


def _field(node: Node, name: str) -> Vector:
    """Return an attribute as K lanes: a list fills the first ones, a single integer all of them."""
    value = node.attr(name)
    return [value] * K if isinstance(value, int) else [*value, *[0] * (K - len(value))]


_LANEWISE: dict[str, Callable[..., int]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "//": lambda x, y: x // (y or 1),
    "%": lambda x, y: x % (y or 1),
    "min": min,
    "max": max,
    "=": lambda x, y: x == y,
    "/=": lambda x, y: x != y,
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "and": lambda *v: all(v),
    "or": lambda *v: any(v),
    "bit": lambda x, y: (x >> _clip(y, 0, 31)) & 1,
    "shl": lambda x, y: x << _clip(y, 0, 30),
    "not": lambda x: x == 0,
    "if": lambda x, y, z: y if x else z,
}


def _unpack(code: int) -> Vector:
    return [code // 8**i % 8 - 1 for i in range(R)] + [-1] * (K - R)


def _invert(perm: Vector) -> Vector:
    perm = perm[:R] + list(range(R, K))
    return [perm.index(i) if i in perm else 0 for i in range(K)]


def _product(v: Vector) -> int:
    total = 1
    for x in v:
        total = _wrapped(total * x)
    return total


_VECTOR: dict[str, Callable[..., Vector]] = {
    "at": lambda v, i: [v[_clip(i[0], 0, K - 1)]] * K,
    "gather": lambda v, i: [v[_clip(j, 0, K - 1)] for j in i],
    "invert": _invert,
    "sum": lambda v: [sum(v)] * K,
    "prod": lambda v: [_product(v)] * K,
    "all": lambda v: [int(all(v))] * K,
    "any": lambda v: [int(any(v))] * K,
    "cumsum": lambda v: list(itertools.accumulate(v)),
    "unpack": lambda v: _unpack(v[0]),
    "pack": lambda v: (
        [sum((d + 1) * 8**i for i, d in enumerate(itertools.takewhile(lambda d: d >= 0, v[:R])))]
        * K
    ),
    "layout": lambda v: (
        [ops.LAYOUTS.index(tuple(v[:4])) if tuple(v[:4]) in ops.LAYOUTS else -1] * K
    ),  # type: ignore[arg-type]
}


def evaluate(e: SExpr, graph: Graph, binding: Binding, numbers: dict[str, Vector]) -> Vector:
    """Return the vector of K integers that an expression evaluates to."""
    if isinstance(e, Atom):
        return numbers[e.text] if e.text in numbers else [int(e.text)] * K
    words = [i.text if isinstance(i, Atom) else "" for i in e.items]
    if e.head == "vec":
        return [int(w) for w in words[1:]] + [0] * (K - len(words) + 1)
    if e.head == "lane":
        return list(range(K))
    if len(words) > 1 and words[1] in binding:
        return _property(e.head, graph.node(binding[words[1]]), words[2:], graph, binding[words[1]])
    args = [evaluate(a, graph, binding, numbers) for a in e.items[1:]]
    if e.head in _VECTOR:
        return [_wrapped(n) for n in _VECTOR[e.head](*args)]
    if len(args) > 2 and e.head in ("+", "*"):
        args = [args[0], *args[1:]]
        total = args[0]
        for other in args[1:]:
            total = [_wrapped(_LANEWISE[e.head](x, y)) for x, y in zip(total, other, strict=True)]
        return total
    return [_wrapped(int(_LANEWISE[e.head](*lanes))) for lanes in zip(*args, strict=True)]


def _property(name: str, node: Node, words: Sequence[str], graph: Graph, slot: int) -> Vector:
    match name:
        case "shape":
            return [*node.shape, *[1] * (K - len(node.shape))]
        case "attrs":
            return list(node.attrs)
        case "attr":
            return _field(node, words[0])
        case "is-value":
            known = node.op == "const" and node.ref < 0
            return [int(known and np.float32(node.value) == np.float32(words[0]))] * K
        case "axis-perm":
            layout = node.attr(f"{words[0]}_layout")
            assert isinstance(layout, int)
            return [*ops.LAYOUTS[layout], *[0] * (K - 4)]
        case "rank":
            return [len(node.shape)] * K
        case "dtype":
            return [ops.DTYPE_CODE[node.dtype]] * K
        case "op":
            return [node.spec.code] * K
        case "lowering":
            return [node.lowering] * K
        case "weight-only":
            return [int(weight_only(graph, slot))] * K
        case _:
            raise ValueError(f"there is no property {name!r}")


def weight_only(graph: Graph, slot: int) -> bool:
    """Return whether a node depends on weights and constants only."""
    node = graph.node(slot)
    if node.op in ("weight", "array", "const", "iota"):
        return True
    pinned = node.op in ("opaque", "call") and node.attr("pinned")
    return node.op != "input" and not pinned and all(weight_only(graph, a) for a in node.args)


# --- rewriting -----------------------------------------------------------------------------------


def apply(graph: Graph, candidate: Candidate) -> Graph | None:
    """Return the rewritten graph; None if the right-hand side does not type."""
    made = _right_side(graph, candidate)
    if made is None:
        return None
    nodes, swap = made
    nodes = [n and replace(n, args=tuple(swap.get(a, a) for a in n.args)) for n in nodes]
    return _without_dead(Graph(tuple(nodes), tuple(swap.get(o, o) for o in graph.outputs)))


def _right_side(
    graph: Graph, candidate: Candidate
) -> tuple[list[Node | None], dict[int, int]] | None:
    """Return all nodes, the new ones last, and the replacements of the roots; None if the
    right-hand side does not type.
    """
    rule = candidate.rule
    nodes = list(graph.nodes)
    known: Binding = dict(candidate.binding)
    made: dict[tuple[Term, tuple[int, ...]], int] = {}

    def make(term: Term | Var) -> int:
        if isinstance(term, Var):
            return known[term.name]
        args = tuple(make(a) for a in term.args)
        if (term, args) not in made:
            nodes.append(
                _new_node(term, args, [_at(nodes, a) for a in args], graph, candidate, known, nodes)
            )
            made[term, args] = len(nodes) - 1
        return made[term, args]

    try:
        for name, term in rule.nodes:
            known[name] = make(term)
        replacements = [make(t) for t in rule.rhs]
    except _DoesNotTypeError:
        return None
    swap = dict(zip([candidate.root, candidate.partner], replacements, strict=False))
    for root, to in swap.items():
        old, new = _at(nodes, root), _at(nodes, to)
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            return None
        after = Graph(tuple(nodes), ())
        if weight_only(after, root) != weight_only(after, to):
            return None
    return nodes, swap


class _DoesNotTypeError(Exception):
    pass


def _at(nodes: Sequence[Node | None], slot: int) -> Node:
    node = nodes[slot]
    assert node is not None
    return node


def _new_node(
    term: Term,
    args: tuple[int, ...],
    arg_nodes: list[Node],
    graph: Graph,
    candidate: Candidate,
    known: Binding,
    nodes: Sequence[Node | None],
) -> Node:
    if term.op == "const":
        dtype = _at(nodes, known[term.dtype_of]).dtype
        return Node("const", value=float(np.float32(term.value)), dtype=dtype)
    attrs = graph.node(candidate.binding[term.like]).attrs if term.like else pack_attrs(term.op, {})
    row = list(attrs)
    for key, e in term.attrs:
        field = ops.OPS[term.op].field(key)
        value = evaluate(e, graph, candidate.binding, candidate.numbers)
        row[field.offset : field.offset + field.width] = value[: field.width]
    if any(ops.DTYPE_CODE[a.dtype] >= ops.DTYPE_CODE["extended"] for a in arg_nodes):
        raise _DoesNotTypeError
    found = infer(term.op, row, arg_nodes)
    if found is None or len(found[0]) > R:
        raise _DoesNotTypeError
    lowering = number_of(term.op, term.lowering) if term.lowering else 0
    if term.lowering:
        model = graph.node(candidate.binding[term.like])
        if lowering not in set(applicable(model, tuple(arg_nodes))) - {model.lowering}:
            raise _DoesNotTypeError
    if term.like and not term.lowering:
        model = graph.node(candidate.binding[term.like])
        after = Graph(tuple(nodes), ())

        def types(slots: Sequence[int]) -> list:
            return [
                (_at(nodes, a).shape, _at(nodes, a).dtype, weight_only(after, a)) for a in slots
            ]

        if (model.op, model.attrs, types(model.args)) == (term.op, tuple(row), types(args)):
            lowering = model.lowering
    return Node(term.op, args, tuple(row), lowering, *found)


def _without_dead(graph: Graph) -> Graph:
    pinned = [
        i
        for i in graph.slots()
        if graph.node(i).op in ("opaque", "call") and graph.node(i).attr("pinned")
    ]
    stack, live = [*graph.outputs, *pinned], set()
    while stack:
        at = stack.pop()
        if at not in live:
            live.add(at)
            stack += graph.node(at).args
    return replace(graph, nodes=tuple(n if i in live else None for i, n in enumerate(graph.nodes)))


def structure(graph: Graph) -> tuple:
    """Return a value that is equal for graphs that differ in the numbering of their slots only."""
    texts: dict[int, int] = {}

    def visit(slot: int) -> int:
        if slot not in texts:
            node = graph.node(slot)
            texts[slot] = hash(replace(node, args=tuple(visit(a) for a in node.args)))
        return texts[slot]

    outputs = tuple(visit(o) for o in graph.outputs)
    return outputs, tuple(sorted(visit(s) for s in graph.slots()))
