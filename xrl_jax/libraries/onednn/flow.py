"""What products of ours are written with: strips whose columns may not all be there, and the
innermost loop of a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from xrl_jax.libraries.onednn.code import FMA, INTEGERS, VECTOR, WIDTH, Code

STRIP = WIDTH  # columns of a right operand that lie together, row by row
TILE = {8: 6, 16: 12}  # rows of results in registers, by how many numbers a register has
UNROLLED = 4  # terms of a sum


class Left(NamedTuple):
    """A tile of a product's left operand: where it begins, and how many numbers there are from one
    row to the next and from one term to the next.
    """

    start: str
    across: int
    along: int


class Cut(NamedTuple):
    """Whether all columns of a strip are there, and which."""

    is_whole: str
    mask: str


class Flow(Code):
    """Lines of a function of products."""

    def cut(self, columns: int, first: str) -> Cut | None:
        """What is there of the strip that begins with this column; None if every strip is whole."""
        if columns % STRIP == 0:
            return None
        left = self.add(f"sub i64 {columns}, {first}")
        is_whole = self.add(f"icmp sge i64 {left}, {STRIP}")
        each = self.spread(self.add(f"trunc i64 {left} to i32"), "i32")
        numbers = ", ".join(f"i32 {i}" for i in range(WIDTH))
        return Cut(is_whole, self.add(f"icmp slt {INTEGERS} <{numbers}>, {each}"))

    def store_cut(self, name: str, stores: Sequence[tuple[str, str]], cut: Cut | None) -> None:
        """Vectors, each to its address, as far as they are there. Masks are left out where they
        need not be: some processors take long to store with one.
        """
        if cut is not None:
            self.raw(f"  br i1 {cut.is_whole}, label %{name}_whole, label %{name}_cut")
            self.raw(f"{name}_cut:")
            for x, at in stores:
                self.store(x, at, cut.mask)
            self.raw(f"  br label %{name}_stored\n{name}_whole:")
        for x, at in stores:
            self.store(x, at)
        if cut is not None:
            self.raw(f"  br label %{name}_stored\n{name}_stored:")
            self.block = f"{name}_stored"

    def copy_turned(self, name: str, what: Left, rows: int, terms: str, to: str, room: int) -> None:
        """Rows such that those of a term lie one after the other, `room` numbers for each term."""
        with self.loop(name, "0", terms) as k:
            source = self.at(what.start, self.add(f"mul i64 {k}, {what.along}"))
            target = self.at(to, self.add(f"mul i64 {k}, {room}"))
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
        left: Left,
        strip: str,
        terms: tuple[str, int],
        ahead: int = 0,
    ) -> list[str]:
        """Sums, a vector for each row of a tile, with products of so many terms added.

        Args:
          name: of the loop.
          left: what is in the tile.
          strip: the address of the right operand's.
          terms: how many; and a number that this is a multiple of, or is itself.
          ahead: after so many numbers is what will be needed soon; 0 where nothing is to be said.
        """

        def turn(step: int, k: str, sums: Sequence[str]) -> list[str]:
            line = self.at(strip, self.add(f"mul i64 {k}, {STRIP}"))
            factors = self.at(left.start, self.add(f"mul i64 {k}, {left.along}"))
            latest = list(sums)
            for u in range(step):
                w = self.load(self.at(line, str(u * STRIP)))
                if ahead:  # for reading, into the second cache
                    soon = self.at(line, str(ahead + u * STRIP))
                    self.raw(f"  call void @llvm.prefetch.p0(ptr {soon}, i32 0, i32 2, i32 1)")
                for r, total in enumerate(latest):
                    x = self.load_one(self.at(factors, str(u * left.along + r * left.across)))
                    latest[r] = self.add(f"{FMA}({VECTOR} {w}, {VECTOR} {x}, {VECTOR} {total})")
            return latest

        count, multiple = terms
        most = self.add(f"and i64 {count}, {-UNROLLED}")
        step = str(UNROLLED)
        sums = self.carried(f"{name}_most", "0", most, step, sums, partial(turn, UNROLLED))
        if multiple % UNROLLED:
            sums = self.carried(f"{name}_rest", most, count, "1", sums, partial(turn, 1))
        return sums
