"""Arrays as strided views of other arrays: which element of a flat array is at an index.

Transposes, reshapes, slices and broadcasts move no data where the kernel that reads the result can
compute addresses itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """A part of an axis: `size` indices, `stride` elements apart; a broadcast has stride 0."""

    size: int
    stride: int


Axis = tuple[Piece, ...]  # the major piece first; () for a size of 1


@dataclass(frozen=True)
class View:
    """An array whose elements are those of a flat array at `start` + index * stride.

    Attributes:
      axes: the pieces of every axis.
      start: position of the first element.
    """

    axes: tuple[Axis, ...]
    start: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(size_of(axis) for axis in self.axes)


def row_major(shape: Sequence[int]) -> View:
    """Return a row-major array as a view of itself."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return View(tuple(_axis([Piece(*p)]) for p in zip(shape, strides, strict=True)))


def size_of(axis: Axis) -> int:
    """Return the size of an axis."""
    return math.prod(p.size for p in axis)


def _axis(pieces: Sequence[Piece]) -> Axis:
    """Return an axis with pieces joined where one continues another."""
    found: list[Piece] = []
    for piece in pieces:
        if piece.size == 1:
            continue
        if found and found[-1].stride == piece.stride * piece.size:
            found[-1] = Piece(found[-1].size * piece.size, piece.stride)
        else:
            found.append(piece)
    return tuple(found)


def joined(axes: Sequence[Axis]) -> Axis:
    """Return several axes, the major one first, as one axis."""
    return _axis([p for axis in axes for p in axis])


def viewed(view: View, equation: Any) -> View | None:
    """Return the view that an equation of a jaxpr makes of its operand's; None if it moves data."""
    name, params = equation.primitive.name, equation.params
    shape = equation.outvars[0].aval.shape
    if name in ("squeeze", "expand_dims") or (name == "reshape" and params["dimensions"] is None):
        return _reshaped(view, shape)
    if name == "transpose":
        return replace(view, axes=tuple(view.axes[d] for d in params["permutation"]))
    if name == "broadcast_in_dim":
        axes: list[Axis] = [_axis([Piece(n, 0)]) for n in shape]
        for d, axis in zip(params["broadcast_dimensions"], view.axes, strict=True):
            if size_of(axis) == shape[d]:
                axes[d] = axis
        return replace(view, axes=tuple(axes))
    if name == "slice":
        return _sliced(view, params["start_indices"], shape, params["strides"])
    return None


def moved(view: View, equations: Sequence[Any]) -> View | None:
    """Return the view that several equations make, each of the result of the one before; None if
    one of them moves data.
    """
    after: View | None = view
    for equation in equations:
        after = None if after is None else viewed(after, equation)
    return after


def broadcast(view: View, shape: Sequence[int]) -> View:
    """Return the view with its axes of size 1 repeated to a shape."""
    sizes = zip(view.axes, shape, strict=True)
    return replace(view, axes=tuple(a if a else _axis([Piece(n, 0)]) for a, n in sizes))


def _reshaped(view: View, shape: Sequence[int]) -> View | None:
    """Return the view in another shape; None if an axis would need pieces of an uneven size."""
    pieces = list(joined(view.axes))
    axes: list[Axis] = []
    for n in shape:
        taken: list[Piece] = []
        while n > 1:
            # Axes are filled from the major piece; a piece that is too large is split.
            size, stride = pieces.pop(0)
            if size > n:
                if size % n:
                    return None
                pieces.insert(0, Piece(size // n, stride))
                size, stride = n, stride * (size // n)
            if n % size:
                return None
            taken.append(Piece(size, stride))
            n //= size
        axes.append(_axis(taken))
    return replace(view, axes=tuple(axes))


def _sliced(
    view: View, starts: Sequence[int], shape: Sequence[int], strides: Sequence[int] | None
) -> View | None:
    axes, start = [], view.start
    steps = strides or itertools.repeat(1)
    for axis, first, size, step in zip(view.axes, starts, shape, steps, strict=False):
        if size == size_of(axis):
            axes.append(axis)
            continue
        inner = math.prod(p.size for p in axis[1:])
        if len(axis) > 1 and (first % inner or size % inner or step != 1):
            return None
        stride, *_ = (p.stride for p in axis)  # an axis that is cut has more than one element
        start += first // inner * stride
        axes.append(_axis([Piece(size // inner, stride * step), *axis[1:]]))
    return View(tuple(axes), start)


def offset(axes: Sequence[Axis], indices: Sequence[Any]) -> Any:
    """Return the position of elements relative to the first one.

    Args:
      indices: integers or integer arrays, one for each axis; they are broadcast.
    """
    total: Any = 0
    for axis, index in zip(axes, indices, strict=True):
        inner = size_of(axis)
        for n, piece in enumerate(axis):
            inner //= piece.size
            own = index // inner if inner > 1 else index
            own = own % piece.size if n else own
            total = total + own * piece.stride if piece.stride else total
    return total
