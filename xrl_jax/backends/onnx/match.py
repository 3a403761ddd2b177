"""Queries on a flat graph, used by the recognisers in `patterns`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from xrl_jax.backends.onnx.flat import Flat, uniform_value, without_repeats

CLOSE = 1e-6  # relative tolerance of float32 constants against the exact value


@dataclass(frozen=True)
class View:
    """An operation as broadcast to a larger array.

    `axes` maps each axis of the operation to one of the array, or to None for axes of size 1.
    """

    op: int
    axes: tuple[int | None, ...]


def consumers_of(flat: Flat) -> list[list[int]]:
    """Return each operation's users, except dead ones; -1 stands for a graph output."""
    consumers: list[list[int]] = [[] for _ in flat.ops]
    for o in flat.outputs:
        consumers[o].append(-1)
    for i in range(len(flat.ops) - 1, -1, -1):
        if consumers[i]:
            for a in flat.ops[i].args:
                consumers[a].append(i)
    return consumers


class Matcher:
    """Queries on a graph that several recognisers share."""

    def __init__(self, flat: Flat) -> None:
        self.ops = flat.ops
        self.uses = [len(c) for c in consumers_of(flat)]

    def uniform_value(self, index: int) -> float | None:
        """Return the scalar that all elements of a constant equal, else None."""
        return uniform_value(self.ops[index])

    def full_view(self, index: int) -> View:
        return View(index, tuple(range(len(self.ops[index].shape))))

    def strip_broadcasts(self, view: View) -> View:
        """Return the view below broadcasts and reshapes that only add or remove axes of size 1."""
        while True:
            op = self.ops[view.op]
            if op.name not in ("broadcast", "reshape"):
                return view
            inner = self.ops[op.args[0]].shape
            if op.name == "broadcast":
                dims = op.node.dims("dims", len(inner))
                axes = [view.axes[d] if n != 1 else None for d, n in zip(dims, inner, strict=True)]
            else:
                if [n for n in op.shape if n != 1] != [n for n in inner if n != 1]:
                    return view
                wide = iter([a for a, n in zip(view.axes, op.shape, strict=True) if n != 1])
                axes = [None if n == 1 else next(wide) for n in inner]
            view = View(op.args[0], tuple(axes))

    def args(self, view: View) -> list[View]:
        """Return the arguments of an elementwise operation as views, with its axes or scalar."""
        args = self.ops[view.op].args
        return [View(a, view.axes if self.ops[a].shape else ()) for a in args]

    def with_constant(self, view: View, *names: str) -> tuple[View, float] | None:
        """Return (other argument, scalar) of an operation in `names` with a uniform constant.

        The constant of a subtraction or division must be its second argument.
        """
        op = self.ops[view.op]
        if op.name not in names:
            return None
        first, second = self.args(view)
        number = self.uniform_value(second.op)
        if number is not None:
            return first, number
        number = self.uniform_value(first.op)
        if number is None or op.name in ("sub", "div"):
            return None
        return second, number

    def reduction(self, view: View, name: str) -> tuple[int, tuple[int, ...]] | None:
        """Return (x, axes) if the view is that reduction of x, with x's other axes in place."""
        view = self.strip_broadcasts(view)
        op = self.ops[view.op]
        if op.name != name:
            return None
        kept = [d for d in range(len(self.ops[op.args[0]].shape)) if d not in op.node.axes]
        if all(place in (None, d) for place, d in zip(view.axes, kept, strict=True)):
            return op.args[0], op.node.axes
        return None

    def mean(self, view: View) -> tuple[int, tuple[int, ...]] | None:
        """Return (x, axes) if the view is the mean of x over some axes."""
        view = self.strip_broadcasts(view)
        divided = self.with_constant(view, "div", "mul")
        found = self.reduction(divided[0], "reduce_sum") if divided else None
        if divided is None or found is None:
            return None
        count = math.prod(self.ops[found[0]].shape[d] for d in found[1])
        number = divided[1] if self.ops[view.op].name == "div" else 1 / (divided[1] or math.nan)
        return found if math.isclose(number, count, rel_tol=CLOSE) else None

    def squared(self, index: int) -> int | None:
        op = self.ops[index]
        if op.name == "square" or (
            op.name == "integer_pow" and op.node.scalar_attr("exponent") == 2
        ):
            return op.args[0]
        return op.args[0] if op.name == "mul" and op.args[0] == op.args[1] else None

    def deviation(self, index: int) -> tuple[int, tuple[int, ...]] | None:
        """Return (x, axes) if the operation is x minus its mean."""
        op = self.ops[index]
        if op.name != "sub":
            return None
        found = self.mean(View(op.args[1], tuple(range(len(op.shape)))))
        return found if found and found[0] == op.args[0] else None

    def variance(self, view: View) -> tuple[int, tuple[int, ...]] | None:
        """Return (x, axes) if the view is mean((x - mean x)^2) or mean x^2 - (mean x)^2."""
        found = self.mean(view)
        if found is not None:
            inner = self.squared(found[0])
            deviation = None if inner is None else self.deviation(inner)
            return deviation if deviation and deviation[1] == found[1] else None
        view = self.strip_broadcasts(view)
        positive = self.with_constant(view, "max")
        if positive and positive[1] == 0:
            view = self.strip_broadcasts(positive[0])
        if self.ops[view.op].name != "sub":
            return None
        left, right = (self.strip_broadcasts(v) for v in self.args(view))
        of_squares, square = self.mean(left), self.squared(right.op)
        x = None if of_squares is None else self.squared(of_squares[0])
        of_x = None if square is None else self.mean(View(square, right.axes))
        return of_x if of_x and of_squares and of_x == (x, of_squares[1]) else None

    def factors(self, view: View, stop: int = -1, depth: int = 6) -> list[tuple[View, int]]:
        """Return the factors of a product with exponent 1, and divisors with exponent -1; `stop` is
        not decomposed.
        """
        if view.op != stop and depth:
            inner = self.strip_broadcasts(view)
            name = self.ops[inner.op].name
            if inner.op != stop and name in ("mul", "div"):
                left, right = self.args(inner)
                rest = [(right, -1)] if name == "div" else self.factors(right, stop, depth - 1)
                return [*self.factors(left, stop, depth - 1), *rest]
        return [(view, 1)]

    def constant(self, view: View, rank: int) -> np.ndarray | None:
        """Return a constant as an array of that rank, with size 1 along axes where it repeats."""
        value = self.ops[view.op].value
        if value is None:
            return None
        small = without_repeats(value)
        wide = [a for a, n in zip(view.axes, small.shape, strict=True) if n != 1 and a is not None]
        if wide != sorted(wide):
            return None
        shape = [1] * rank
        for a, n in zip(view.axes, small.shape, strict=True):
            if a is not None:
                shape[a] = n
        return small.reshape(shape)

    def chain_of(self, index: int) -> list[tuple[int, float]]:
        """Return (x, k) for every x such that the operation is k * x by products with scalars."""
        view, factor = self.full_view(index), 1.0
        found = [(index, factor)]
        while True:
            op = self.ops[view.op]
            step = self.with_constant(view, "mul", "div")
            if op.name == "neg":
                view, factor = View(op.args[0], view.axes), -factor
            elif step and step[1]:
                factor = factor * step[1] if op.name == "mul" else factor / step[1]
                view = step[0]
            else:
                return found
            found.append((view.op, factor))
