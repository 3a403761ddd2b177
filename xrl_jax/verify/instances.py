"""Random concrete graphs that a rule's left-hand side matches.

A pattern is filled in from its leaves or from a required shape, whichever is known first: each
shape rule has a sampler that draws attributes and asks for arguments of fitting shapes. Simple
conditions of a rule (equal attributes, the value of a constant, a rank) are used as hints. All
other conditions are left to rejection: a proposal that does not fit is discarded, and the engine
itself decides whether the rule fires.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node
from xrl_jax.language.rule import Pattern, Rule, Var
from xrl_jax.language.sexpr import Atom, SExpr, SList
from xrl_jax.lower.table import applicable
from xrl_jax.verify.samplers.base import Rejected, Want
from xrl_jax.verify.samplers.sketch import MAX_ELEMENTS, Sketch

_DTYPES = ("float32",) * 6 + ("float64", "bfloat16", "int32", "int32", "uint8")


@dataclass(frozen=True)
class Instance:
    """A graph that contains the left-hand side; `roots` are indices of `nodes` and its outputs."""

    nodes: tuple[Node, ...]
    roots: tuple[int, ...]

    def __str__(self) -> str:
        lines = []
        for i, n in enumerate(self.nodes):
            fields = {f.name: n.attr(f.name) for f in n.spec.fields}
            value = f" value={n.value}" if n.op == "const" else ""
            lines.append(f"%{i}: {n.dtype}{list(n.shape)} = {n.op}{n.args} {fields or ''}{value}")
        return "\n".join([*lines, f"roots {self.roots}"])


@dataclass(frozen=True)
class Hints:
    """Facts that a rule's simple conditions require, by variable or node name."""

    same_attrs: dict[str, str] = field(default_factory=dict)
    same_shape: dict[str, str] = field(default_factory=dict)
    same_attr: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    attr: dict[tuple[str, str], int] = field(default_factory=dict)
    value: dict[str, float] = field(default_factory=dict)
    rank: dict[str, int] = field(default_factory=dict)
    weight: frozenset[str] = frozenset()
    is_float: frozenset[str] = frozenset()
    lowered: frozenset[str] = frozenset()


def hints_of(conditions: Sequence[SExpr]) -> Hints:
    """Return the hints in expanded conditions, including those inside conjunctions."""
    h = Hints()
    weight, floats, lowered = set(), set(), set()
    queue = list(conditions)
    while queue:
        e = queue.pop(0)
        if not isinstance(e, SList):
            continue
        args = e.items[1:]
        if e.head == "and":
            queue += args
        elif e.head == "is-value":
            h.value[_text(args[0])] = float(_text(args[1]))
        elif e.head == "weight-only":
            weight.add(_text(args[0]))
        elif e.head == "/=" and _head(args[0]) == "lowering" and _text(args[1]) == "0":
            lowered.add(_inner(args[0]))
        elif e.head == ">=" and _head(args[0]) == "dtype" and _text(args[1]) == "14":
            floats.add(_inner(args[0]))
        elif e.head == "=":
            _equality(h, args[0], args[1])
    return Hints(
        h.same_attrs,
        h.same_shape,
        h.same_attr,
        h.attr,
        h.value,
        h.rank,
        frozenset(weight),
        frozenset(floats),
        frozenset(lowered),
    )


def _equality(h: Hints, a: SExpr, b: SExpr) -> None:
    pair = (_head(a), _head(b))
    number = int(_text(b)) if isinstance(b, Atom) and _text(b).lstrip("-").isdigit() else None
    if pair == ("attrs", "attrs"):
        h.same_attrs[_inner(b)] = _inner(a)
        h.same_attrs[_inner(a)] = _inner(b)
    elif pair == ("shape", "shape"):
        h.same_shape[_inner(b)] = _inner(a)
        h.same_shape[_inner(a)] = _inner(b)
    elif pair == ("attr", "attr") and isinstance(a, SList) and isinstance(b, SList):
        one, two = ((_text(e.items[1]), _text(e.items[2])) for e in (a, b))
        h.same_attr[two], h.same_attr[one] = one, two
    elif pair[0] == "attr" and number is not None and isinstance(a, SList):
        h.attr[_text(a.items[1]), _text(a.items[2])] = number
    elif pair[0] == "rank" and number is not None:
        h.rank[_inner(a)] = number


def _head(e: SExpr) -> str:
    return e.head if isinstance(e, SList) else ""


def _text(e: SExpr) -> str:
    return e.text if isinstance(e, Atom) else ""


def _inner(e: SExpr) -> str:
    return _text(e.items[1]) if isinstance(e, SList) and len(e.items) > 1 else ""


