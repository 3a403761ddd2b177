"""Canonicalisation: one form for what can be written in several ways, before any rewriting.

Layers of one kind are written in many ways: with a multiplication by a mask of ones, an added bias
of zeros, weights stored with a separate heads dimension, an einsum with exchanged operands. None of
this costs anything in XLA, but rules, libraries and the search for repeated layers see different
graphs. Therefore equal constants are merged, arrays filled with one value become broadcast
scalars, operators without effect are removed, adjacent data movements are combined, and products
get one order (`canonical_dot`).

Every step preserves XLA's results bit for bit, except for the sign of zeros and, in products, the
order of summation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.bindings import Binding, Equation, call_of, position_of
from xrl_jax.graph.graph import Node, infer, pack_attrs
from xrl_jax.graph.operands import flat_operands, is_pinned
from xrl_jax.program.host import HostGraph, disassemble, exact_float32, live, reassemble, source_key
from xrl_jax.program.program import Program
from xrl_jax.transform import canonical_dot

# NumPy functions whose results equal XLA's bit for bit.
_NUMPY_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in ("add", "sqrt", "abs", "square")},
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    **{"eq": np.equal, "ne": np.not_equal, "ge": np.greater_equal, "gt": np.greater},
    **{"le": np.less_equal, "lt": np.less, "and": np.bitwise_and, "or": np.bitwise_or},
    "not": np.invert,
    "select": lambda test, no, yes: yes if test else no,
}
_DTYPES = ("bool", "int32", "float32")
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1, "max": -math.inf, "min": math.inf}
_EITHER_SIDE = ("add", "mul", "max", "min", "and", "or")
_INVERSES = ("neg", "not", "rev")


def canonical(program: Program) -> Program:
    """Return the program with every graph in canonical form."""
    host = disassemble(program)
    graphs = [host.main, *host.bodies]
    given: dict[int, list[Any]] = {}  # by body: the scalar that all calls pass for each operand
    # Bodies come before their callers, so the loop runs from the end.
    for g in [0, *range(len(graphs) - 1, 0, -1)]:
        graphs[g], calls = _canonical(graphs[g], host.bindings, given.get(g - 1, []))
        for body, scalars in calls:
            given[body] = _agreed(given.get(body, scalars), scalars)
    return reassemble(program, replace(host, main=graphs[0], bodies=tuple(graphs[1:])))


def _agreed(before: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
    """Return the scalars that both calls pass, None elsewhere; empty if the lengths differ."""
    if len(before) != len(scalars):
        return []
    return [a if a == b else None for a, b in zip(before, scalars, strict=True)]


def _canonical(
    graph: HostGraph, bindings: Sequence[Binding], given: Sequence[Any]
) -> tuple[HostGraph, list[tuple[int, list[Any]]]]:
    """Return the graph in canonical form, and the bodies it calls with the scalars it passes.

    Args:
      given: for each input, the scalar that fills it; None where unknown. Empty if nothing is
        known.
    """
    g = Canonical(bindings)
    new: list[int] = []
    for node in graph.nodes:
        position = position_of(node, bindings)
        number = given[position] if given and position is not None else None
        full = None if number is None else g.full(number, node.shape, node.dtype)
        renamed = replace(node, args=tuple(new[a] for a in node.args))
        new.append(g.add(renamed) if full is None else full)
    outputs = tuple(new[o] for o in graph.outputs)
    calls = []
    for node in g.nodes:
        call = call_of(node, bindings)
        if call is not None:
            scalars = [g.scalar_of(o) for o in flat_operands(g.nodes, node)]
            if call.kind == "inline":
                calls.append((call.bodies[0], scalars))
            else:  # operands of loops and branches are not inspected
                calls += [(b, []) for b in call.bodies]
    return live(replace(graph, nodes=tuple(g.nodes), outputs=outputs)), calls


@dataclass
class Canonical:
    """A canonical graph under construction.

    Attributes:
      scalars: for each node whose elements are all equal, their value.
      fixed: nodes that depend on constants only. Equal ones are merged; other nodes are not,
        because layers that shared work would differ from each other.
      prepared: nodes that depend on weights and constants only.
    """

    bindings: Sequence[Binding]
    nodes: list[Node] = field(default_factory=list)
    scalars: dict[int, Any] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)
    prepared: set[int] = field(default_factory=set)
    known: dict[Any, int] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        """Return the index of a node with this node's value, appending the node if necessary."""
        found = self._simpler(node)
        if found is not None and not self.nodes[found].shape and node.shape:
            found = self.broadcast(found, node.shape, ())
        if found is not None:
            return found
        key: Any = len(self.nodes)
        if node.op in ops.SOURCES:
            key = source_key(node)
        elif node.args and all(a in self.fixed for a in node.args) and not is_pinned(node):
            key = (node.op, node.args, node.attrs, node.shape, node.dtype, node.ref)
        if key not in self.known:
            self.known[key] = len(self.nodes)
            self.nodes.append(node)
            self._learn(self.known[key], node, is_fixed=not isinstance(key, int))
        return self.known[key]

    def _learn(self, index: int, node: Node, *, is_fixed: bool) -> None:
        if is_fixed and node.op not in ("input", "weight"):
            self.fixed.add(index)
        of_weights = node.op == "weight" or (node.args and self.prepared.issuperset(node.args))
        if index in self.fixed or (of_weights and not is_pinned(node)):
            self.prepared.add(index)
        if node.op == "const" and node.ref < 0 and node.dtype in _DTYPES:
            self.scalars[index] = np.dtype(node.dtype).type(node.value)
        elif node.op == "broadcast" and node.args[0] in self.scalars:
            self.scalars[index] = self.scalars[node.args[0]]

    def add_op(self, op: str, args: Sequence[int], **attrs: int | Sequence[int]) -> int | None:
        """Return the index of an operator's result; None if arguments or attributes do not fit."""
        vector = pack_attrs(op, attrs)
        inferred = infer(op, vector, [self.nodes[a] for a in args])
        if inferred is None:
            return None
        shape, dtype = inferred
        return self.add(Node(op, tuple(args), vector, shape=shape, dtype=dtype))

    def full(self, number: Any, shape: Sequence[int], dtype: str) -> int | None:
        """Return an array filled with one value; None if a node cannot hold that value."""
        value = exact_float32(np.asarray(number).astype(dtype))
        if value is None or np.isnan(value):
            return None
        scalar = self.add(Node("const", dtype=dtype, value=value))
        return self.broadcast(scalar, shape, ()) if shape else scalar

    def reshape(self, index: int, shape: Sequence[int]) -> int | None:
        return self.add_op("reshape", [index], shape=shape, rank=len(shape))

    def broadcast(self, index: int, shape: Sequence[int], dims: Sequence[int]) -> int | None:
        return self.add_op("broadcast", [index], shape=shape, rank=len(shape), dims=dims)

    def transpose(self, index: int, perm: Sequence[int]) -> int | None:
        return self.add_op("transpose", [index], perm=perm)

    def scalar_of(self, index: int) -> Any:
        """Return the value of all elements of a node; None if they differ or are not known."""
        return self.scalars.get(index)

    # --- simplifications of a node ---

    def _simpler(self, node: Node) -> int | None:
        if node.op == "opaque":
            return self._as_slice(node)
        if node.op in ops.SOURCES or not node.args or node.dtype in ("tuple", "extended"):
            return None
        for rule in (self._fold_scalars, self._without_neutral, self._of_inverse):
            found = rule(node)
            if found is not None:
                return found
        by_op = _BY_OP.get(node.op)
        return by_op(self, node) if by_op is not None else None

    def _fold_scalars(self, node: Node) -> int | None:
        """Evaluate an operator whose arguments are each filled with one value."""
        args = [self.scalar_of(a) for a in node.args]
        if any(a is None for a in args):
            return None
        if node.op in ("reshape", "transpose", "slice", "rev"):
            return self.full(args[0], node.shape, node.dtype)
        if node.op == "cast":
            fits = node.dtype in _DTYPES and (node.dtype != "int32" or abs(args[0]) < 2**31)
            return self.full(args[0], node.shape, node.dtype) if fits else None
        if node.op not in _NUMPY_FUNCTIONS or node.dtype not in _DTYPES:
            return None
        with np.errstate(all="ignore"):
            return self.full(_NUMPY_FUNCTIONS[node.op](*args), node.shape, node.dtype)

    def _without_neutral(self, node: Node) -> int | None:
        """Drop an operator whose other argument is filled with its neutral element."""
        neutral = _NEUTRAL.get(node.op)
        if node.op in ("and", "or") and node.dtype == "bool":
            neutral = node.op == "and"
        if neutral is None:
            return None
        for x, other in ((0, 1), (1, 0)) if node.op in _EITHER_SIDE else ((0, 1),):
            if self.scalar_of(node.args[other]) == neutral:
                return node.args[x]
        return None

    def _of_inverse(self, node: Node) -> int | None:
        """Cancel an operator applied to the result of its own inverse, e.g. neg(neg(x)) -> x."""
        inner = self.nodes[node.args[0]]
        same = node.op in _INVERSES and (inner.op, inner.attrs) == (node.op, node.attrs)
        return inner.args[0] if same else None

    def _as_slice(self, node: Node) -> int | None:
        """Turn a dynamic_slice with known start indices into a slice."""
        equation = self.bindings[node.ref]
        if not isinstance(equation, Equation) or equation.name != "dynamic_slice":
            return None
        array, *starts = flat_operands(self.nodes, node)
        scalars = [self.scalar_of(s) for s in starts]
        shape, sizes = self.nodes[array].shape, node.shape
        if any(n is None for n in scalars) or len(shape) > ops.MAX_RANK:
            return None
        if self.nodes[array].dtype == "extended":
            return None
        start = [
            min(max(int(n), 0), whole - size)
            for n, whole, size in zip(scalars, shape, sizes, strict=True)
        ]
        limit = [a + size for a, size in zip(start, sizes, strict=True)]
        return self.add_op("slice", [array], start=start, limit=limit, stride=[1] * len(shape))


