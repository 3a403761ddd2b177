"""Random valid graphs over the native ops, for property tests of what reads or rewrites graphs.

Shapes are small, values stay finite (`_Maker` bounds them), and what rewrite rules look for is
likely: shared operands, sibling dots and convolutions, chains of movement, broadcasts, constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, infer, pack_attrs, renumber
from xrl_jax.graph.ops import LAYOUT_CODE, mask_of, pack_dims

_BOUND = 1e4  # magnitudes above this are not made
_MAX_SIZE = 400  # elements of a node
_F32 = ops.DTYPE_CODE["float32"]
_SIZES = (1, 2, 3, 4, 6)
_NCHW, _OIHW = LAYOUT_CODE[0, 1, 2, 3], LAYOUT_CODE[0, 1, 2, 3]
_NHWC, _HWIO = LAYOUT_CODE[0, 3, 1, 2], LAYOUT_CODE[3, 2, 0, 1]

# Unary functions with the bound of their result for arguments of bound b.
_UNARY: dict[str, Callable[[float], float]] = {
    "neg": lambda b: b,
    "abs": lambda b: b,
    "tanh": lambda b: 1.0,
    "logistic": lambda b: 1.0,
    "erf": lambda b: 1.0,
    "sin": lambda b: 1.0,
    "cos": lambda b: 1.0,
    "sign": lambda b: 1.0,
    "floor": lambda b: b + 1.0,
    "square": lambda b: b * b,
    "exp": lambda b: float(np.exp(min(b, 50.0))),
    "copy": lambda b: b,
}
_BINARY: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "max": max,
    "min": max,
}


class _Maker:
    """Nodes made so far, with a bound of each one's magnitude."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.nodes: list[Node] = []
        self.bounds: list[float] = []
        self.n_inputs = 0

    def source(self, op: str, shape: tuple[int, ...], *, value: float = 0.0) -> int:
        ref = -1
        if op in ("input", "weight"):
            ref, self.n_inputs = self.n_inputs, self.n_inputs + 1
        self.nodes.append(Node(op, shape=shape, value=float(np.float32(value)), ref=ref))
        self.bounds.append(max(abs(value), 1.0))
        return len(self.nodes) - 1

    def emit(self, op: str, args: Sequence[int], bound: float, **attrs: object) -> int | None:
        """The index of a new node, or None where it does not fit or would be too large."""
        packed = pack_attrs(op, attrs)  # type: ignore[arg-type]
        found = infer(op, packed, [self.nodes[a] for a in args])
        if found is None or bound > _BOUND:
            return None
        shape, dtype = found
        if int(np.prod(shape)) > _MAX_SIZE or 0 in shape:
            return None
        self.nodes.append(Node(op, tuple(args), packed, shape=shape, dtype=dtype))
        self.bounds.append(bound)
        return len(self.nodes) - 1

    def choose(self, items: Sequence) -> object:
        return items[int(self.rng.integers(len(items)))]

    def pick(self, *ranks: int) -> int | None:
        """A float node of one of the ranks (of any without), recent ones more likely."""
        fit = [
            i
            for i, n in enumerate(self.nodes)
            if n.dtype == "float32" and (not ranks or len(n.shape) in ranks)
        ]
        if not fit:
            return None
        recent = fit[-6:] if self.rng.random() < 0.7 else fit
        return recent[int(self.rng.integers(len(recent)))]

    def weight_or_node(self, shape: tuple[int, ...]) -> int:
        """An operand of a shape: a node there is, or a new weight."""
        same = [i for i, n in enumerate(self.nodes) if n.shape == shape and n.dtype == "float32"]
        if same and self.rng.random() < 0.5:
            return same[int(self.rng.integers(len(same)))]
        return self.source("weight", shape)

    # One method per kind of step; each adds nodes or does nothing.

    def unary(self) -> None:
        x = self.pick()
        if x is not None:
            op = str(self.choose(list(_UNARY)))
            self.emit(op, [x], _UNARY[op](self.bounds[x]))

    def binary(self) -> None:
        x = self.pick()
        if x is None:
            return
        shape = self.nodes[x].shape
        if self.rng.random() < 0.35:
            y = self.source("const", (), value=float(self.choose([0.0, 0.5, 1.0, -2.0, 0.1])))  # type: ignore[arg-type]
        else:
            y = self.weight_or_node(shape)
        args = [x, y] if self.rng.random() < 0.5 else [y, x]
        op = str(self.choose(list(_BINARY)))
        self.emit(op, args, _BINARY[op](self.bounds[x], self.bounds[y]))

    def safe_division(self) -> None:
        x = self.pick()
        if x is None:
            return
        one = self.source("const", (), value=1.0)
        square = self.emit("square", [x], self.bounds[x] ** 2)
        if square is not None:
            below = self.emit("add", [square, one], self.bounds[square] + 1.0)
            op = str(self.choose(["rsqrt", "sqrt", "log"]))
            if below is not None and self.rng.random() < 0.5:
                self.emit("div", [x, below], self.bounds[x])
            elif below is not None:
                self.emit(op, [below], self.bounds[below])

    def bias(self) -> None:
        """A vector broadcast along the last dimension and added or multiplied."""
        x = self.pick(2, 3, 4)
        if x is None:
            return
        shape = self.nodes[x].shape
        axis = int(self.rng.integers(len(shape)))
        vector = self.weight_or_node((shape[axis],))
        attrs = dict(shape=shape, rank=len(shape), dims=(axis,))
        wide = self.emit("broadcast", [vector], self.bounds[vector], **attrs)
        if wide is not None:
            op = str(self.choose(["add", "mul"]))
            self.emit(op, [x, wide], _BINARY[op](self.bounds[x], self.bounds[wide]))

    def transpose(self) -> None:
        x = self.pick(2, 3, 4)
        if x is not None:
            perm = tuple(self.rng.permutation(len(self.nodes[x].shape)).tolist())
            self.emit("transpose", [x], self.bounds[x], perm=perm)

    def reshape(self) -> None:
        x = self.pick(1, 2, 3, 4)
        if x is None:
            return
        shape = list(self.nodes[x].shape)
        kind = int(self.rng.integers(3))
        if kind == 0 and len(shape) > 1:
            at = int(self.rng.integers(len(shape) - 1))
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        elif kind == 1:
            at = int(self.rng.integers(len(shape)))
            by = int(self.choose([d for d in range(1, shape[at] + 1) if shape[at] % d == 0]))  # type: ignore[arg-type]
            shape[at : at + 1] = [by, shape[at] // by]
        else:
            shape = [int(np.prod(shape))]
        if len(shape) <= 4:
            self.emit("reshape", [x], self.bounds[x], shape=shape, rank=len(shape))

    def concat(self) -> None:
        x = self.pick(1, 2, 3, 4)
        if x is not None:
            others = [
                self.weight_or_node(self.nodes[x].shape) for _ in range(self.rng.integers(1, 3))
            ]
            axis = int(self.rng.integers(len(self.nodes[x].shape)))
            args = [x, *others]
            self.emit("concat", args, max(self.bounds[a] for a in args), axis=axis)

    def slices(self) -> None:
        """One or both halves of a node."""
        x = self.pick(1, 2, 3, 4)
        if x is None:
            return
        shape = self.nodes[x].shape
        axis = int(self.rng.integers(len(shape)))
        middle = int(self.rng.integers(shape[axis] + 1))
        for low, high in ((0, middle), (middle, shape[axis])):
            start, limit = [0] * len(shape), list(shape)
            start[axis], limit[axis] = low, high
            stride = [1] * len(shape)
            stride[axis] = int(self.choose([1, 1, 1, 2]))  # type: ignore[arg-type]
            if self.rng.random() < 0.7:
                attrs = dict(start=start, limit=limit, stride=stride)
                self.emit("slice", [x], self.bounds[x], **attrs)

    def pad(self) -> None:
        x = self.pick(1, 2, 4)
        if x is None:
            return
        rank = len(self.nodes[x].shape)
        zero = self.source("const", (), value=float(self.choose([0.0, 0.0, 1.0])))  # type: ignore[arg-type]
        low, high, interior = (self.rng.integers(0, 2, rank).tolist() for _ in range(3))
        attrs = dict(low=low, high=high, interior=interior)
        self.emit("pad", [x, zero], max(self.bounds[x], 1.0), **attrs)

    def reduction(self) -> None:
        x = self.pick(1, 2, 3, 4)
        if x is None:
            return
        rank = len(self.nodes[x].shape)
        axes = [a for a in range(rank) if self.rng.random() < 0.5]
        op = str(
            self.choose(["reduce_sum", "reduce_max", "reduce_min", "softmax", "cumsum", "rev"])
        )
        size, bound = int(np.prod(self.nodes[x].shape)), self.bounds[x]
        if op == "cumsum":
            self.emit(op, [x], bound * size, axis=int(self.rng.integers(rank)))
        elif op == "softmax":
            self.emit(op, [x], 1.0, axes=mask_of(tuple(axes or [rank - 1])))
        else:
            bound = bound * size if op == "reduce_sum" else bound
            self.emit(op, [x], bound, axes=mask_of(tuple(axes)))

    def dots(self) -> None:
        """One to three products that share an operand, on either side; batched in rank three."""
        x = self.pick(2, 3)
        if x is None:
            return
        shape = self.nodes[x].shape
        batch = shape[:-2]
        for _ in range(int(self.rng.integers(1, 4))):
            wide = int(self.choose(_SIZES))  # type: ignore[arg-type]
            if self.rng.random() < 0.75:
                y = self.weight_or_node((*batch, shape[-1], wide))
                args, dims = [x, y], (len(batch) + 1, len(batch))
            else:
                y = self.weight_or_node((*batch, wide, shape[-2]))
                args, dims = [y, x], (len(batch) + 1, len(batch))
            contracted = self.nodes[args[0]].shape[-1]
            self.emit(
                "dot",
                args,
                self.bounds[x] * self.bounds[y] * contracted,
                lhs_contract=pack_dims((dims[0],)),
                rhs_contract=pack_dims((dims[1],)),
                lhs_batch=pack_dims(tuple(range(len(batch)))),
                rhs_batch=pack_dims(tuple(range(len(batch)))),
                dtype=_F32,
            )

    def convs(self) -> None:
        """One to three convolutions of one operand, mostly NCHW, some grouped or strided."""
        x = self.pick(4)
        if x is None:
            return
        nchw = self.rng.random() < 0.8
        shape = self.nodes[x].shape
        channels = shape[1] if nchw else shape[3]
        kernel = int(self.choose([1, 1, 2, 3]))  # type: ignore[arg-type]
        stride, low = int(self.rng.integers(1, 3)), int(self.rng.integers(0, 2))
        groups = int(self.choose([1, 1, *[g for g in (2, 3) if channels % g == 0]]))  # type: ignore[arg-type]
        for _ in range(int(self.rng.integers(1, 4))):
            out, inside = groups * int(self.rng.integers(1, 4)), channels // groups
            oihw = (out, inside, kernel, kernel)
            y = self.weight_or_node(oihw if nchw else (kernel, kernel, inside, out))
            self.emit(
                "conv",
                [x, y],
                self.bounds[x] * self.bounds[y] * inside * kernel**2,
                stride=(stride, stride),
                low=(low, low),
                high=(low, low),
                groups=groups,
                lhs_layout=_NCHW if nchw else _NHWC,
                rhs_layout=_OIHW if nchw else _HWIO,
                out_layout=_NCHW if nchw else _NHWC,
                dtype=_F32,
            )

    def pooling(self) -> None:
        x = self.pick(4)
        if x is not None:
            op = str(self.choose(["window_sum", "window_max", "window_min"]))
            size, stride = int(self.rng.integers(1, 4)), int(self.rng.integers(1, 3))
            bound = self.bounds[x] * size**2
            attrs = dict(window=(1, 1, size, size), stride=(1, 1, stride, stride))
            self.emit(op, [x], bound, **attrs)

    def selection(self) -> None:
        x = self.pick()
        if x is None:
            return
        zero = self.source("const", (), value=0.0)
        test = self.emit(str(self.choose(["gt", "eq", "le"])), [x, zero], 1.0)
        if test is None:
            return
        if self.rng.random() < 0.4:
            self.emit("cast", [test], 1.0, dtype=_F32)
        else:
            y = self.weight_or_node(self.nodes[x].shape)
            self.emit("select", [test, x, y], max(self.bounds[x], self.bounds[y]))


_STEPS: tuple[tuple[str, int], ...] = (
    ("unary", 4),
    ("binary", 6),
    ("safe_division", 1),
    ("bias", 3),
    ("transpose", 3),
    ("reshape", 3),
    ("concat", 2),
    ("slices", 2),
    ("pad", 1),
    ("reduction", 2),
    ("dots", 4),
    ("convs", 4),
    ("pooling", 1),
    ("selection", 1),
)


def random_graph(
    rng: np.random.Generator,
    n_nodes: int = 24,
    *,
    max_outputs: int = 8,
    steps: Sequence[str] | None = None,
) -> tuple[list[Node], tuple[int, ...]]:
    """About `n_nodes` nodes in topological order, all of them live, and the outputs.

    Outputs are nodes that nothing reads, the deepest `max_outputs` of them. Inputs and weights are
    numbered together: `ref` is the position among the arguments.

    Args:
      steps: which kinds of step to take (names of `_Maker`'s methods); all by default.
    """
    maker = _Maker(rng)
    for op, shape in (("input", (4, 6)), ("input", (2, 4, 6, 6)), ("input", (2, 3, 4))):
        maker.source(op, shape)
    table = [(name, weight) for name, weight in _STEPS if steps is None or name in steps]
    chances = np.asarray([w for _, w in table], float)
    chances /= chances.sum()
    while len(maker.nodes) < n_nodes:
        getattr(maker, table[int(rng.choice(len(table), p=chances))][0])()
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
    n_nodes: int = 24, *, steps: Sequence[str] | None = None
) -> st.SearchStrategy[tuple[list[Node], tuple[int, ...]]]:
    """`random_graph` as a hypothesis strategy over its seed."""
    seeds = st.integers(0, 2**32 - 1)
    return seeds.map(lambda s: random_graph(np.random.default_rng(s), n_nodes, steps=steps))


def shuffled(
    rng: np.random.Generator, nodes: Sequence[Node], outputs: Sequence[int]
) -> tuple[list[Node], tuple[int, ...]]:
    """The same graph with its nodes in another topological order."""
    left, done = list(range(len(nodes))), {}
    while left:
        ready = [i for i in left if all(a in done for a in nodes[i].args)]
        i = ready[int(rng.integers(len(ready)))]
        left.remove(i)
        done[i] = len(done)
    order = sorted(done, key=done.__getitem__)
    moved = [replace(nodes[i], args=tuple(done[a] for a in nodes[i].args)) for i in order]
    return moved, tuple(done[o] for o in outputs)
