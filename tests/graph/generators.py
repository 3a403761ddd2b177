"""Random valid graphs over the native operators, for property tests of code that reads or rewrites
graphs.

Shapes are small, values stay finite (each node has a bound), and patterns of rewrite rules are
likely: shared operands, sibling dots and convolutions, chains of movement, broadcasts, constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, renumber
from xrl_jax.language.rule import Pattern
from xrl_jax.verify.samplers.base import Rejected, Want
from xrl_jax.verify.samplers.sketch import Sketch, fits

_BOUND = 1e4  # greatest magnitude of a value
_MAX_SIZE = 400  # elements of a node
_VALUES = (0.0, 0.0, 1.0, 0.5, -2.0, 0.1)  # of scalar constants
_UNARY = "neg abs tanh logistic erf sin cos sign floor square exp copy".split()
_BINARY = "add sub mul max min".split()
_REDUCTIONS = "reduce_sum reduce_max reduce_min softmax cumsum rev".split()
_POOLING = "window_sum window_max window_min".split()

# Bound of a node from those of its arguments; for other operators the largest of these.
_BOUNDS: dict[str, Callable[..., float]] = {
    **dict.fromkeys("tanh logistic erf sin cos sign softmax gt eq le cast".split(), lambda *b: 1.0),
    **dict.fromkeys(("add", "sub"), lambda a, b: a + b),
    **dict.fromkeys(("mul", "dot", "conv"), lambda a, b: a * b),
    "floor": lambda b: b + 1.0,
    "square": lambda b: b * b,
    "exp": lambda b: math.exp(min(b, 50.0)),
}


def _terms(node: Node, args: Sequence[Node]) -> int:
    """Return how many products or elements are summed for one element of the result."""
    shapes = [a.shape for a in args]
    match node.op:
        case "dot":
            dims = ops.unpack_dims(int(node.attr("lhs_contract")))  # type: ignore[arg-type]
            return math.prod(shapes[0][d] for d in dims)
        case "conv":
            layout = ops.LAYOUTS[int(node.attr("rhs_layout"))]  # type: ignore[arg-type]
            return math.prod(shapes[1]) // max(shapes[1][layout[0]], 1)
        case "reduce_sum" | "cumsum":
            return math.prod(shapes[0])
        case "window_sum":
            return math.prod(node.attr("window"))  # type: ignore[arg-type]
    return 1


class _Maker(Sketch):
    """The nodes created so far, with a bound of each one's magnitude."""

    sizes = (1, 2, 3, 4, 6)
    features = (1, 2, 3)

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self.bounds: list[float] = []
        self.fixed: dict[str, Any] = {}
        self.n_inputs = 0

    def source(self, op: str, shape: tuple[int, ...], *, value: float = 0.0) -> int:
        ref = -1
        if op in ("input", "weight"):
            ref, self.n_inputs = self.n_inputs, self.n_inputs + 1
        self.bounds.append(max(abs(value), 1.0))
        return self.add(Node(op, shape=shape, value=float(np.float32(value)), ref=ref))

    def leaf(self, name: str, want: Want, dtype: str) -> int:
        """Return an existing node, a scalar constant, or a new weight."""
        same = [i for i, n in enumerate(self.nodes) if fits(n.shape, want) and n.dtype == dtype]
        if same and self.chance(0.5):
            return self.choose(same)
        if dtype != "float32":
            raise Rejected
        if want == ():
            return self.source("const", (), value=self.choose(_VALUES))
        return self.source("weight", self.shape() if want is None else self.fill(want))

    def forced(self, p: Pattern) -> dict[str, Any]:
        return self.fixed

    def finish(self, p: Pattern, node: Node) -> int:
        bounds = [self.bounds[a] for a in node.args]
        bound = _BOUNDS[node.op](*bounds) if node.op in _BOUNDS else max(bounds)
        bound *= _terms(node, [self.nodes[a] for a in node.args])
        if bound > _BOUND or math.prod(node.shape) > _MAX_SIZE or 0 in node.shape:
            raise Rejected
        if node.op == "conv" and min(*node.attr("low"), *node.attr("high")) < 0:  # type: ignore[misc]
            raise Rejected  # on CPUs XLA reads out of bounds in some of these
        if node.op in _POOLING:  # a window of padding only has no finite maximum
            window, low, high = (node.attr(f) for f in ("window", "low", "high"))
            for w, *ends in zip(window, low, high, strict=True):  # type: ignore[arg-type]
                if max(ends) >= w:
                    raise Rejected
        self.bounds.append(bound)
        return self.add(node)

    def emit(
        self, op: str, *args: int | None, n_args: int | None = None, **fixed: Any
    ) -> int | None:
        """Add a node; return its index, or None if it does not fit or would be too large."""
        before, self.fixed = len(self.nodes), fixed
        try:
            return self.node(op, *args, n_args=n_args)
        except Rejected:
            del self.nodes[before:], self.bounds[before:]
            return None

    def choose(self, items: Sequence[Any]) -> Any:
        return items[self.number(0, len(items) - 1)]

    def pick(self, *ranks: int) -> int:
        """Return a float node of one of the ranks (of any if none is given), more likely a recent
        one.
        """
        fit = [
            i
            for i, n in enumerate(self.nodes)
            if n.dtype == "float32" and (not ranks or len(n.shape) in ranks)
        ]
        return self.choose(fit[-6:] if self.chance(0.7) else fit)

    # One method per kind of step; each adds nodes or does nothing.

    def unary(self) -> None:
        self.emit(self.choose(_UNARY), self.pick())

    def binary(self) -> None:
        x = self.pick()
        other = self.source("const", (), value=self.choose(_VALUES)) if self.chance(0.3) else None
        self.emit(self.choose(_BINARY), *((x, other) if self.chance(0.5) else (other, x)))

    def safe_division(self) -> None:
        x = self.pick()
        one = self.source("const", (), value=1.0)
        square = self.emit("square", x)
        below = None if square is None else self.emit("add", square, one)
        if below is not None and self.chance(0.5):
            self.emit("div", x, below)
        elif below is not None:
            self.emit(self.choose(["rsqrt", "sqrt", "log"]), below)

    def bias(self) -> None:
        """Add or multiply by a vector that is broadcast along one dimension."""
        x = self.pick(2, 3, 4)
        shape = self.nodes[x].shape
        axis = self.number(0, len(shape) - 1)
        vector = self.leaf("", (shape[axis],), "float32")
        wide = self.emit("broadcast", vector, shape=shape, rank=len(shape), dims=(axis,))
        if wide is not None:
            self.emit(self.choose(["add", "mul"]), x, wide)

    def movement(self) -> None:
        op = self.choose(["transpose", "transpose", "reshape", "reshape", "broadcast"])
        self.emit(op, self.pick(1, 2, 3, 4))

    def concat(self) -> None:
        self.emit("concat", self.pick(1, 2, 3, 4), n_args=self.number(2, 3))

    def slices(self) -> None:
        """Add one or two slices of a node."""
        x = self.pick(1, 2, 3, 4)
        for _ in range(self.number(1, 2)):
            self.emit("slice", x)

    def pad(self) -> None:
        self.emit("pad", self.pick(1, 2, 4))

    def reduction(self) -> None:
        self.emit(self.choose(_REDUCTIONS), self.pick(1, 2, 3, 4))

    def pooling(self) -> None:
        self.emit(self.choose(_POOLING), self.pick(4))

    def siblings(self, op: str, *args: int | None) -> None:
        """Add one to three nodes that share an operand and mostly their attributes."""
        fixed: dict[str, Any] = {}
        for _ in range(self.number(1, 3)):
            made = self.emit(op, *args, **fixed)
            if made is not None and self.chance(0.8):
                node = self.nodes[made]
                fixed = {f.name: node.attr(f.name) for f in node.spec.fields}

    def dots(self) -> None:
        x = self.pick(2, 3)
        self.siblings("dot", *((x,) if self.chance(0.75) else (None, x)))

    def convs(self) -> None:
        self.siblings("conv", self.pick(4))

    def selection(self) -> None:
        x = self.pick()
        test = self.emit(self.choose(["gt", "eq", "le"]), x)
        if test is not None and self.chance(0.4):
            self.emit("cast", test)
        elif test is not None:
            self.emit("select", test, x)


