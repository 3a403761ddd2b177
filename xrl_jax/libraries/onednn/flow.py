"""What products of ours are written with, as LLVM's intermediate language: loops, addresses,
vectors that may be cut, and the innermost loop of a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from xrl_jax.libraries.onednn.curves import FMA, VECTOR, WIDTH, Code

STRIP = WIDTH  # columns of a right operand that lie together, row by row
TILE = {8: 6, 16: 12}  # rows of results in registers, by how many numbers a register has
UNROLLED = 4  # terms of a sum
PREFETCH = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)\n"


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
    """Lines of a function with loops."""

    def at(self, base: str, index: str) -> str:
        """The address of an array's element."""
        return self.add(f"getelementptr float, ptr {base}, i64 {index}")

    def least(self, a: str, b: str) -> str:
        less = self.add(f"icmp slt i64 {a}, {b}")
        return self.add(f"select i1 {less}, i64 {a}, i64 {b}")

    def largest(self, a: str, b: str) -> str:
        more = self.add(f"icmp sgt i64 {a}, {b}")
        return self.add(f"select i1 {more}, i64 {a}, i64 {b}")

    def ceiling(self, a: str, b: str) -> str:
        """a / b, rounded up."""
        less = self.add(f"sub i64 {b}, 1")
        return self.add(f"sdiv i64 {self.add(f'add i64 {a}, {less}')}, {b}")

    @contextmanager
    def loop(self, name: str, start: str, end: str, step: str) -> Iterator[str]:
        """A loop around what is written in the block; gives the name of its variable."""
        before, i = self.block, f"%{name}_i"
        self.raw(f"  br label %{name}\n{name}:")
        head = len(self.lines)
        self.raw("")  # the variable, once the block that goes round is known
        self.raw(f"  %{name}_more = icmp slt i64 {i}, {end}")
        self.raw(f"  br i1 %{name}_more, label %{name}_body, label %{name}_end\n{name}_body:")
        self.block = f"{name}_body"
        yield i
        self.lines[head] = f"  {i} = phi i64 [{start}, %{before}], [{i}_next, %{self.block}]"
        self.raw(f"  {i}_next = add i64 {i}, {step}\n  br label %{name}\n{name}_end:")
        self.block = f"{name}_end"

    @contextmanager
    def only_if(self, name: str, test: str) -> Iterator[None]:
        """What is written in the block is done where the test holds."""
        self.raw(f"  br i1 {test}, label %{name}_do, label %{name}_done\n{name}_do:")
        self.block = f"{name}_do"
        yield
        self.raw(f"  br label %{name}_done\n{name}_done:")
        self.block = f"{name}_done"

    # --- vectors of a strip whose columns may not all be there ---

    def cut(self, columns: int, first: str) -> Cut | None:
        """What is there of the strip that begins with this column; None if every strip is whole."""
        if columns % STRIP == 0:
            return None
        left = self.add(f"sub i64 {columns}, {first}")
        is_whole = self.add(f"icmp sge i64 {left}, {STRIP}")
        number = self.add(f"trunc i64 {left} to i32")
        one = self.add(f"insertelement <{WIDTH} x i32> poison, i32 {number}, i64 0")
        zeros = f"<{WIDTH} x i32> zeroinitializer"
        each = self.add(f"shufflevector <{WIDTH} x i32> {one}, <{WIDTH} x i32> poison, {zeros}")
        numbers = ", ".join(f"i32 {i}" for i in range(WIDTH))
        return Cut(is_whole, self.add(f"icmp slt <{WIDTH} x i32> <{numbers}>, {each}"))

    def load_cut(self, at: str, cut: Cut | None) -> str:
        """The numbers that are there, and zeros."""
        if cut is None:
            return self.load(at, None)
        return self.add(
            f"call {VECTOR} @llvm.masked.load.v{WIDTH}f32.p0(ptr {at}, i32 4, "
            f"<{WIDTH} x i1> {cut.mask}, {VECTOR} zeroinitializer)"
        )

    def store_cut(self, name: str, stores: Sequence[tuple[str, str]], cut: Cut | None) -> None:
        """Vectors, each to its address, as far as they are there. Masks are left out where they
        need not be: some processors take long to store with one.
        """
        if cut is not None:
            self.raw(f"  br i1 {cut.is_whole}, label %{name}_whole, label %{name}_cut")
            self.raw(f"{name}_cut:")
            for x, at in stores:
                self.raw(
                    f"  call void @llvm.masked.store.v{WIDTH}f32.p0({VECTOR} {x}, ptr {at}, i32 4, "
                    f"<{WIDTH} x i1> {cut.mask})"
                )
            self.raw(f"  br label %{name}_stored\n{name}_whole:")
        for x, at in stores:
            self.store(x, at, None)
        if cut is not None:
            self.raw(f"  br label %{name}_stored\n{name}_stored:")
            self.block = f"{name}_stored"

    # --- products ---

    def copy_turned(self, name: str, what: Left, rows: int, terms: str, to: str, room: int) -> None:
        """Rows such that those of a term lie one after the other, `room` numbers for each term."""
        with self.loop(name, "0", terms, "1") as k:
            source = self.at(what.start, self.add(f"mul i64 {k}, {what.along}"))
            target = self.at(to, self.add(f"mul i64 {k}, {room}"))
            together = rows // WIDTH * WIDTH if what.across == 1 else 0
            for r in range(0, together, WIDTH):
                x = self.load(self.at(source, str(r)), None)
                self.store(x, self.at(target, str(r)), None)
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
        count, multiple = terms
        most = self.add(f"and i64 {count}, {-UNROLLED}")
        sums = self._summed(f"{name}_most", sums, left, strip, ("0", most), UNROLLED, ahead)
        if multiple % UNROLLED:
            sums = self._summed(f"{name}_rest", sums, left, strip, (most, count), 1, ahead)
        return sums

    def _summed(
        self,
        name: str,
        sums: Sequence[str],
        left: Left,
        strip: str,
        terms: tuple[str, str],
        step: int,
        ahead: int,
    ) -> list[str]:
        before, now = self.block, f"%{name}_k"
        self.raw(f"  br label %{name}\n{name}:")
        self.raw(f"  {now} = phi i64 [{terms[0]}, %{before}], [{now}_next, %{name}_body]")
        names = [f"%{name}_sum{r}" for r in range(len(sums))]
        for x, own in zip(sums, names, strict=True):
            self.raw(f"  {own} = phi {VECTOR} [{x}, %{before}], [{own}_next, %{name}_body]")
        self.raw(f"  %{name}_more = icmp slt i64 {now}, {terms[1]}")
        self.raw(f"  br i1 %{name}_more, label %{name}_body, label %{name}_end\n{name}_body:")
        line = self.at(strip, self.add(f"mul i64 {now}, {STRIP}"))
        factors = self.at(left.start, self.add(f"mul i64 {now}, {left.along}"))
        latest = list(names)
        for u in range(step):
            w = self.load(self.at(line, str(u * STRIP)), None)
            if ahead:  # for reading, into the second cache
                soon = self.at(line, str(ahead + u * STRIP))
                self.raw(f"  call void @llvm.prefetch.p0(ptr {soon}, i32 0, i32 2, i32 1)")
            for r, own in enumerate(names):
                x = self.load_one(self.at(factors, str(u * left.along + r * left.across)))
                made = f"{own}_next" if u == step - 1 else f"{own}_{u}"
                self.raw(f"  {made} = {FMA}({VECTOR} {w}, {VECTOR} {x}, {VECTOR} {latest[r]})")
                latest[r] = made
        self.raw(f"  {now}_next = add i64 {now}, {step}\n  br label %{name}\n{name}_end:")
        self.block = f"{name}_end"
        return names