def propose(
    rule: Rule, hints: Hints, rng: np.random.Generator, *, equal: bool = False
) -> Instance | None:
    """Draw an instance; return None if the draw is rejected.

    Args:
      equal: give all free dimensions the same size, 2 or 3, and draw higher ranks more often, for
        which few permutations are their own inverse.
    """
    drawing = _Filling(hints, rng, equal=equal)
    try:
        roots = tuple(drawing.make(p, None, drawing.dtype) for p in rule.lhs)
    except Rejected:
        return None
    if len(set(roots)) != len(roots):
        return None
    return Instance(tuple(drawing.nodes), roots)


class _Filling(Sketch):
    dtypes = ("float32", "float32", "int32", "int32", "bfloat16", "float64", "int8")

    def __init__(self, hints: Hints, rng: np.random.Generator, *, equal: bool = False):
        super().__init__(rng, zero=rng.random() < 0.03)
        self.hints = hints
        self.side = self.number(2, 3) if equal else None
        self.attr_values: dict[str, tuple[int, ...]] = {}
        self.named: dict[str, int] = {}
        choices = [d for d in _DTYPES if "float" in d] if hints.is_float else _DTYPES
        self.dtype = str(rng.choice(choices))

    def size(self) -> int:
        return super().size() if self.side is None else self.side

    def shape(self, low: int = 0, high: int | None = None) -> tuple[int, ...]:
        shape = super().shape(low, high)
        if self.side is None or self.chance(0.5):
            return shape
        more = super().shape(low, (self.most if high is None else high) + 1)
        return max(shape, more, key=len)

    def rank_of(self, p: Pattern | Var) -> int | None:
        return self.hints.rank.get(p.name) if isinstance(p, Var) else None

    def is_value(self, p: Pattern | Var) -> bool:
        return isinstance(p, Var) and p.name in self.hints.value

    def forced(self, p: Pattern) -> dict[str, Any]:
        """Return the attributes that the pattern or a hint fixes, by field."""
        out: dict[str, Any] = {}
        spec = ops.OPS[p.op]
        twin = self.hints.same_attrs.get(p.name) if p.name else None
        if twin in self.named and self.nodes[self.named[twin]].op == p.op and self.chance(0.95):
            node = self.nodes[self.named[twin]]
            out = {f.name: node.attr(f.name) for f in spec.fields}
        for f in spec.fields:
            number = self.hints.attr.get((p.name, f.name)) if p.name else None
            if number is not None and self.chance(0.9):
                out[f.name] = number if f.width == 1 else (number,) * f.width
            other = self.hints.same_attr.get((p.name, f.name)) if p.name else None
            if other and other[0] in self.named and self.chance(0.9):
                out[f.name] = self.nodes[self.named[other[0]]].attr(other[1])
        for key, value in p.attrs:
            width = spec.field(key).width
            if isinstance(value, int):
                out[key] = value if width == 1 else (value,) * width
            elif value in self.attr_values:
                out[key] = self.attr_values[value] if width > 1 else self.attr_values[value][0]
        return out

    def leaf(self, name: str, want: Want, dtype: str) -> int:
        h = self.hints
        if name in h.value and self.chance(0.95):
            if want is not None and len(want):
                raise Rejected
            value = float(np.float32(h.value[name]))
            return self.add(Node("const", shape=(), dtype=dtype, value=value))
        rank = h.rank.get(name)
        twin = h.same_shape.get(name)
        if want is None and twin in {**self.bound, **self.named} and self.chance(0.9):
            want = self.nodes[{**self.bound, **self.named}[twin]].shape
        if rank is not None and want is None:
            want = (None,) * rank
        shape = self.shape() if want is None else self.fill(want)
        if math.prod(shape) > MAX_ELEMENTS:
            raise Rejected
        if self.chance(0.04) and dtype != "bool":
            dtype = str(self.rng.choice(("float32", "bfloat16", "int32")))
        if shape == () and self.chance(0.3):
            value = float(self.rng.choice((0.0, 1.0, 2.0, -1.0, 0.5, 3.0)))
            value = value if "float" in dtype else abs(int(value))
            return self.add(Node("const", shape=(), dtype=dtype, value=value))
        op = "weight" if self.chance(0.97 if name in h.weight else 0.35) else "input"
        return self.add(Node(op, shape=shape, dtype=dtype, ref=len(self.nodes)))

    def finish(self, p: Pattern, node: Node) -> int:
        at = self.add(self.lowered(node) if p.name in self.hints.lowered else node)
        if p.name:
            self.named[p.name] = at
        for key, value in p.attrs:
            if isinstance(value, str):
                got = node.attr(key)
                self.attr_values.setdefault(value, got if isinstance(got, tuple) else (got,))
        return at

    def lowered(self, node: Node) -> Node:
        """Return the node with one of its other lowerings."""
        others = applicable(node, tuple(self.nodes[a] for a in node.args))[1:]
        if not others:
            raise Rejected
        return replace(node, lowering=int(self.rng.choice(others)))
