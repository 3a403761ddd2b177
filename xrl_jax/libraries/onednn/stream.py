"""LLVM IR for products of few rows with a weight.

Such a product uses each element of the weight once, and takes as long as reading the weight from
memory. So the weight is stored in strips of `STRIP` columns, the rows of a strip one after the
other, and a thread reads several strips in parallel: the processor prefetches in each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xrl_jax.libraries.onednn import curves
from xrl_jax.libraries.onednn.code import ELEMENTS, FMA, VECTOR, WIDE, ZEROS, Code, first
from xrl_jax.libraries.onednn.flow import STRIP
from xrl_jax.libraries.onednn.machine_code import SMALL, Kernel
from xrl_jax.libraries.onednn.spec import Dot, Epilogue, Instruction, Partition

MOST_ROWS = 8
_LEAST = 1 << 14  # elements of a weight that is worth packing in strips
_STREAMS = 8  # strips read in parallel, at most
_SUMS = 24  # accumulators (vectors), at most
_RUN = 512  # rows of the weight that are summed separately


def uses_strips(partition: Partition, i: Instruction) -> bool:
    """Return whether an instruction is a product with a weight packed in strips.

    It is computed by this module or by `blocked`.
    """
    if not isinstance(i.op, Dot) or not partition.is_packed(i.args[1]):
        return False
    is_large = math.prod(partition.shape(i.args[1])) >= _LEAST
    # The library has no product of float32 with a narrower type.
    return len(i.shape) == 2 and (is_large or i.op.right != "float32")


@dataclass(frozen=True)
class Streamed:
    """Product [rows, k] by [k, n], then a bias [n] and an addend [rows, n].

    The first operand is stored [k, rows], the weight in strips [strips, k, STRIP], of which the
    last may have fewer columns than it has room for.

    Attributes:
      weight: type of the weight's elements.
    """

    rows: int
    k: int
    n: int
    after: Epilogue
    weight: str = "float32"

    @property
    def strips(self) -> int:
        return -(-self.n // STRIP)

    @property
    def streams(self) -> int:
        """Number of strips that are read in parallel."""
        return min(_STREAMS, _SUMS // self.rows, self.strips)

    @property
    def groups(self) -> int:
        """Number of groups of `streams` strips; the last may have fewer."""
        return -(-self.strips // self.streams)

    @property
    def last(self) -> int:
        """Index of the result among the arguments."""
        return 2 + self.after.bias + self.after.addend

    def text(self, name: str) -> str:
        """Return the definition of `name`(table, first group, group after the last)."""
        out = Code()
        with (
            out.function(f"void @{name}(ptr %table, i64 %from, i64 %to) {WIDE}", self.last + 1),
            out.loop("group", "%from", "%to") as group,
        ):
            strip = out.add(f"mul i64 {group}, {self.streams}")
            column = out.add(f"mul i64 {strip}, {STRIP}")
            start = out.add(f"mul i64 {strip}, {self.k * STRIP}")
            weights = out.at("%p1", start, ELEMENTS[self.weight])
            is_last = out.add(f"icmp eq i64 {group}, {self.groups - 1}")
            with out.only_if("all", out.opposite(is_last)):
                self._group(out, "all", column, weights, self.streams, None)
            with out.only_if("few", is_last):
                left = self.strips - (self.groups - 1) * self.streams
                mask = first(self.n % STRIP) if self.n % STRIP else None
                self._group(out, "few", column, weights, left, mask)
        return out.text

    def _group(
        self, out: Code, label: str, column: str, weights: str, streams: int, mask: str | None
    ) -> None:
        """Write the results of `streams` strips from a column on; `mask` cuts the last of them.

        `_RUN` rows of the weight are summed at a time: a single sum of thousands of terms loses
        digits.
        """
        keys = [(row, s) for row in range(self.rows) for s in range(streams)]
        zeros = [ZEROS] * len(keys)

        def add_row(k: str, sums: Sequence[str]) -> list[str]:
            return self._with_row(out, k, weights, dict(zip(keys, sums, strict=True)))

        def add_run(start: str, totals: Sequence[str]) -> list[str]:
            end = out.least(out.add(f"add i64 {start}, {_RUN}"), str(self.k))
            sums = out.carried(f"{label}_row", start, end, "1", zeros, add_row)
            pairs = zip(totals, sums, strict=True)
            return [out.add(f"fadd {VECTOR} {total}, {x}") for total, x in pairs]

        totals = out.carried(f"{label}_run", "0", str(self.k), str(_RUN), zeros, add_run)
        for (row, s), total in zip(keys, totals, strict=True):
            start = out.add(f"add i64 {column}, {s * STRIP}")
            self._store(out, total, row, start, mask if s == streams - 1 else None)

    def _with_row(
        self, out: Code, k: str, weights: str, sums: Mapping[tuple[int, int], str]
    ) -> list[str]:
        """Return the sums, by row of the result and strip, with row `k` of the weight added."""
        line = out.add(f"mul i64 {k}, {STRIP}")
        start = out.add(f"mul i64 {k}, {self.rows}")
        rows, strips = (dict.fromkeys(key[i] for key in sums) for i in (0, 1))
        factors = {
            row: out.load_one(out.at("%p0", out.add(f"add i64 {start}, {row}"))) for row in rows
        }
        each = {}
        for s in strips:
            place = out.add(f"add i64 {line}, {s * self.k * STRIP}")
            at = out.at(weights, place, ELEMENTS[self.weight])
            each[s] = out.load_widened(at, self.weight)
        return [
            out.add(f"{FMA}({VECTOR} {each[s]}, {VECTOR} {factors[row]}, {VECTOR} {x})")
            for (row, s), x in sums.items()
        ]

    def _store(self, out: Code, value: str, row: int, start: str, mask: str | None) -> None:
        """Apply the epilogue to a row's sums of the strip at column `start`, and store them."""
        at = out.add(f"add i64 {start}, {row * self.n}")
        if self.after.bias:
            value = out.add(f"fadd {VECTOR} {value}, {out.load(out.at('%p2', start), mask)}")
        if self.after.addend:
            addend = out.load(out.at(f"%p{self.last - 1}", at), mask)
            value = out.add(f"fadd {VECTOR} {value}, {addend}")
        if self.after.clip is not None:
            value = curves.clipped(out, self.after.clip, value)
        out.store(value, out.at(f"%p{self.last}", at), mask)


def kernel_of(what: Streamed, name: str) -> Kernel:
    """Return the kernel of a product, whose parts are the groups of strips."""
    return Kernel(what.text(name), what.groups, what.k * what.n < SMALL)
