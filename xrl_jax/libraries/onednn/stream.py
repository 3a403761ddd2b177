"""Machine code for products of few rows with a weight, as LLVM's intermediate language.

Such a product takes each number of the weight once, and as long as memory takes to bring it. So the
weight lies in strips of `STRIP` columns, the rows of a strip one after the other, and a thread
reads several strips side by side: the processor fetches ahead in each of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from xrl_jax.libraries.onednn import curves
from xrl_jax.libraries.onednn.curves import FMA, INTRINSICS, VECTOR, Code
from xrl_jax.libraries.onednn.flow import STRIP
from xrl_jax.libraries.onednn.machine_code import SMALL, WIDE, Parallel, shared_out
from xrl_jax.libraries.onednn.spec import Dot, Epilogue, Instruction, Partition

MOST_ROWS = 8
_LEAST = 1 << 14  # numbers of a weight that is worth strips
_STREAMS = 8  # strips side by side, at most
_SUMS = 24  # vectors, at most, that are added up at once
_RUN = 512  # rows of the weight


def in_strips(partition: Partition, i: Instruction) -> bool:
    """Whether an instruction is a product with a weight that is packed in strips, here or by
    `blocked`.
    """
    if not isinstance(i.op, Dot) or not partition.is_packed(i.args[1]):
        return False
    return len(i.shape) == 2 and math.prod(partition.shape(i.args[1])) >= _LEAST


@dataclass(frozen=True)
class Streamed:
    """[rows, k] by [k, n], the first stored [k, rows], the weight in strips [strips, k, STRIP] of
    which the last may have fewer columns than it has room for; then a bias [n] and an addend
    [rows, n].
    """

    rows: int
    k: int
    n: int
    after: Epilogue

    @property
    def strips(self) -> int:
        return -(-self.n // STRIP)

    @property
    def streams(self) -> int:
        """Strips that are read side by side."""
        return min(_STREAMS, _SUMS // self.rows, self.strips)

    @property
    def groups(self) -> int:
        """Of so many strips; the last may have fewer."""
        return -(-self.strips // self.streams)

    @property
    def last(self) -> int:
        """The number of the result among the arguments."""
        return 2 + self.after.bias + self.after.addend

    def text(self, name: str) -> str:
        """The definition of `name`(table, first group, group after the last)."""
        out = Code()
        out.raw(f"define void @{name}(ptr %table, i64 %from, i64 %to) {WIDE} {{\nentry:")
        for i in range(self.last + 1):
            out.raw(f"  %p{i}_at = getelementptr ptr, ptr %table, i64 {i}")
            out.raw(f"  %p{i} = load ptr, ptr %p{i}_at")
        out.raw("  br label %group\ngroup:\n  %g = phi i64 [%from, %entry], [%g_next, %done]")
        out.raw("  %more = icmp slt i64 %g, %to\n  br i1 %more, label %work, label %end\nwork:")
        out.raw(f"  %strip = mul i64 %g, {self.streams}\n  %column = mul i64 %strip, {STRIP}")
        start = out.add(f"mul i64 %strip, {self.k * STRIP}")
        out.raw(f"  %own = getelementptr float, ptr %p1, i64 {start}")
        out.raw(f"  %is_last = icmp eq i64 %g, {self.groups - 1}")
        out.raw("  br i1 %is_last, label %few, label %all")
        left = self.strips - (self.groups - 1) * self.streams
        self._group(out, "all", self.streams, None)
        self._group(out, "few", left, self.n % STRIP or None)
        out.raw("done:\n  %g_next = add i64 %g, 1\n  br label %group\nend:\n  ret void\n}")
        return out.text

    def _group(self, out: Code, label: str, streams: int, some: int | None) -> None:
        """The results of so many strips; the last of them has `some` columns.

        `_RUN` rows of the weight are summed up at a time: with thousands of terms, a single sum
        loses digits.
        """
        keys = [(row, s) for row in range(self.rows) for s in range(streams)]
        totals = {key: f"%{label}_total{key[0]}_{key[1]}" for key in keys}
        sums = {key: f"%{label}_sum{key[0]}_{key[1]}" for key in keys}
        start, k, end = f"%{label}_start", f"%{label}_k", f"%{label}_end"
        out.raw(f"{label}:\n  br label %{label}_run\n{label}_run:")
        out.raw(f"  {start} = phi i64 [0, %{label}], [{end}, %{label}_ran]")
        for x in totals.values():
            out.raw(f"  {x} = phi {VECTOR} [zeroinitializer, %{label}], [{x}_next, %{label}_ran]")
        out.raw(f"  %{label}_more = icmp slt i64 {start}, {self.k}")
        out.raw(f"  br i1 %{label}_more, label %{label}_begin, label %{label}_after")
        out.raw(f"{label}_begin:\n  %{label}_far = add i64 {start}, {_RUN}")
        out.raw(f"  %{label}_is_far = icmp sgt i64 %{label}_far, {self.k}")
        out.raw(f"  {end} = select i1 %{label}_is_far, i64 {self.k}, i64 %{label}_far")
        out.raw(f"  br label %{label}_head\n{label}_head:")
        out.raw(f"  {k} = phi i64 [{start}, %{label}_begin], [{k}_next, %{label}_body]")
        for x in sums.values():
            first = f"[zeroinitializer, %{label}_begin]"
            out.raw(f"  {x} = phi {VECTOR} {first}, [{x}_next, %{label}_body]")
        out.raw(f"  %{label}_going = icmp slt i64 {k}, {end}")
        out.raw(f"  br i1 %{label}_going, label %{label}_body, label %{label}_ran")
        out.raw(f"{label}_body:")
        self._add(out, k, sums)
        out.raw(f"  {k}_next = add i64 {k}, 1\n  br label %{label}_head\n{label}_ran:")
        for key in keys:
            out.raw(f"  {totals[key]}_next = fadd {VECTOR} {totals[key]}, {sums[key]}")
        out.raw(f"  br label %{label}_run\n{label}_after:")
        for row, s in keys:
            self._store(out, totals[row, s], row, s, some if s == streams - 1 else None)
        out.raw("  br label %done")

    def _add(self, out: Code, k: str, sums: Mapping[tuple[int, int], str]) -> None:
        """Row `k` of the weight to the sums, by row of the result and strip."""
        line = out.add(f"mul i64 {k}, {STRIP}")
        first = out.add(f"mul i64 {k}, {self.rows}")
        factors: dict[int, str] = {}
        weights: dict[int, str] = {}
        for (row, s), x in sums.items():
            if row not in factors:
                at = out.add(f"add i64 {first}, {row}")
                factors[row] = out.load_one(out.add(f"getelementptr float, ptr %p0, i64 {at}"))
            if s not in weights:
                at = out.add(f"add i64 {line}, {s * self.k * STRIP}")
                place = out.add(f"getelementptr float, ptr %own, i64 {at}")
                weights[s] = out.load(place, None)
            operands = f"{VECTOR} {weights[s]}, {VECTOR} {factors[row]}, {VECTOR} {x}"
            out.raw(f"  {x}_next = {FMA}({operands})")

    def _store(self, out: Code, value: str, row: int, strip: int, some: int | None) -> None:
        """A row's sums of a strip of the group, with what follows."""

        def place(argument: int, start: int) -> str:
            at = out.add(f"add i64 %column, {start + strip * STRIP}")
            return out.add(f"getelementptr float, ptr %p{argument}, i64 {at}")

        if self.after.bias:
            value = out.add(f"fadd {VECTOR} {value}, {out.load(place(2, 0), some)}")
        if self.after.addend:
            addend = out.load(place(self.last - 1, row * self.n), some)
            value = out.add(f"fadd {VECTOR} {value}, {addend}")
        if self.after.clip is not None:
            value = curves.clipped(out, self.after.clip, value)
        out.store(value, place(self.last, row * self.n), some)


def code_of(what: Streamed, name: str, parallel: Parallel | None) -> str:
    """A module with the function `name`(table): all of it, with the addresses of the arguments and
    of the result in the table.
    """
    shared = shared_out(name, what.groups, None if what.k * what.n < SMALL else parallel)
    return INTRINSICS + what.text(f"{name}_rows") + shared
