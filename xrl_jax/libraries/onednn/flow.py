"""Shared parts of the generated code for products: strips that may have fewer columns than they
have room for, and the innermost loop of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from xrl_jax.libraries.onednn.code import ELEMENTS, FMA, INTEGERS, VECTOR, WIDTH, Code

STRIP = WIDTH  # columns of a right operand that are stored together, row by row
TILE = {8: 6, 16: 12}  # rows of results in registers, by the elements of a register
UNROLLED = 4  # terms of a sum in one iteration


class Tiled:
    """A product whose results are computed in tiles: some rows of a strip at a time."""

    rows: int
    n: int

    @property
    def strips(self) -> int:
        return -(-self.n // STRIP)

    @property
    def tile(self) -> int:
        """Rows of results computed at a time; the last tile may have fewer."""
        raise NotImplementedError

    @property
    def tiles(self) -> int:
        return -(-self.rows // self.tile)

    @property
    def shares_rows(self) -> bool:
        """Whether threads share the tiles; else they share the strips, which are more."""
        return self.tiles >= self.strips


class LeftTile(NamedTuple):
    """A tile of a product's left operand: its address, and the strides in elements from one row to
    the next (`across`) and from one term to the next (`along`).
    """

    start: str
    across: int
    along: int


class StripMask(NamedTuple):
    """Whether all columns of a strip exist, and the mask of those that do."""

    is_whole: str
    mask: str


class Flow(Code):
    """A builder for functions that compute products."""

    def strip_mask(self, columns: int, first: str) -> StripMask | None:
        """Return which columns of the strip from `first` on exist; None if every strip is whole."""
        if columns % STRIP == 0:
            return None
        left = self.add(f"sub i64 {columns}, {first}")
        is_whole = self.add(f"icmp sge i64 {left}, {STRIP}")
        each = self.splat(self.add(f"trunc i64 {left} to i32"), "i32")
        numbers = ", ".join(f"i32 {i}" for i in range(WIDTH))
        return StripMask(is_whole, self.add(f"icmp slt {INTEGERS} <{numbers}>, {each}"))

    def store_masked(
        self, name: str, stores: Sequence[tuple[str, str]], strip_mask: StripMask | None
    ) -> None:
        """Store vectors, each to its address, as far as the strip's columns exist. A whole strip is
        stored without masks, because masked stores are slow on some processors.
        """
        if strip_mask is not None:
            self.raw(f"  br i1 {strip_mask.is_whole}, label %{name}_whole, label %{name}_cut")
            self.raw(f"{name}_cut:")
            for x, at in stores:
                self.store(x, at, strip_mask.mask)
            self.raw(f"  br label %{name}_stored\n{name}_whole:")
        for x, at in stores:
            self.store(x, at)
        if strip_mask is not None:
            self.raw(f"  br label %{name}_stored\n{name}_stored:")
            self.block = f"{name}_stored"

    def copy_transposed(
        self, name: str, what: LeftTile, rows: int, terms: str, to: str, spacing: int
    ) -> None:
        """Copy rows such that the elements of a term are adjacent, and terms are `spacing` elements
        apart.
        """
        with self.loop(name, "0", terms) as k:
            source = self.at(what.start, self.add(f"mul i64 {k}, {what.along}"))
            target = self.at(to, self.add(f"mul i64 {k}, {spacing}"))
            together = rows // WIDTH * WIDTH if what.across == 1 else 0
            for r in range(0, together, WIDTH):
                self.store(self.load(self.at(source, str(r))), self.at(target, str(r)))
            for r in range(together, rows):
                x = self.add(f"load float, ptr {self.at(source, str(r * what.across))}, align 4")
                self.raw(f"  store float {x}, ptr {self.at(target, str(r))}, align 4")

    def summed(
        self,
        name: str,
        sums: list[str],
        left: LeftTile,
        strip: str,
        terms: tuple[str, int],
        ahead: int = 0,
        right: str = "float32",
    ) -> list[str]:
        """Return sums, a vector for each row of a tile, with the products of the terms added.

        Args:
          name: label of the loop.
          left: the tile of the left operand.
          strip: the address of the right operand's strip.
          terms: their number; and an integer, a multiple of `UNROLLED` only where their number is.
          ahead: distance in elements to the data to prefetch; 0 for no prefetching.
          right: type of the right operand's elements.
        """

        def iteration(step: int, k: str, sums: Sequence[str]) -> list[str]:
            kind = ELEMENTS[right]
            line = self.at(strip, self.add(f"mul i64 {k}, {STRIP}"), kind)
            factors = self.at(left.start, self.add(f"mul i64 {k}, {left.along}"))
            latest = list(sums)
            for u in range(step):
                w = self.load_widened(self.at(line, str(u * STRIP), kind), right)
                if ahead:  # for reading, into the L2 cache
                    soon = self.at(line, str(ahead + u * STRIP), kind)
                    self.raw(f"  call void @llvm.prefetch.p0(ptr {soon}, i32 0, i32 2, i32 1)")
                for r, total in enumerate(latest):
                    x = self.load_one(self.at(factors, str(u * left.along + r * left.across)))
                    latest[r] = self.add(f"{FMA}({VECTOR} {w}, {VECTOR} {x}, {VECTOR} {total})")
            return latest

        count, multiple = terms
        most = self.add(f"and i64 {count}, {-UNROLLED}")
        step = str(UNROLLED)
        sums = self.carried(f"{name}_most", "0", most, step, sums, partial(iteration, UNROLLED))
        if multiple % UNROLLED:
            sums = self.carried(f"{name}_rest", most, count, "1", sums, partial(iteration, 1))
        return sums
