"""Generated code for products of many rows with a weight, as LLVM IR.

The weight is stored in strips of `STRIP` columns, as in `stream`. `_DEPTH` rows of a strip are used
at a time and stay in the L1 cache; the results of `TILE` rows are computed at a time, all in
registers. The rows of the left operand are copied first, so that a tile reads them one after the
other and all of them stay in the L2 cache.

Source: K. Goto and R. van de Geijn, Anatomy of High-Performance Matrix Multiplication (2008).
"""

from __future__ import annotations

from dataclasses import dataclass

from xrl_jax.libraries.onednn import curves
from xrl_jax.libraries.onednn.code import ELEMENTS, VECTOR, WIDE, ZEROS
from xrl_jax.libraries.onednn.flow import STRIP, TILE, Flow, LeftTile, Tiled
from xrl_jax.libraries.onednn.machine_code import SMALL, Kernel
from xrl_jax.libraries.onednn.spec import Epilogue

_DEPTH = 256  # rows of a strip that are used at a time: 16 KiB
_MOST_TILES = 48  # whose rows are copied together: 288 KiB with tiles of 6 rows
_FEW_ROWS = 64  # with so few, a product takes little longer than loading the weight from memory
_SMALL_DEPTH = 64  # multiply-adds that count as one element of `SMALL`


@dataclass(frozen=True)
class Blocked(Tiled):
    """[rows, k] by a weight [k, n], plus a bias [n] and an addend [rows, n].

    The weight is in strips [strips, k, STRIP]; the last may have fewer columns than it has room
    for.

    Attributes:
      transposed: whether the left operand is stored as [k, rows].
      lanes: float32 elements in a SIMD register.
      weight: type of the weight's elements.
    """

    rows: int
    k: int
    n: int
    transposed: bool
    after: Epilogue
    lanes: int
    weight: str = "float32"

    @property
    def tile(self) -> int:
        return min(TILE[self.lanes], self.rows)

    @property
    def depth(self) -> int:
        return min(_DEPTH, self.k)

    @property
    def last(self) -> int:
        """The index of the result among the arguments."""
        return 2 + self.after.bias + self.after.addend


def kernel_of(what: Blocked, name: str) -> Kernel:
    """Return the kernel, whose parts are the tiles or the strips."""
    few = what.rows * what.k * what.n < SMALL * _SMALL_DEPTH
    shared = what.tiles if what.shares_rows else what.strips
    return Kernel(_Function(what).text(name), shared, few)


