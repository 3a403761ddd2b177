"""Machine code for products of many rows with a weight, as LLVM's intermediate language.

The weight lies in strips of `STRIP` columns, as `stream` has it. Of a strip and `_DEPTH` of its
rows, which stay in the first cache, `_TILE` rows of results are made at a time, all in registers;
the rows of the left operand are copied first, so that a tile reads them one after the other and all
of them stay in the second cache.

Source: K. Goto and R. van de Geijn, Anatomy of High-Performance Matrix Multiplication (2008).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from xrl_jax.backends.dnnl import curves
from xrl_jax.backends.dnnl.curves import FMA, INTRINSICS, VECTOR, WIDTH, Code
from xrl_jax.backends.dnnl.machine_code import SMALL, WIDE, Parallel, shared_out
from xrl_jax.backends.dnnl.spec import Epilogue
from xrl_jax.backends.dnnl.stream import STRIP

_DEPTH = 256  # rows of a strip: 16 KiB
_MOST_TILES = 48  # whose rows are copied together: 288 KiB
_TILE = {8: 6, 16: 12}  # rows of results in registers, by how many numbers a register has
_UNROLLED = 4  # rows of a strip
_FEW_ROWS = 64  # whose products take little longer than the weight takes to come from memory
_SMALL_DEPTH = 64  # a product of so many terms is worth threads like a sum of `SMALL` numbers
_PREFETCH = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)\n"


@dataclass(frozen=True)
class Blocked:
    """[rows, k], or [k, rows] where that is stored `turned`, by [k, n], the weight in strips
    [strips, k, STRIP] of which the last may have fewer columns than it has room for; then a bias
    [n] and an addend [rows, n].

    Attributes:
      lanes: numbers in a register.
    """

    rows: int
    k: int
    n: int
    turned: bool
    after: Epilogue
    lanes: int

    @property
    def strips(self) -> int:
        return -(-self.n // STRIP)

    @property
    def tile(self) -> int:
        """Rows of results that are made at a time; the last tile may have fewer."""
        return min(_TILE[self.lanes], self.rows)

    @property
    def tiles(self) -> int:
        return -(-self.rows // self.tile)

    @property
    def depth(self) -> int:
        return min(_DEPTH, self.k)

    @property
    def shares_rows(self) -> bool:
        """Whether threads share the tiles, else the strips: what there is more of."""
        return self.tiles >= self.strips

    @property
    def last(self) -> int:
        """The number of the result among the arguments."""
        return 2 + self.after.bias + self.after.addend


def code_of(what: Blocked, name: str, parallel: Parallel | None) -> str:
    """A module with the function `name`(table): all of it, with the addresses of the arguments and
    of the result in the table.
    """
    few = what.rows * what.k * what.n < SMALL * _SMALL_DEPTH
    shared = what.tiles if what.shares_rows else what.strips
    body = _Function(what).text(f"{name}_rows")
    return INTRINSICS + _PREFETCH + body + shared_out(name, shared, None if few else parallel)


class _Function:
    """The function for some of the tiles, or of the strips."""

    def __init__(self, what: Blocked) -> None:
        self.what = what
        self.out = Code()
        self.is_cut = what.n % STRIP != 0
        self.full, self.left = divmod(what.rows, what.tile)  # tiles, and rows of the last

    def text(self, name: str) -> str:
        """The definition of `name`(table, first, after the last)."""
        what, out = self.what, self.out
        out.raw(f"define void @{name}(ptr %table, i64 %from, i64 %to) {WIDE} {{\nentry:")
        for i in range(what.last + 1):
            out.raw(f"  %p{i}_at = getelementptr ptr, ptr %table, i64 {i}")
            out.raw(f"  %p{i} = load ptr, ptr %p{i}_at")
        size = min(_MOST_TILES, what.tiles) * what.depth * what.tile
        out.raw(f"  %copies = alloca [{size} x float], align 64")
        out.raw(f"  %nothing = alloca {VECTOR}, align 64")
        out.raw(f"  store {VECTOR} zeroinitializer, ptr %nothing")
        shared = ("%from", "%to")
        tiles = shared if what.shares_rows else ("0", str(what.tiles))
        strips = ("0", str(what.strips)) if what.shares_rows else shared
        # As many tiles together as fit, the same number each time.
        span = out.add(f"sub i64 {tiles[1]}, {tiles[0]}")
        groups = self._ceiling(span, str(_MOST_TILES))
        step = self._ceiling(span, self._largest(groups, "1"))
        with self._loop("group", tiles[0], tiles[1], self._largest(step, "1")) as first:
            end = self._least(out.add(f"add i64 {first}, {step}"), tiles[1])
            with self._loop("deep", "0", str(what.k), str(what.depth)) as start:
                rest = out.add(f"sub i64 {what.k}, {start}")
                self._of_depth(first, end, strips, start, self._least(rest, str(what.depth)))
        out.raw("  ret void\n}")
        return out.text

    def _of_depth(
        self, first: str, end: str, strips: tuple[str, str], start: str, depth: str
    ) -> None:
        """What rows `start` and so on of the weight add to the results of some tiles."""
        out, what = self.out, self.what
        full_end = self._least(end, str(self.full))
        is_first = out.add(f"icmp eq i64 {start}, 0")
        is_last = out.add(f"icmp sge i64 {out.add(f'add i64 {start}, {depth}')}, {what.k}")
        has_left = out.add(f"icmp sgt i64 {end}, {self.full}")

        def copies_of(tile: str) -> str:
            at = out.add(f"mul i64 {out.add(f'sub i64 {tile}, {first}')}, {what.depth * what.tile}")
            return self._at("%copies", at)

        with self._loop("copied", first, full_end, "1") as tile:
            self._copy("full", what.tile, tile, copies_of(tile), start, depth)
        if self.left:
            with self._only_if("copied_left", has_left):
                last = str(self.full)
                self._copy("left", self.left, last, copies_of(last), start, depth)
        with self._loop("strip", *strips, "1") as strip:
            row = out.add(f"add i64 {out.add(f'mul i64 {strip}, {what.k}')}, {start}")
            weight = self._at("%p1", out.add(f"mul i64 {row}, {STRIP}"))
            at = (strip, weight, depth, is_first, is_last)
            with self._loop("tile", first, full_end, "1") as tile:
                self._results("some", what.tile, tile, copies_of(tile), *at)
            if self.left:
                with self._only_if("tile_left", has_left):
                    last = str(self.full)
                    self._results("few", self.left, last, copies_of(last), *at)

    def _copy(self, name: str, rows: int, tile: str, to: str, start: str, depth: str) -> None:
        """Columns of the left operand's rows of a tile, those of a column one after the other."""
        out, what = self.out, self.what
        row = out.add(f"mul i64 {tile}, {what.tile}")
        across, along = (1, what.rows) if what.turned else (what.k, 1)
        skipped = out.add(f"mul i64 {start}, {along}")
        begin = out.add(f"add i64 {out.add(f'mul i64 {row}, {across}')}, {skipped}")
        begin = self._at("%p0", begin)
        with self._loop(f"copy_{name}", "0", depth, "1") as k:
            source = self._at(begin, out.add(f"mul i64 {k}, {along}"))
            target = self._at(to, out.add(f"mul i64 {k}, {what.tile}"))
            for r in range(rows):
                x = out.add(f"load float, ptr {self._at(source, str(r * across))}, align 4")
                out.raw(f"  store float {x}, ptr {self._at(target, str(r))}, align 4")

    def _results(
        self,
        name: str,
        rows: int,
        tile: str,
        copies: str,
        strip: str,
        weight: str,
        depth: str,
        is_first: str,
        is_last: str,
    ) -> None:
        """A tile's results in a strip; what follows is done where these are the last terms."""
        out, what = self.out, self.what
        column = out.add(f"mul i64 {strip}, {STRIP}")
        row = out.add(f"mul i64 {tile}, {what.tile}")
        at = out.add(f"add i64 {out.add(f'mul i64 {row}, {what.n}')}, {column}")
        y = self._at(f"%p{what.last}", at)
        bias = self._at("%p2", column) if what.after.bias else "%nothing"
        before = out.add(f"select i1 {is_first}, ptr {bias}, ptr {y}")
        stride = out.add(f"select i1 {is_first}, i64 0, i64 {what.n}")
        mask = self._mask(column)
        is_empty = is_first if not what.after.bias else None
        sums = [
            self._load(self._at(before, out.add(f"mul i64 {stride}, {r}")), mask, is_empty)
            for r in range(rows)
        ]
        unrolled = out.add(f"and i64 {depth}, {-_UNROLLED}")
        sums = self._summed(f"{name}_most", sums, copies, weight, "0", unrolled, _UNROLLED)
        if what.k % _UNROLLED:
            sums = self._summed(f"{name}_rest", sums, copies, weight, unrolled, depth, 1)
        for r, total in enumerate(sums):
            value = total
            if what.after.addend:
                place = self._at(f"%p{what.last - 1}", out.add(f"add i64 {at}, {r * what.n}"))
                value = out.add(f"fadd {VECTOR} {value}, {self._load(place, mask, None)}")
            if what.after.clip is not None:
                value = curves.clipped(out, what.after.clip, value)
            if value != total:
                value = out.add(f"select i1 {is_last}, {VECTOR} {value}, {VECTOR} {total}")
            self._store(value, self._at(y, str(r * what.n)), mask)

    def _summed(
        self,
        name: str,
        sums: list[str],
        copies: str,
        weight: str,
        start: str,
        end: str,
        unrolled: int,
    ) -> list[str]:
        """The sums, a vector for each row, with the terms from `start` to `end`."""
        out, tile = self.out, self.what.tile
        before, now = out.block, f"%{name}_k"
        out.raw(f"  br label %{name}\n{name}:")
        out.raw(f"  {now} = phi i64 [{start}, %{before}], [{now}_next, %{name}_body]")
        names = [f"%{name}_sum{r}" for r in range(len(sums))]
        for x, own in zip(sums, names, strict=True):
            out.raw(f"  {own} = phi {VECTOR} [{x}, %{before}], [{own}_next, %{name}_body]")
        out.raw(f"  %{name}_more = icmp slt i64 {now}, {end}")
        out.raw(f"  br i1 %{name}_more, label %{name}_body, label %{name}_end\n{name}_body:")
        line = self._at(weight, out.add(f"mul i64 {now}, {STRIP}"))
        factors = self._at(copies, out.add(f"mul i64 {now}, {tile}"))
        latest = list(names)
        for u in range(unrolled):
            w = out.load(self._at(line, str(u * STRIP)), None)
            if self.what.rows <= _FEW_ROWS:  # the next strip, for reading, into the second cache
                soon = self._at(line, str((self.what.k + u) * STRIP))
                out.raw(f"  call void @llvm.prefetch.p0(ptr {soon}, i32 0, i32 2, i32 1)")
            for r, own in enumerate(names):
                x = out.load_one(self._at(factors, str(u * tile + r)))
                made = f"{own}_next" if u == unrolled - 1 else f"{own}_{u}"
                out.raw(f"  {made} = {FMA}({VECTOR} {w}, {VECTOR} {x}, {VECTOR} {latest[r]})")
                latest[r] = made
        out.raw(f"  {now}_next = add i64 {now}, {unrolled}\n  br label %{name}\n{name}_end:")
        out.block = f"{name}_end"
        return names

    # --- vectors of a strip whose columns may not all be there ---

    def _mask(self, column: str) -> str | None:
        if not self.is_cut:
            return None
        out = self.out
        left = out.add(f"trunc i64 {out.add(f'sub i64 {self.what.n}, {column}')} to i32")
        one = out.add(f"insertelement <{WIDTH} x i32> poison, i32 {left}, i64 0")
        zeros = f"<{WIDTH} x i32> zeroinitializer"
        all_of_it = out.add(f"shufflevector <{WIDTH} x i32> {one}, <{WIDTH} x i32> poison, {zeros}")
        numbers = ", ".join(f"i32 {i}" for i in range(WIDTH))
        return out.add(f"icmp slt <{WIDTH} x i32> <{numbers}>, {all_of_it}")

    def _load(self, at: str, mask: str | None, is_whole: str | None) -> str:
        """Numbers of a row; `is_whole` where all are there, whatever the mask."""
        if mask is None:
            return self.out.load(at, None)
        if is_whole is not None:
            ones = f"<{WIDTH} x i1> <{', '.join(['i1 true'] * WIDTH)}>"
            mask = self.out.add(f"select i1 {is_whole}, {ones}, <{WIDTH} x i1> {mask}")
        return self.out.add(
            f"call {VECTOR} @llvm.masked.load.v{WIDTH}f32.p0(ptr {at}, i32 4, "
            f"<{WIDTH} x i1> {mask}, {VECTOR} zeroinitializer)"
        )

    def _store(self, x: str, at: str, mask: str | None) -> None:
        if mask is None:
            self.out.store(x, at, None)
            return
        self.out.raw(
            f"  call void @llvm.masked.store.v{WIDTH}f32.p0({VECTOR} {x}, ptr {at}, i32 4, "
            f"<{WIDTH} x i1> {mask})"
        )

    # --- what the language lacks ---

    def _at(self, base: str, index: str) -> str:
        return self.out.add(f"getelementptr float, ptr {base}, i64 {index}")

    def _least(self, a: str, b: str) -> str:
        less = self.out.add(f"icmp slt i64 {a}, {b}")
        return self.out.add(f"select i1 {less}, i64 {a}, i64 {b}")

    def _largest(self, a: str, b: str) -> str:
        more = self.out.add(f"icmp sgt i64 {a}, {b}")
        return self.out.add(f"select i1 {more}, i64 {a}, i64 {b}")

    def _ceiling(self, a: str, b: str) -> str:
        """a / b, rounded up."""
        less = self.out.add(f"sub i64 {b}, 1")
        return self.out.add(f"sdiv i64 {self.out.add(f'add i64 {a}, {less}')}, {b}")

    @contextmanager
    def _loop(self, name: str, start: str, end: str, step: str) -> Iterator[str]:
        """A loop around what is written in the block; gives the name of its variable."""
        out, before, i = self.out, self.out.block, f"%{name}_i"
        out.raw(f"  br label %{name}\n{name}:")
        head = len(out.lines)
        out.raw("")  # the variable, once the block that goes round is known
        out.raw(f"  %{name}_more = icmp slt i64 {i}, {end}")
        out.raw(f"  br i1 %{name}_more, label %{name}_body, label %{name}_end\n{name}_body:")
        out.block = f"{name}_body"
        yield i
        out.lines[head] = f"  {i} = phi i64 [{start}, %{before}], [{i}_next, %{out.block}]"
        out.raw(f"  {i}_next = add i64 {i}, {step}\n  br label %{name}\n{name}_end:")
        out.block = f"{name}_end"

    @contextmanager
    def _only_if(self, name: str, test: str) -> Iterator[None]:
        """What is written in the block is done where the test holds."""
        out = self.out
        out.raw(f"  br i1 {test}, label %{name}_do, label %{name}_done\n{name}_do:")
        out.block = f"{name}_do"
        yield
        out.raw(f"  br label %{name}_done\n{name}_done:")
        out.block = f"{name}_done"
