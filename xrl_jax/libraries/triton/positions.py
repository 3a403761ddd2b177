"""Where a program of the kernel is: the numbers of its rows, columns and features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xrl_jax.libraries.triton import strided
from xrl_jax.libraries.triton.strided import Axis, Piece


class Numbers:
    """Consecutive numbers along one side of a tile.

    Args:
      first: the first of them.
      count: how many, a power of two.
      size: of the axis they are along; those from `size` on do not exist.
      side: 0 for [count, 1], 1 for [1, count].
      padded: whether some may not exist.
    """

    def __init__(self, first: Any, count: int, size: int, side: int, *, padded: bool) -> None:
        shape = (count, 1) if side == 0 else (1, count)
        self.values = first + lax.broadcasted_iota(jnp.int32, shape, side)
        self.exist = self.values < size if padded else None


class Space:
    """The positions in a flat array, of which each program of a kernel computes a tile.

    Args:
      axes: the size of every axis and the numbers along it that are in the tile, major axis first.
    """

    def __init__(self, *axes: tuple[int, Any]) -> None:
        self._axes = axes

    def along(self, axis: Axis) -> Any:
        """Return the numbers along an axis whose pieces are positions in the array."""
        total: Any = 0
        inner = strided.size_of(axis)
        for piece in axis:
            inner //= piece.size
            total = total + self._number(piece) * inner if piece.stride else total
        return total

    def place(self, axes: Sequence[Axis]) -> Any:
        """Return the positions in a row-major array with these axes."""
        total: Any = 0
        for axis in axes:
            total = total * strided.size_of(axis) + self.along(axis)
        return total

    def _number(self, piece: Piece) -> Any:
        """Return the numbers along a piece, which may extend over several axes of the array."""
        total: Any = 0
        (size, stride), below, unit = piece, 1, 1
        for count, numbers in reversed(self._axes):
            step = stride // unit
            if size > 1 and 1 <= step < count:
                part = min(size, count // step)
                own = numbers // step if step > 1 else numbers
                total = total + (own % part if step * part < count else own) * below
                size, stride, below = size // part, unit * count, below * part
            unit *= count
        return total


def both(*masks: jax.Array | None) -> jax.Array | None:
    """Return where all masks hold; None for everywhere."""
    there = [m for m in masks if m is not None]
    return None if not there else there[0] if len(there) == 1 else there[0] & there[1]


def digits(flat: Any, sizes: Sequence[int]) -> list[Any]:
    """Return flat indices over several axes as indices along each."""
    found, inner = [], 1
    for n, size in reversed(list(enumerate(sizes))):
        own = flat // inner if inner > 1 else flat
        found.append(own % size if n else own)
        inner *= size
    return found[::-1]