class _Function:
    """Writes the function that computes a range of the tiles, or of the strips."""

    def __init__(self, what: Blocked) -> None:
        self.what = what
        self.out = Flow()
        self.full, self.rest_rows = divmod(what.rows, what.tile)  # tiles, and rows of the last

    def text(self, name: str) -> str:
        """Return the definition of `name`(table, first part, part after the last)."""
        what, out = self.what, self.out
        shared = ("%from", "%to")
        tiles = shared if what.shares_rows else ("0", str(what.tiles))
        strips = ("0", str(what.strips)) if what.shares_rows else shared
        size = min(_MOST_TILES, what.tiles) * what.depth * what.tile
        with out.function(f"void @{name}(ptr %table, i64 %from, i64 %to) {WIDE}", what.last + 1):
            out.raw(f"  %copies = alloca [{size} x float], align 64")
            out.raw(f"  %nothing = alloca {VECTOR}, align 64")
            out.raw(f"  store {VECTOR} {ZEROS}, ptr %nothing")
            # Groups of as many tiles as fit, of equal size.
            span = out.add(f"sub i64 {tiles[1]}, {tiles[0]}")
            groups = out.ceiling(span, str(_MOST_TILES))
            step = out.ceiling(span, out.largest(groups, "1"))
            with out.loop("group", tiles[0], tiles[1], out.largest(step, "1")) as first:
                end = out.least(out.add(f"add i64 {first}, {step}"), tiles[1])
                with out.loop("deep", "0", str(what.k), str(what.depth)) as start:
                    rest = out.add(f"sub i64 {what.k}, {start}")
                    self._of_depth(first, end, strips, start, out.least(rest, str(what.depth)))
        return out.text

    def _of_depth(
        self, first: str, end: str, strips: tuple[str, str], start: str, depth: str
    ) -> None:
        """Add to the results of some tiles the terms of the weight's rows from `start` on."""
        out, what = self.out, self.what
        full_end = out.least(end, str(self.full))
        is_first = out.add(f"icmp eq i64 {start}, 0")
        is_last = out.add(f"icmp sge i64 {out.add(f'add i64 {start}, {depth}')}, {what.k}")
        has_left = out.add(f"icmp sgt i64 {end}, {self.full}")

        def copies_of(tile: str) -> str:
            at = out.add(f"mul i64 {out.add(f'sub i64 {tile}, {first}')}, {what.depth * what.tile}")
            return out.at("%copies", at)

        with out.loop("copied", first, full_end) as tile:
            self._copy("full", what.tile, tile, copies_of(tile), start, depth)
        if self.rest_rows:
            with out.only_if("copied_left", has_left):
                last = str(self.full)
                self._copy("left", self.rest_rows, last, copies_of(last), start, depth)
        with out.loop("strip", *strips) as strip:
            row = out.add(f"add i64 {out.add(f'mul i64 {strip}, {what.k}')}, {start}")
            weight = out.at("%p1", out.add(f"mul i64 {row}, {STRIP}"), ELEMENTS[what.weight])
            at = (strip, weight, depth, is_first, is_last)
            with out.loop("tile", first, full_end) as tile:
                self._results("some", what.tile, tile, copies_of(tile), *at)
            if self.rest_rows:
                with out.only_if("tile_left", has_left):
                    last = str(self.full)
                    self._results("few", self.rest_rows, last, copies_of(last), *at)

    def _copy(self, name: str, rows: int, tile: str, to: str, start: str, depth: str) -> None:
        """Copy columns of a tile of the left operand; elements of a column become adjacent."""
        out, what = self.out, self.what
        row = out.add(f"mul i64 {tile}, {what.tile}")
        across, along = (1, what.rows) if what.transposed else (what.k, 1)
        skipped = out.add(f"mul i64 {start}, {along}")
        begin = out.add(f"add i64 {out.add(f'mul i64 {row}, {across}')}, {skipped}")
        source = LeftTile(out.at("%p0", begin), across, along)
        out.copy_transposed(f"copy_{name}", source, rows, depth, to, what.tile)

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
        """Compute a tile's results in a strip; addend and clipping follow the last terms."""
        out, what = self.out, self.what
        column = out.add(f"mul i64 {strip}, {STRIP}")
        row = out.add(f"mul i64 {tile}, {what.tile}")
        at = out.add(f"add i64 {out.add(f'mul i64 {row}, {what.n}')}, {column}")
        y = out.at(f"%p{what.last}", at)
        bias = out.at("%p2", column) if what.after.bias else "%nothing"
        before = out.add(f"select i1 {is_first}, ptr {bias}, ptr {y}")
        stride = out.add(f"select i1 {is_first}, i64 0, i64 {what.n}")
        strip_mask = out.strip_mask(what.n, column)
        mask = strip_mask and strip_mask.mask
        sums = [
            out.load(out.at(before, out.add(f"mul i64 {stride}, {r}")), mask) for r in range(rows)
        ]
        ahead = what.k * STRIP if what.rows <= _FEW_ROWS else 0
        left = LeftTile(copies, 1, what.tile)
        sums = out.summed(name, sums, left, weight, (depth, what.k), ahead, what.weight)
        places = [out.at(y, str(r * what.n)) for r in range(rows)]
        if not (what.after.addend or what.after.clip):
            out.store_masked(name, list(zip(sums, places, strict=True)), strip_mask)
            return
        with out.only_if(f"{name}_on", out.opposite(is_last)):
            out.store_masked(f"{name}_part", list(zip(sums, places, strict=True)), strip_mask)
        with out.only_if(f"{name}_last", is_last):
            values = [self._finished(x, at, r, mask) for r, x in enumerate(sums)]
            out.store_masked(f"{name}_all", list(zip(values, places, strict=True)), strip_mask)

    def _finished(self, total: str, at: str, row: int, mask: str | None) -> str:
        """Return a vector of sums after the addend and clipping."""
        out, what, value = self.out, self.what, total
        if what.after.addend:
            place = out.at(f"%p{what.last - 1}", out.add(f"add i64 {at}, {row * what.n}"))
            value = out.add(f"fadd {VECTOR} {value}, {out.load(place, mask)}")
        return value if what.after.clip is None else curves.clipped(out, what.after.clip, value)
