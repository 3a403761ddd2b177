"""LLVM IR for the transforms before and after the products of `winograd`.

`Tiles` transforms an image to tiles, `Results` the products of tiles to an image. One thread
processes a tile, `WIDTH` features at a time. Images and results are row-major.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xrl_jax.libraries.onednn import curves
from xrl_jax.libraries.onednn.code import FMA, VECTOR, WIDE, WIDTH, Code, constant, first
from xrl_jax.libraries.onednn.machine_code import SMALL, Kernel
from xrl_jax.libraries.onednn.spec import Epilogue, Shape
from xrl_jax.libraries.onednn.winograd import KERNEL, matrices


@dataclass(frozen=True)
class Tiled:
    """An image and the tiles over it.

    Attributes:
      m: number of results in a tile along each axis.
      image: shape [N, height, width, features].
      tiles: numbers of tiles along the height and the width.
    """

    m: int
    image: Shape
    tiles: tuple[int, int]

    @property
    def n(self) -> int:
        """Number of tiles in all."""
        return self.image[0] * self.tiles[0] * self.tiles[1]

    @property
    def a(self) -> int:
        """Number of elements of a tile along each axis."""
        return self.m + KERNEL - 1

    @property
    def shape(self) -> Shape:
        """Shape [a * a, tiles, features] of the array that the products take or give."""
        return self.a**2, self.n, self.image[3]

    # --- parts of the generated code ---

    def _function(self, out: Code, name: str, n_arrays: int, work: Callable[[str], None]) -> str:
        """Return the definition of `name`(table, first tile, tile after the last).

        `work` writes the code for one tile, given its index. The code may read zeros from
        `%nothing`, or write unwanted values there.
        """
        padded = -(-self.image[3] // WIDTH) * WIDTH
        with out.function(f"void @{name}(ptr %table, i64 %from, i64 %to) {WIDE}", n_arrays):
            out.raw(f"  %nothing = alloca [{padded} x float], align 64")
            out.raw(f"  call void @llvm.memset.p0.i64(ptr %nothing, i8 0, i64 {4 * padded}, i1 0)")
            with out.loop("tile", "%from", "%to") as tile:
                work(tile)
        return out.text

    def _pixels(
        self, out: Code, tile: str, base: str, size: int, low: tuple[int, int] = (0, 0)
    ) -> list[list[str]]:
        """Return the addresses of the features of size x size pixels of the tile.

        Pixels outside the image have the address `%nothing`.
        """
        _, height, width, features = self.image
        x, row_of_tiles = (out.add(f"{op} i64 {tile}, {self.tiles[1]}") for op in ("urem", "udiv"))
        y, image = (out.add(f"{op} i64 {row_of_tiles}, {self.tiles[0]}") for op in ("urem", "udiv"))
        start_of_image = out.add(f"mul i64 {image}, {height * width * features}")
        axes = []
        for at, limit, step, before in (
            (y, height, width * features, low[0]),
            (x, width, features, low[1]),
        ):
            start = out.add(f"mul i64 {at}, {self.m}")
            each = []
            for k in range(size):
                index = out.add(f"add i64 {start}, {k - before}")
                is_in = out.add(f"icmp ult i64 {index}, {limit}")
                each.append((is_in, out.add(f"mul i64 {index}, {step}")))
            axes.append(each)
        found = []
        for row_in, row in axes[0]:
            line = out.add(f"add i64 {start_of_image}, {row}")
            places = []
            for column_in, column in axes[1]:
                number = out.add(f"add i64 {line}, {column}")
                place = out.at(base, number)
                is_in = out.add(f"and i1 {row_in}, {column_in}")
                places.append(out.add(f"select i1 {is_in}, ptr {place}, ptr %nothing"))
            found.append(places)
        return found

    def _elements(self, out: Code, tile: str, base: str) -> list[list[str]]:
        """Return the addresses of the features of the tile's elements in the array of `shape`."""
        own = out.add(f"mul i64 {tile}, {self.image[3]}")
        found = []
        for k in range(self.a**2):
            found.append(out.at(base, out.add(f"add i64 {own}, {k * self.n * self.image[3]}")))
        return [found[i : i + self.a] for i in range(0, len(found), self.a)]

    def _features(self, out: Code, work: Callable[[str, str | None], None]) -> None:
        """Call `work` with the first feature of each vector of `WIDTH` features.

        The mask, for a last vector that is not full, says which features exist.
        """
        features = self.image[3]
        whole = features // WIDTH * WIDTH
        if whole:
            with out.loop("features", "0", str(whole), str(WIDTH)) as c:
                work(c, None)
        if features > whole:
            work(str(whole), first(features - whole))


