"""Generated code for attention, as LLVM IR: a product (the scores), a loop over each of its rows,
and the product of the loop's result with another operand.

The scores have one element for each pair of rows; moving them through memory takes longer than
computing them. So a few tiles of rows go through all three steps at a time, with their scores in
the L2 cache. The right operands of a batch are first copied into strips, once for each thread.

Source: T. Dao et al., FlashAttention (2022), without its running maximum, because a row of scores
is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xrl_jax.libraries.onednn import rows
from xrl_jax.libraries.onednn.code import WIDE, ZEROS
from xrl_jax.libraries.onednn.flow import STRIP, TILE, Flow, LeftTile
from xrl_jax.libraries.onednn.machine_code import SMALL, Kernel
from xrl_jax.libraries.onednn.spec import Loop

MOST_STRIP_ELEMENTS = 1 << 18  # of right operands; a thread keeps them on its stack
_SCORES = 1 << 14  # elements of a group's rows, or of their scores
_SMALL_SUM = 64  # multiply-adds that count as one element of `SMALL`
Strides = tuple[int, int, int]  # of the batch, the rows and the columns, in elements


@dataclass(frozen=True)
class Attended:
    """[batch, m, k] by [batch, k, n], a loop over each row, and the loop's result by [batch, n, d].

    The arguments are the operands of the first product, the loop's arguments except the scores, and
    the right operand of the last product.

    Attributes:
      strides: of the three operands and of the result.
      at: index of the scores among the loop's arguments.
      lanes: float32 elements in a SIMD register.
    """

    batch: int
    m: int
    k: int
    n: int
    d: int
    strides: tuple[Strides, Strides, Strides, Strides]
    loop: Loop
    at: int
    lanes: int

    @property
    def tile(self) -> int:
        """Rows of results computed at a time; the last tile of a batch may have fewer."""
        return min(TILE[self.lanes], self.m)

    @property
    def tiles(self) -> int:
        """The number of tiles in a batch."""
        return -(-self.m // self.tile)

    @property
    def together(self) -> int:
        """The number of tiles in a group: their rows and scores are in memory at the same time."""
        return max(1, min(_SCORES // (self.tile * max(self.n, self.k)), self.tiles))

    @property
    def groups(self) -> int:
        """The number of groups in a batch; the last may have fewer tiles."""
        return -(-self.tiles // self.together)


def strip_elements(k: int, n: int, d: int) -> int:
    """Return how many elements a batch's right operands [k, n] and [n, d] take in whole strips."""
    return (-(-n // STRIP) * k + -(-d // STRIP) * n) * STRIP


def kernel_of(what: Attended, name: str) -> Kernel:
    """Return the kernel, whose parts are the groups of tiles of all batches."""
    few = what.batch * what.m * what.n * (what.k + what.d) < SMALL * _SMALL_SUM
    loop = rows.function(what.loop, f"{name}_loop")
    body = _Function(what, f"{name}_loop").text(name)
    return Kernel(loop + body, what.batch * what.groups, few)


class _Function:
    """Writes the function that computes a range of the groups of tiles."""

    def __init__(self, what: Attended, loop: str) -> None:
        self.what, self.loop = what, loop
        self.out = Flow()
        self.full, self.rest_rows = divmod(what.m, what.tile)  # tiles, and rows of the last
        self.others = len(what.loop.inputs) - 1

    def text(self, name: str) -> str:
        """Return the definition of `name`(table, first group, group after the last)."""
        what, out = self.what, self.out
        n_strips, d_strips = (-(-size // STRIP) for size in (what.n, what.d))
        head = f"void @{name}(ptr %table, i64 %from, i64 %to) {WIDE}"
        with out.function(head, self.others + 4):
            for place, size in (
                ("first", n_strips * what.k * STRIP),
                ("second", d_strips * what.n * STRIP),
                ("left", what.together * what.tile * what.k),
                ("scores", what.together * what.tile * what.n),
            ):
                out.raw(f"  %{place} = alloca [{size} x float], align 64")
            out.raw(f"  %inner = alloca [{self.others + 2} x ptr]")
            with out.loop("group", "%from", "%to") as group:
                self._group(group)
        return out.text

    def _group(self, group: str) -> None:
        """Compute a group of tiles, after copying the right operands if the batch is a new one."""
        what, out = self.what, self.out
        batch = out.add(f"sdiv i64 {group}, {what.groups}")
        own = out.add(f"sub i64 {group}, {out.add(f'mul i64 {batch}, {what.groups}')}")
        starts = out.add(f"icmp eq i64 {group}, %from")
        is_new = out.add(f"or i1 {starts}, {out.add(f'icmp eq i64 {own}, 0')}")
        with out.only_if("new", is_new):
            self._into_strips("first", "%p1", 1, batch, what.n, what.k)
            self._into_strips("second", f"%p{self.others + 2}", 2, batch, what.d, what.n)
        first = out.add(f"mul i64 {own}, {what.together}")
        end = out.least(out.add(f"add i64 {first}, {what.together}"), str(what.tiles))
        self._scores(batch, first, end)
        self._through_loop(batch, first, end)
        self._results(batch, first, end)

    def _start(self, base: str, which: int, batch: str, row: str) -> str:
        """Return the address where a row of an operand begins."""
        steps = self.what.strides[which]
        skipped = self.out.add(f"mul i64 {batch}, {steps[0]}")
        inner = self.out.add(f"mul i64 {row}, {steps[1]}")
        return self.out.at(base, self.out.add(f"add i64 {skipped}, {inner}"))

    def _into_strips(
        self, name: str, base: str, which: int, batch: str, columns: int, terms: int
    ) -> None:
        """Copy a batch's right operand [terms, columns] into strips, padded with zeros."""
        out = self.out
        _, along, across = self.what.strides[which]
        whole, rest = divmod(columns, STRIP)
        start = self._start(base, which, batch, "0")

        def strip(label: str, number: str, there: int) -> None:
            source = out.at(start, out.add(f"mul i64 {number}, {STRIP * across}"))
            to = out.at(f"%{name}", out.add(f"mul i64 {number}, {STRIP * terms}"))
            if there < STRIP:
                with out.loop(f"{label}_zero", "0", str(terms)) as k:
                    at = out.at(to, out.add(f"mul i64 {k}, {STRIP}"))
                    out.store(ZEROS, at)
            columns = LeftTile(source, across, along)
            out.copy_transposed(f"{label}_copy", columns, there, str(terms), to, STRIP)

        with out.loop(f"{name}_strip", "0", str(whole)) as number:
            strip(f"{name}_whole", number, STRIP)
        if rest:
            strip(f"{name}_rest", str(whole), rest)

    def _each_tile(self, name: str, first: str, end: str) -> Iterator[tuple[str, str, int]]:
        """Write a loop over the whole tiles from `first` to before `end`, and a test for a smaller
        last one; inside each, yield a label, the tile's number and its number of rows.
        """
        out = self.out
        full_end = out.least(end, str(self.full))
        with out.loop(f"{name}_full", first, full_end) as tile:
            yield f"{name}_some", tile, self.what.tile
        if self.rest_rows:
            with out.only_if(f"{name}_last", out.add(f"icmp sgt i64 {end}, {self.full}")):
                yield f"{name}_few", str(self.full), self.rest_rows

    def _kept(self, place: str, tile: str, first: str, columns: int) -> str:
        """Return where a tile begins in a buffer of the group whose first tile is `first`."""
        at = self.out.add(f"sub i64 {tile}, {first}")
        return self.out.at(place, self.out.add(f"mul i64 {at}, {self.what.tile * columns}"))

    def _scores(self, batch: str, first: str, end: str) -> None:
        out, what = self.out, self.what
        _, across, along = what.strides[0]
        for label, tile, n_rows in self._each_tile("copied", first, end):
            row = out.add(f"mul i64 {tile}, {what.tile}")
            source = LeftTile(self._start("%p0", 0, batch, row), across, along)
            to = self._kept("%left", tile, first, what.k)
            out.copy_transposed(label, source, n_rows, str(what.k), to, what.tile)
        with out.loop("scored", "0", str(-(-what.n // STRIP))) as strip:
            weight = out.at("%first", out.add(f"mul i64 {strip}, {STRIP * what.k}"))
            column = out.add(f"mul i64 {strip}, {STRIP}")
            strip_mask = out.strip_mask(what.n, column)
            for label, tile, n_rows in self._each_tile("score", first, end):
                left = LeftTile(self._kept("%left", tile, first, what.k), 1, what.tile)
                sums = self._summed(label, n_rows, left, weight, what.k)
                to = out.at(self._kept("%scores", tile, first, what.n), column)
                each = [(x, out.at(to, str(r * what.n))) for r, x in enumerate(sums)]
                out.store_masked(label, each, strip_mask)

    def _through_loop(self, batch: str, first: str, end: str) -> None:
        """Call the loop on the scores of a group, in place. It numbers rows across all batches, so
        the address of the scores is shifted accordingly.
        """
        out, what = self.out, self.what
        before = out.add(f"mul i64 {batch}, {what.m}")
        start = out.add(f"add i64 {before}, {out.add(f'mul i64 {first}, {what.tile}')}")
        stop = out.least(out.add(f"mul i64 {end}, {what.tile}"), str(what.m))
        stop = out.add(f"add i64 {before}, {stop}")
        skipped = out.add(f"sub i64 0, {out.add(f'mul i64 {start}, {what.n}')}")
        scores = out.at("%scores", skipped)
        places = [f"%p{2 + i}" for i in range(self.others)]
        places = [*places[: what.at], scores, *places[what.at :], scores]
        for i, place in enumerate(places):
            at = out.add(f"getelementptr ptr, ptr %inner, i64 {i}")
            out.raw(f"  store ptr {place}, ptr {at}")
        out.raw(f"  call void @{self.loop}(ptr %inner, i64 {start}, i64 {stop})")

    def _results(self, batch: str, first: str, end: str) -> None:
        out, what = self.out, self.what
        _, down, over = what.strides[3]
        with out.loop("made", "0", str(-(-what.d // STRIP))) as strip:
            weight = out.at("%second", out.add(f"mul i64 {strip}, {STRIP * what.n}"))
            column = out.add(f"mul i64 {strip}, {STRIP}")
            strip_mask = out.strip_mask(what.d, column)
            for label, tile, n_rows in self._each_tile("result", first, end):
                left = LeftTile(self._kept("%scores", tile, first, what.n), what.n, 1)
                sums = self._summed(label, n_rows, left, weight, what.n)
                row = out.add(f"mul i64 {tile}, {what.tile}")
                to = self._start(f"%p{self.others + 3}", 3, batch, row)
                to = out.at(to, out.add(f"mul i64 {column}, {over}"))
                each = [(x, out.at(to, str(r * down))) for r, x in enumerate(sums)]
                out.store_masked(label, each, strip_mask)

    def _summed(
        self, label: str, n_rows: int, left: LeftTile, weight: str, terms: int
    ) -> list[str]:
        return self.out.summed(label, [ZEROS] * n_rows, left, weight, (str(terms), terms))
