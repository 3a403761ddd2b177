"""Products in integers of 12 bits and a sign, which processors multiply in 16, as LLVM IR.

Processors since AVX2 multiply 16 bits and add the products of neighbours twice as fast as they
multiply and add float32. Each row of the left operand and each column of the weight is a factor
times integers of at most `LARGEST`: a sum of `_RUN` products then fits into 32 bits. It is added to
a sum in float32. So an operand errs by a fifth of what it errs in bfloat16.

`RowLevels` rounds the left operand, row by row; of a row that is not finite the levels are 0 and
the factor is infinite, which sets the flag for which a call is run again (`flags`). `Products16`
multiplies. The structure is that of `blocked`, but the rows need no copy: the numbers of two terms
are adjacent in both operands, and one instruction loads those of a row into all lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from xrl_jax.libraries.onednn import curves, levels
from xrl_jax.libraries.onednn.code import INTEGERS, VECTOR, WIDE, WIDTH, ZEROS, Code, digits
from xrl_jax.libraries.onednn.flow import STRIP, Flow, Tiled
from xrl_jax.libraries.onednn.machine_code import SMALL, Kernel
from xrl_jax.libraries.onednn.operand_types import LARGEST
from xrl_jax.libraries.onednn.spec import Epilogue

_RUN = 64  # pairs of terms that are summed in integers: 128 * LARGEST ** 2 is less than 2 ** 31
_DEPTH = 6 * _RUN  # pairs of a strip that are used at a time: 24 KiB, in the L1 cache
_TILE = {8: 6, 16: 24}  # rows of results in registers, by the elements of a register
_SMALL_DEPTH = 128  # multiply-adds that count as one element of `SMALL`
# By the elements of a register: the instruction that multiplies and adds pairs.
_MULTIPLY = {8: "@llvm.x86.avx2.pmadd.wd", 16: "@llvm.x86.avx512.pmaddw.d.512"}


@dataclass(frozen=True)
class RowLevels:
    """The levels of each row of [rows, k] in int16, padded to pairs, then the rows' factors."""

    rows: int
    k: int  # at least a vector

    def text(self, name: str) -> str:
        """Return the definition of `name`(table, first row, row after the last)."""
        out = Code()
        with out.function(f"void @{name}(ptr %table, i64 %from, i64 %to) {WIDE}", 3):
            out.raw("  %zero = alloca float\n  %nothing = alloca float")
            out.raw(f"  store volatile float {digits(0.0)}, ptr %zero")
            with out.loop("each", "%from", "%to") as row:
                x = out.at("%p0", out.add(f"mul i64 {row}, {self.k}"))
                bits = self._largest(out, x)
                is_finite, scale, inverse = levels.factors(out, bits, LARGEST)
                out.raw(f"  store float {scale}, ptr {out.at('%p2', row)}, align 4")
                # Infinity times zero sets the flag; LLVM must not know that it is zero.
                flag = out.add(f"fmul float {scale}, {out.add('load volatile float, ptr %zero')}")
                out.raw(f"  store volatile float {flag}, ptr %nothing")
                to = out.at("%p1", out.add(f"mul i64 {row}, {2 * self.pairs}"), "i16")
                self._converted(out, x, inverse, is_finite, to)
        return out.text

    @property
    def pairs(self) -> int:
        return -(-self.k // 2)

    def _largest(self, out: Code, x: str) -> str:
        """Return the bits of the largest magnitude of a row; those of NaN are larger than any."""

        def larger(start: str, than: str) -> str:
            return levels.larger_magnitude(out, out.at(x, start), than)

        def with_vector(v: str, found: Sequence[str]) -> list[str]:
            return [larger(out.add(f"mul i64 {v}, {WIDTH}"), found[0])]

        end = str(self.k // WIDTH)
        (most,) = out.carried("most", "0", end, "1", [ZEROS], with_vector, [INTEGERS])
        if self.k % WIDTH:  # a vector that ends with the rest reads some elements again
            most = larger(str(self.k - WIDTH), most)
        return levels.largest_of(out, most)

    def _converted(self, out: Code, x: str, inverse: str, is_finite: str, to: str) -> None:
        """Store the levels of a row."""

        def convert(start: str) -> None:
            y = levels.rounded(out, out.at(x, start), inverse, is_finite, "i16")
            out.raw(f"  store <{WIDTH} x i16> {y}, ptr {out.at(to, start, 'i16')}, align 2")

        with out.loop("vector", "0", str(self.k // WIDTH)) as v:
            convert(out.add(f"mul i64 {v}, {WIDTH}"))
        if self.k % WIDTH:
            convert(str(self.k - WIDTH))
        if self.k % 2:
            out.raw(f"  store i16 0, ptr {out.at(to, str(self.k), 'i16')}, align 2")


@dataclass(frozen=True)
class Products16(Tiled):
    """[rows, k] by a weight [k, n], plus a bias [n] and an addend [rows, n].

    The arguments are the levels and factors of the rows, the weight's levels in strips
    [strips, pairs, STRIP, 2], its columns' factors [n], the bias and the addend.

    Attributes:
      lanes: integers of 32 bits in a SIMD register.
    """

    rows: int
    k: int
    n: int
    after: Epilogue
    lanes: int

    @property
    def pairs(self) -> int:
        return -(-self.k // 2)

    @property
    def tile(self) -> int:
        return min(_TILE[self.lanes], self.rows)

    @property
    def last(self) -> int:
        """The index of the result among the arguments."""
        return 4 + self.after.bias + self.after.addend


class _Function:
    """Writes the function that computes a range of the tiles, or of the strips."""

    def __init__(self, what: Products16) -> None:
        self.what = what
        self.out = Flow()
        self.full, self.rest_rows = divmod(what.rows, what.tile)  # tiles, and rows of the last
        self.parts = range(0, WIDTH, what.lanes)  # columns of a strip at which registers begin

    def text(self, name: str) -> str:
        """Return the definition of `name`(table, first part, part after the last)."""
        what, out = self.what, self.out
        shared = ("%from", "%to")
        first, end = shared if what.shares_rows else ("0", str(what.tiles))
        strips = ("0", str(what.strips)) if what.shares_rows else shared
        many, whole = f"<{2 * what.lanes} x i16>", f"<{what.lanes} x i32>"
        declared = f"declare {whole} {_MULTIPLY[what.lanes]}({many}, {many})\n"
        with out.function(f"void @{name}(ptr %table, i64 %from, i64 %to) {WIDE}", what.last + 1):
            full_end = out.least(end, str(self.full))
            has_left = out.add(f"icmp sgt i64 {end}, {self.full}")
            with out.loop("deep", "0", str(what.pairs), str(_DEPTH)) as start:
                stop = out.least(out.add(f"add i64 {start}, {_DEPTH}"), str(what.pairs))
                with out.loop("strip", *strips) as strip:
                    with out.loop("tile", first, full_end) as tile:
                        self._results("some", what.tile, tile, strip, start, stop)
                    if self.rest_rows:
                        with out.only_if("left", has_left):
                            rest = self.rest_rows, str(self.full), strip
                            self._results("few", *rest, start, stop)
        return declared + out.text

    def _results(self, name: str, rows: int, tile: str, strip: str, start: str, stop: str) -> None:
        """Add the terms from pair `start` to `stop` to a tile's results in a strip."""
        out, what = self.out, self.what
        column = out.add(f"mul i64 {strip}, {STRIP}")
        row = out.add(f"mul i64 {tile}, {what.tile}")
        at = out.add(f"add i64 {out.add(f'mul i64 {row}, {what.n}')}, {column}")
        strip_mask = out.strip_mask(what.n, column)
        mask = strip_mask and strip_mask.mask
        places = [out.at(f"%p{what.last}", at)]
        places += [out.at(places[0], str(r * what.n)) for r in range(1, rows)]
        left = out.at("%p0", out.add(f"mul i64 {row}, {what.pairs}"), "i32")
        weight = out.at("%p2", out.add(f"mul i64 {strip}, {what.pairs * STRIP}"), "i32")
        if what.pairs <= _DEPTH:
            sums = [ZEROS] * rows
        else:
            is_first = out.add(f"icmp eq i64 {start}, 0")
            zeros = f"select i1 {is_first}, {VECTOR} {ZEROS}"
            sums = [out.add(f"{zeros}, {VECTOR} {out.load(place, mask)}") for place in places]

        def add_run(begin: str, totals: Sequence[str]) -> list[str]:
            end = out.least(out.add(f"add i64 {begin}, {_RUN}"), stop)
            runs = self._integers(name, rows, left, weight, (begin, end))
            pairs = zip(totals, runs, strict=True)
            return [out.add(f"fadd {VECTOR} {total}, {run}") for total, run in pairs]

        sums = out.carried(f"{name}_run", start, stop, str(_RUN), sums, add_run)
        is_last = out.add(f"icmp eq i64 {stop}, {what.pairs}")
        with out.only_if(f"{name}_on", out.opposite(is_last)):
            out.store_masked(f"{name}_part", list(zip(sums, places, strict=True)), strip_mask)
        with out.only_if(f"{name}_last", is_last):
            factors = out.load(out.at("%p3", column), mask)
            finished = partial(self._finished, row, at, column, factors, mask)
            values = [finished(r, x) for r, x in enumerate(sums)]
            out.store_masked(f"{name}_all", list(zip(values, places, strict=True)), strip_mask)

    def _integers(
        self, name: str, rows: int, left: str, weight: str, run: tuple[str, str]
    ) -> list[str]:
        """Return the sums of a run of pairs, a vector of float32 for each row."""
        out, what = self.out, self.what
        many, whole = f"<{2 * what.lanes} x i16>", f"<{what.lanes} x i32>"

        def add_pair(k: str, sums: Sequence[str]) -> list[str]:
            line = out.at(weight, out.add(f"mul i64 {k}, {STRIP}"), "i32")
            columns = [
                out.add(f"load {many}, ptr {out.at(line, str(part), 'i32')}, align 4")
                for part in self.parts
            ]
            latest = list[str]()
            for r in range(rows):
                place = out.at(out.at(left, k, "i32"), str(r * what.pairs), "i32")
                one = out.add(f"load i32, ptr {place}, align 4")
                wide = out.add(f"insertelement {whole} poison, i32 {one}, i64 0")
                zero = f"{whole} {ZEROS}"
                x = out.add(f"shufflevector {whole} {wide}, {whole} poison, {zero}")
                x = out.add(f"bitcast {whole} {x} to {many}")
                for w in columns:
                    y = out.add(f"call {whole} {_MULTIPLY[what.lanes]}({many} {w}, {many} {x})")
                    latest.append(out.add(f"add {whole} {sums[len(latest)]}, {y}"))
            return latest

        m = len(self.parts)
        n = rows * m
        sums = out.carried(f"{name}_pair", *run, "1", [ZEROS] * n, add_pair, [whole] * n)
        return [self._as_floats(sums[i : i + m]) for i in range(0, n, m)]

    def _as_floats(self, parts: Sequence[str]) -> str:
        """Return the parts of a vector of integers as one of float32."""
        out, whole = self.out, f"<{self.what.lanes} x i32>"
        both = parts[0]
        if len(parts) == 2:
            order = ", ".join(f"i32 {i}" for i in range(WIDTH))
            a, b = parts
            both = out.add(f"shufflevector {whole} {a}, {whole} {b}, {INTEGERS} <{order}>")
        return out.add(f"sitofp {INTEGERS} {both} to {VECTOR}")

    def _finished(
        self, row: str, at: str, column: str, factors: str, mask: str | None, r: int, total: str
    ) -> str:
        """Return a row of sums times its factors, after the epilogue."""
        out, after = self.out, self.what.after
        scale = out.load_one(out.at("%p1", out.add(f"add i64 {row}, {r}")))
        # Weights first: of large rows, sums times the row's factor may overflow.
        value = out.add(f"fmul {VECTOR} {total}, {factors}")
        value = out.add(f"fmul {VECTOR} {value}, {scale}")
        if after.bias:
            value = out.add(f"fadd {VECTOR} {value}, {out.load(out.at('%p4', column), mask)}")
        if after.addend:
            place = out.at(f"%p{self.what.last - 1}", out.add(f"add i64 {at}, {r * self.what.n}"))
            value = out.add(f"fadd {VECTOR} {value}, {out.load(place, mask)}")
        return value if after.clip is None else curves.clipped(out, after.clip, value)


def kernel_of(what: RowLevels | Products16, name: str) -> Kernel:
    """Return the kernel, whose parts are the rows, or the tiles or strips of a product."""
    if isinstance(what, RowLevels):
        return Kernel(what.text(name), what.rows, what.rows * what.k < SMALL, signals=True)
    few = what.rows * what.k * what.n < SMALL * _SMALL_DEPTH
    shared = what.tiles if what.shares_rows else what.strips
    return Kernel(_Function(what).text(name), shared, few)