def _select(g: Canonical, node: Node) -> int | None:
    """Simplify a select whose predicate is known or whose two values are equal."""
    test, no, yes = node.args
    answer = g.scalar_of(test)
    if answer is not None:
        return yes if answer else no
    return yes if no == yes else None


def _cast(g: Canonical, node: Node) -> int | None:
    return node.args[0] if g.nodes[node.args[0]].dtype == node.dtype else None


def _integer_pow(g: Canonical, node: Node) -> int | None:
    exponent = node.scalar_attr("exponent")
    if exponent == 1:
        return node.args[0]
    return g.add_op("square", node.args) if exponent == 2 else None


def _mul(g: Canonical, node: Node) -> int | None:
    """Return a square for x * x, and a select for x * cast(test), as XLA does.

    In the select, elements whose test is false become zero, even if they are NaN.
    """
    a, b = node.args
    if node.dtype not in ops.FLOAT_DTYPES:
        return None
    if a == b:
        return g.add_op("square", [a])
    for x, mask in ((a, b), (b, a)):
        cast = g.nodes[mask]
        test = g.nodes[cast.args[0]] if cast.op == "cast" else None
        if test is not None and test.dtype == "bool" and test.shape and test.op != "broadcast":
            zero = g.full(0, node.shape, node.dtype)
            return None if zero is None else g.add_op("select", [cast.args[0], zero, x])
    return None