@dataclass(frozen=True)
class Tiles(Tiled):
    """Transform of an image, the argument, to tiles.

    Attributes:
      low: padding before the height and the width.
    """

    low: tuple[int, int]

    def text(self, name: str) -> str:
        """Return the definition of `name`(table, first tile, tile after the last)."""
        out, matrix = Code(), matrices(self.m).image

        def work(tile: str) -> None:
            pixels = self._pixels(out, tile, "%p0", self.a, self.low)
            elements = self._elements(out, tile, "%p1")

            def some_features(c: str, mask: str | None) -> None:
                d = [[_load(out, place, c, mask) for place in row] for row in pixels]
                made = _transposed(_sums(out, matrix, _transposed(_sums(out, matrix, d))))
                for places, values in zip(elements, made, strict=True):
                    for place, value in zip(places, values, strict=True):
                        out.store(value, out.at(place, c), mask)

            self._features(out, some_features)

        return self._function(out, name, 2, work)


@dataclass(frozen=True)
class Results(Tiled):
    """Transform of the tiles' products, the first argument, to an image.

    The operands of the epilogue are the other arguments.
    """

    after: Epilogue

    def text(self, name: str) -> str:
        """Return the definition of `name`(table, first tile, tile after the last)."""
        out, matrix, after = Code(), matrices(self.m).result, self.after
        last = 1 + after.bias + after.addend

        def work(tile: str) -> None:
            elements = self._elements(out, tile, "%p0")
            pixels = self._pixels(out, tile, f"%p{last}", self.m)
            addends = self._pixels(out, tile, f"%p{last - 1}", self.m) if after.addend else pixels

            def some_features(c: str, mask: str | None) -> None:
                y = [[_load(out, place, c, mask) for place in row] for row in elements]
                y = _transposed(_sums(out, matrix, _transposed(_sums(out, matrix, y))))
                bias = _load(out, "%p1", c, mask) if after.bias else None
                for values, places, more in zip(y, pixels, addends, strict=True):
                    for value, place, addend in zip(values, places, more, strict=True):
                        if bias is not None:
                            value = out.add(f"fadd {VECTOR} {value}, {bias}")
                        if after.addend:
                            other = _load(out, addend, c, mask)
                            value = out.add(f"fadd {VECTOR} {value}, {other}")
                        if after.clip is not None:
                            value = curves.clipped(out, after.clip, value)
                        out.store(value, out.at(place, c), mask)

            self._features(out, some_features)

        return self._function(out, name, last + 1, work)


def kernel_of(what: Tiles | Results, name: str) -> Kernel:
    """Return the kernel of a transform, whose parts are the tiles."""
    return Kernel(what.text(name), what.n, math.prod(what.shape) < SMALL)


def _load(out: Code, place: str, c: str, mask: str | None) -> str:
    return out.load(out.at(place, c), mask)


def _transposed(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _sums(
    out: Code, matrix: Sequence[Sequence[float]], rows: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Multiply the matrix by a matrix of vectors."""
    return [[_sum(out, factors, column) for column in _transposed(rows)] for factors in matrix]


def _sum(out: Code, factors: Sequence[float], values: Sequence[str]) -> str:
    """Sum the values, each multiplied by its factor; factors of 1 and -1 come first."""
    terms = [(f, v) for f, v in zip(factors, values, strict=True) if f]
    terms.sort(key=lambda term: (term[0] != 1, abs(term[0]) != 1))
    (factor, total), *rest = terms
    if factor != 1:
        total = out.add(f"fmul {VECTOR} {total}, {constant(factor)}")
    for factor, value in rest:
        if abs(factor) == 1:
            total = out.add(f"{'fadd' if factor > 0 else 'fsub'} {VECTOR} {total}, {value}")
        else:
            given = f"{VECTOR} {value}, {VECTOR} {constant(factor)}, {VECTOR} {total}"
            total = out.add(f"{FMA}({given})")
    return total