_STEPS: dict[str, int] = {
    "unary": 4,
    "binary": 6,
    "safe_division": 1,
    "bias": 3,
    "movement": 6,
    "concat": 2,
    "slices": 2,
    "pad": 1,
    "reduction": 2,
    "dots": 4,
    "convs": 4,
    "pooling": 1,
    "selection": 1,
}


def random_graph(
    rng: np.random.Generator, n_nodes: int = 24, *, max_outputs: int = 8
) -> tuple[list[Node], tuple[int, ...]]:
    """Return about `n_nodes` nodes in topological order, all of them live, and the outputs.

    Outputs are nodes without users, the last `max_outputs` of them. Inputs and weights are numbered
    together: `ref` is the position among the arguments.
    """
    maker = _Maker(rng)
    for op, shape in (("input", (4, 6)), ("input", (2, 4, 6, 6)), ("input", (2, 3, 4))):
        maker.source(op, shape)
    chances = np.asarray([*_STEPS.values()]) / sum(_STEPS.values())
    while len(maker.nodes) < n_nodes:
        getattr(maker, str(rng.choice(list(_STEPS), p=chances)))()
    nodes = maker.nodes
    read = {a for n in nodes for a in n.args}
    outputs = [i for i, n in enumerate(nodes) if i not in read and n.args][-max_outputs:]
    live = set(outputs)
    for i in reversed(range(len(nodes))):
        if i in live:
            live.update(nodes[i].args)
    nodes, kept = renumber(nodes, outputs, sorted(live))
    refs = iter(range(len(nodes)))
    return [replace(n, ref=next(refs)) if n.ref >= 0 else n for n in nodes], kept


def graphs(
    n_nodes: int = 24,
) -> st.SearchStrategy[tuple[list[Node], tuple[int, ...]]]:
    """Return `random_graph` as a hypothesis strategy over its seed."""
    seeds = st.integers(0, 2**32 - 1)
    return seeds.map(lambda s: random_graph(np.random.default_rng(s), n_nodes))


def shuffled(
    rng: np.random.Generator, nodes: Sequence[Node], outputs: Sequence[int]
) -> tuple[list[Node], tuple[int, ...]]:
    """Return the same graph with its nodes in another topological order."""
    left, done = list(range(len(nodes))), {}
    while left:
        ready = [i for i in left if all(a in done for a in nodes[i].args)]
        i = ready[int(rng.integers(len(ready)))]
        left.remove(i)
        done[i] = len(done)
    order = sorted(done, key=done.__getitem__)
    moved = [replace(nodes[i], args=tuple(done[a] for a in nodes[i].args)) for i in order]
    return moved, tuple(done[o] for o in outputs)