def _reshape(g: Canonical, node: Node) -> int | None:
    x = g.nodes[node.args[0]]
    if x.shape == node.shape:
        return node.args[0]
    return g.reshape(x.args[0], node.shape) if x.op == "reshape" else None


def _transpose(g: Canonical, node: Node) -> int | None:
    """Merge transposes, reshape if only axes of size one move, or exchange a dot's operands."""
    perm = node.dims("perm", len(node.shape))
    x = g.nodes[node.args[0]]
    if perm == tuple(range(len(perm))):
        return node.args[0]
    if x.op == "transpose":
        inner = x.dims("perm")
        return g.transpose(x.args[0], [inner[p] for p in perm])
    moved = [p for p in perm if x.shape[p] != 1]
    if moved == sorted(moved):
        return g.reshape(node.args[0], node.shape)
    return canonical_dot.exchange_operands(g, node, perm) if x.op == "dot" else None


def _broadcast(g: Canonical, node: Node) -> int | None:
    """Merge two broadcasts, and a broadcast with a reshape that only adds axes of size one."""
    x = g.nodes[node.args[0]]
    dims = node.dims("dims", len(x.shape))
    if x.shape == node.shape and dims == tuple(range(len(dims))):
        return node.args[0]
    if x.op == "broadcast":
        inner = x.dims("dims", len(g.nodes[x.args[0]].shape))
        return g.broadcast(x.args[0], node.shape, [dims[d] for d in inner])
    if x.op == "reshape":
        source = g.nodes[x.args[0]].shape
        kept = [d for d, n in enumerate(x.shape) if n != 1]
        if list(source) == [x.shape[d] for d in kept]:
            return g.broadcast(x.args[0], node.shape, [dims[d] for d in kept])
    return None


def _slice(g: Canonical, node: Node) -> int | None:
    """Drop a slice of a whole array."""
    return node.args[0] if g.nodes[node.args[0]].shape == node.shape else None


def _pad(g: Canonical, node: Node) -> int | None:
    """Drop a padding of zero width."""
    rank = len(node.shape)
    widths = [w for name in ("low", "high", "interior") for w in node.dims(name, rank)]
    return node.args[0] if not any(widths) else None


def _concat(g: Canonical, node: Node) -> int | None:
    return node.args[0] if len(node.args) == 1 else None


def _reduce(g: Canonical, node: Node) -> int | None:
    """Turn a reduction over axes of size one into a reshape."""
    shape = g.nodes[node.args[0]].shape
    return g.reshape(node.args[0], node.shape) if all(shape[a] == 1 for a in node.axes) else None


_BY_OP: dict[str, Callable[[Canonical, Node], int | None]] = {
    "select": _select,
    "cast": _cast,
    "integer_pow": _integer_pow,
    "mul": _mul,
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast": _broadcast,
    "slice": _slice,
    "pad": _pad,
    "concat": _concat,
    "dot": canonical_dot.canonical,
    **{f"reduce_{kind}": _reduce for kind in ("sum", "max", "min", "prod")},
}
