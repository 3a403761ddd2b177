"""Random concrete graphs that a rule's left-hand side matches.

A pattern is filled from its leaves or from a wanted shape, whichever is known first: each shape
family has a sampler that draws attributes and asks its arguments for shapes that fit. What a rule's
conditions say plainly (equal attributes, a constant's value, a rank) is used as a hint; everything
else is left to rejection: a proposal that does not fit is thrown away, and whether the rule fires
is decided by the engine itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, infer, pack_attrs
from xrl_jax.language.rule import Pattern, Rule, Var
from xrl_jax.language.sexpr import Atom, SExpr, SList
from xrl_jax.lower.table import applicable
from xrl_jax.verify.samplers.base import Rejected, Want
from xrl_jax.verify.samplers.elementwise import elementwise
from xrl_jax.verify.samplers.table import SAMPLERS

_DTYPES = ("float32",) * 6 + ("float64", "bfloat16", "int32", "int32", "uint8")
_MAX_ELEMENTS = 4096


@dataclass(frozen=True)
class Instance:
    """A graph with the left-hand side in it: `roots` index `nodes`, and are its outputs."""

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
    """What the conditions say plainly."""

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
    """Hints from expanded conditions; conjunctions are opened."""
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
    """One draw; None where it led nowhere.

    Args:
      equal: draw all sizes that are free as the same one, 2 or 3, and higher ranks more often:
        there few permutations are their own inverse.
    """
    drawing = _Drawing(hints, rng, equal=equal)
    try:
        roots = tuple(drawing.make(p, None, drawing.dtype) for p in rule.lhs)
    except Rejected:
        return None
    if len(set(roots)) != len(roots):
        return None
    return Instance(tuple(drawing.nodes), roots)


class _Drawing:
    def __init__(self, hints: Hints, rng: np.random.Generator, *, equal: bool = False):
        self.hints = hints
        self.rng = rng
        self.side = self.number(2, 3) if equal else None
        self.nodes: list[Node] = []
        self.bound: dict[str, int] = {}
        self.numbers: dict[str, tuple[int, ...]] = {}
        self.named: dict[str, int] = {}
        self.floats_only = bool(hints.is_float)
        choices = [d for d in _DTYPES if "float" in d] if self.floats_only else _DTYPES
        self.dtype = str(rng.choice(choices))
        self.zero = rng.random() < 0.03

    # --- small draws ---

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def number(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        return int(self.rng.integers(low, high + 1))

    def size(self) -> int:
        if self.side is not None:
            return self.side
        if self.zero and self.chance(0.2):
            return 0
        return int(self.rng.choice((1, 2, 3, 4, 5), p=(0.2, 0.3, 0.25, 0.15, 0.1)))

    def shape(self, low: int = 0, high: int = 4) -> tuple[int, ...]:
        rank = int(self.rng.choice(range(low, high + 1)))
        if self.side is not None and self.chance(0.5):
            rank = max(rank, int(self.rng.choice(range(low, high + 2))))
        if rank == 0 and self.chance(0.7):
            rank = min(2, high)
        return tuple(self.size() for _ in range(rank))

    def fill(self, want: Sequence[int | None]) -> tuple[int, ...]:
        return tuple(self.size() if d is None else d for d in want)

    # --- the tree ---

    def make(self, p: Pattern | Var, want: Want, dtype: str) -> int:
        if isinstance(p, Var):
            return self.leaf(p.name, want, dtype)
        known = self.forced(p)
        args, attrs = (
            SAMPLERS[p.op](self, p, want, dtype, known)
            if p.op in SAMPLERS
            else elementwise(self, p, want, dtype, known)
        )
        attrs |= {k: v for k, v in known.items()}
        return self.add(p, args, attrs, want, dtype)

    def forced(self, p: Pattern) -> dict[str, Any]:
        """Attributes that the pattern or a hint fixes, by field."""
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
            elif value in self.numbers:
                out[key] = self.numbers[value] if width > 1 else self.numbers[value][0]
        return out

    def leaf(self, name: str, want: Want, dtype: str) -> int:
        if name in self.bound:
            node = self.nodes[self.bound[name]]
            if not fits(node.shape, want):
                raise Rejected
            return self.bound[name]
        h = self.hints
        if name in h.value and self.chance(0.95):
            if want is not None and len(want):
                raise Rejected
            node = Node("const", shape=(), dtype=dtype, value=float(np.float32(h.value[name])))
        else:
            rank = h.rank.get(name)
            twin = h.same_shape.get(name)
            if want is None and twin in {**self.bound, **self.named} and self.chance(0.9):
                want = self.nodes[{**self.bound, **self.named}[twin]].shape
            if rank is not None and want is None:
                want = (None,) * rank
            shape = self.shape() if want is None else self.fill(want)
            if math.prod(shape) > _MAX_ELEMENTS:
                raise Rejected
            if self.chance(0.04) and dtype != "bool":
                dtype = str(self.rng.choice(("float32", "bfloat16", "int32")))
            weight = self.chance(0.97 if name in h.weight else 0.35)
            node = Node(
                "weight" if weight else "input", shape=shape, dtype=dtype, ref=len(self.nodes)
            )
            if shape == () and self.chance(0.3):
                value = float(self.rng.choice((0.0, 1.0, 2.0, -1.0, 0.5, 3.0)))
                value = value if "float" in dtype else abs(int(value))
                node = Node("const", shape=(), dtype=dtype, value=value)
        self.nodes.append(node)
        self.bound[name] = len(self.nodes) - 1
        return self.bound[name]

    def add(
        self, p: Pattern, args: Sequence[int], attrs: dict[str, Any], want: Want, dtype: str
    ) -> int:
        packed = pack_attrs(p.op, attrs)
        arg_nodes = [self.nodes[a] for a in args]
        if not ops.OPS[p.op].takes_dtypes([n.dtype for n in arg_nodes]):
            raise Rejected
        typed = infer(p.op, packed, arg_nodes)
        if typed is None or len(typed[0]) > ops.MAX_RANK or math.prod(typed[0]) > _MAX_ELEMENTS:
            raise Rejected
        shape, got = typed
        if not fits(shape, want) or got != dtype:
            raise Rejected
        node = Node(p.op, tuple(args), packed, shape=shape, dtype=got)
        if p.name in self.hints.lowered:
            node = self.lowered(node)
        self.nodes.append(node)
        at = len(self.nodes) - 1
        if p.name:
            self.named[p.name] = at
        for key, value in p.attrs:
            if isinstance(value, str):
                got_attr = self.nodes[at].attr(key)
                self.numbers.setdefault(
                    value, got_attr if isinstance(got_attr, tuple) else (got_attr,)
                )
        return at

    def lowered(self, node: Node) -> Node:
        """The node in one of its other forms."""
        forms = applicable(node, tuple(self.nodes[a] for a in node.args))[1:]
        if not forms:
            raise Rejected
        return replace(node, lowering=int(self.rng.choice(forms)))

    def known(self, p: Pattern | Var) -> bool:
        """Whether the argument brings a shape of its own."""
        return isinstance(p, Pattern) or p.name in self.bound

    def shape_of(self, index: int) -> tuple[int, ...]:
        return self.nodes[index].shape


def fits(shape: tuple[int, ...], want: Want) -> bool:
    if want is None:
        return True
    return len(shape) == len(want) and all(
        w is None or w == s for s, w in zip(shape, want, strict=True)
    )
