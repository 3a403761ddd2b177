"""LLVM IR for loops: elementwise functions and reductions of rows.

A loop works on independent rows of one length, which threads share. There is one pass over a row
for the reductions that depend on no other, one for those that depend on these, and so on, and one
for the result. Values that several passes need are recomputed, except for expensive ones, which the
first pass keeps in memory. Values are vectors of `WIDTH` elements; a value that a row has only one
of (a mean) is a vector of equal elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from xrl_jax.libraries.onednn import curves
from xrl_jax.libraries.onednn.code import VECTOR, WIDE, WIDTH, Code, constant, first
from xrl_jax.libraries.onednn.machine_code import SMALL, Kernel
from xrl_jax.libraries.onednn.spec import (
    REDUCTIONS,
    Instruction,
    Loop,
    Map,
    Reduce,
    Repeat,
    Reshape,
    Shape,
)

_FLAT = 2048  # columns, at most, of a flattened loop
_EXPENSIVE = ("exp", "tanh", "logistic", "erf", "erfc", "div", "rsqrt", "sqrt")


def kernel_of(loop: Loop, name: str) -> Kernel:
    """Return the kernel of a loop, whose parts are the rows."""
    few = loop.rows * loop.columns < SMALL
    return Kernel(function(loop, name), loop.rows, few)


def function(loop: Loop, name: str) -> str:
    """Return the definition of `name`(table, first row, row after the last).

    Its result may be where an argument of the same shape is.
    """
    return _Rows(loop).text(name)


def flattened(loop: Loop) -> Loop | None:
    """Return the loop on flattened arrays, which may have any layout that they share.

    None if it is not elementwise, broadcasts an argument, or the size is no multiple of `WIDTH`.
    """
    shape = loop.code[-1].shape
    if any(isinstance(i.op, Reduce) or i.shape != shape for i in loop.code):
        return None
    if any(s != shape for s in loop.inputs):
        return None
    size = math.prod(shape)
    columns = next((c for c in range(_FLAT, 0, -WIDTH) if size % c == 0), None)
    if columns is None:
        return None
    flat = size // columns, columns
    code = tuple(replace(i, shape=flat) for i in loop.code)
    return Loop(*flat, (flat,) * len(loop.inputs), code)


def transposed(loop: Loop, order: Sequence[int]) -> Loop | None:
    """Return the loop on arrays with axes in this order; None where it is not elementwise."""
    shape = loop.code[-1].shape
    if any(isinstance(i.op, Reduce | Reshape) or i.shape != shape for i in loop.code):
        return None
    if any(len(s) != len(shape) for s in loop.inputs):
        return None

    def moved(shape: Shape) -> Shape:
        return tuple(shape[a] for a in order)

    new = moved(shape)
    code = tuple(
        replace(i, op=Repeat(new) if isinstance(i.op, Repeat) else i.op, shape=new)
        for i in loop.code
    )
    return Loop(math.prod(new[:-1]), new[-1], tuple(map(moved, loop.inputs)), code)


@dataclass
class _Value:
    """The result of an instruction, and when it is computed."""

    instruction: Instruction
    phase: int  # the first pass in which it is available
    is_row: bool  # a row has one element of it
    expensive: bool  # an expensive operator is involved
    first: int = -1  # the first pass that computes it


@dataclass
class _Rows:
    """Writer of the function for a range of rows."""

    loop: Loop
    out: Code = field(default_factory=Code)
    values: dict[int, _Value] = field(default_factory=dict)
    row_values: dict[int, str] = field(default_factory=dict)  # the vectors of the current row
    offsets: dict[tuple, str] = field(default_factory=dict)
    kept: dict[int, str] = field(default_factory=dict)  # memory for one row of a value
    row: str = ""  # index of the current row

    @property
    def columns(self) -> int:
        return self.loop.columns

    def is_whole(self, shape: Shape) -> bool:
        """Return whether an array of this shape has an element for each column of each row."""
        return math.prod(shape) == self.loop.rows * self.loop.columns

    def text(self, name: str) -> str:
        """Return the definition of `name`(table, first row, row after the last)."""
        self._find_phases()
        n_inputs, last, out = len(self.loop.inputs), self.last, self.out
        head = f"void @{name}(ptr %table, i64 %from, i64 %to) {WIDE}"
        with out.function(head, n_inputs + 1):
            for number in self.kept:
                size = -(-self.columns // WIDTH) * WIDTH
                out.raw(f"  %kept{number} = alloca [{size} x float], align 64")
            with out.loop("row", "%from", "%to") as self.row:
                for phase in range(self.values[last].phase + 1):
                    self._pass(phase)
                if self.values[last].is_row:
                    self._store_row(last)
        return out.text

    # --- analysis ---

    @property
    def last(self) -> int:
        return len(self.loop.inputs) + len(self.loop.code) - 1

    def _find_phases(self) -> None:
        """Find from which pass on each value is available, and which are kept for later passes."""
        n = len(self.loop.inputs)
        for at, i in enumerate(self.loop.code):
            own = [self.values[a] for a in i.args if a >= n]
            phase = max((v.phase for v in own), default=0)
            if isinstance(i.op, Reduce):
                value = _Value(i, phase + 1, True, False)
            else:
                is_row = not self.is_whole(i.shape) or (
                    self.columns == 1 and bool(own) and all(v.is_row for v in own)
                )
                kind = i.op.kind if isinstance(i.op, Map) else getattr(i.op, "kind", "")
                expensive = kind in _EXPENSIVE or any(v.expensive and not v.is_row for v in own)
                value = _Value(i, phase, is_row, expensive)
            self.values[n + at] = value
        for phase in range(self.values[self.last].phase + 1):
            for number in self._needed(phase):
                v = self.values[number]
                if v.first < 0:
                    v.first = phase
                elif v.expensive:
                    self.kept[number] = f"%kept{number}"

    def _reductions(self, phase: int) -> list[int]:
        """Return the reductions that this pass computes."""
        return [
            number
            for number, v in self.values.items()
            if isinstance(v.instruction.op, Reduce) and v.phase == phase + 1
        ]

    def _roots(self, phase: int) -> list[int]:
        """Return the values that a pass reduces or stores as the result."""
        roots = [self.values[r].instruction.args[0] for r in self._reductions(phase)]
        last = self.values[self.last]
        if last.phase == phase and not last.is_row:
            roots.append(self.last)
        return roots

    def _needed(self, phase: int) -> list[int]:
        """Return the whole-row values that a pass uses, not looking past those it reads as kept."""
        found: list[int] = []
        stack = [r for r in self._roots(phase) if r in self.values]
        while stack:
            number = stack.pop()
            v = self.values[number]
            if v.is_row or number in found:
                continue
            found.append(number)
            if number not in self.kept or v.first == phase:
                stack += [a for a in v.instruction.args if a in self.values]
        return found

    # --- passes ---

    def _pass(self, phase: int) -> None:
        for number, v in self.values.items():
            if v.is_row and v.phase <= phase and number not in self.row_values:
                self._row(number)
        roots = self._roots(phase)
        if not roots:
            return
        out, reductions = self.out, self._reductions(phase)
        self._offsets_before(phase)
        whole = self.columns // WIDTH * WIDTH
        totals = [constant(REDUCTIONS[self._kind(r)][0]) for r in reductions]
        if whole:

            def columns(j: str, totals: Sequence[str]) -> list[str]:
                return self._columns(phase, j, totals, None)

            totals = out.carried(f"pass{phase}", "0", str(whole), str(WIDTH), totals, columns)
        if self.columns > whole:
            totals = self._columns(phase, str(whole), totals, first(self.columns - whole))
        for r, total in zip(reductions, totals, strict=True):
            self.row_values[r] = curves.folded(out, self._kind(r), total)

    def _kind(self, reduction: int) -> str:
        op = self.values[reduction].instruction.op
        assert isinstance(op, Reduce)
        return op.kind

    def _columns(self, phase: int, j: str, totals: Sequence[str], mask: str | None) -> list[str]:
        """Process the columns from `j` on that the mask selects; store their part of the result.

        Returns the totals of the reductions with these columns included.
        """
        memo: dict[int, str] = {}
        found = []
        for r, total in zip(self._reductions(phase), totals, strict=True):
            i = self.values[r].instruction
            x = self._operand(i.args[0], self._read_as(i, i.args[0]), phase, j, mask, memo)
            kind = self._kind(r)
            if mask is not None:
                x = curves.only(self.out, x, mask, REDUCTIONS[kind][0])
            found.append(curves.combined(self.out, kind, total, x))
        if self.last in self._roots(phase):
            x = self._operand(self.last, (), phase, j, mask, memo)
            n = self._start(self.values[self.last].instruction.shape, None)
            self.out.store(x, self._address(f"%p{len(self.loop.inputs)}", n, j), mask)
        return found

    def _operand(
        self, number: int, shape: Shape, phase: int, j: str, mask: str | None, memo: dict[int, str]
    ) -> str:
        """Return a value's vector from column `j` on; an argument is read with this shape."""
        if number not in self.values:
            return self._outer(number, shape, j, mask)
        v = self.values[number]
        if v.is_row:
            return self.row_values[number]
        if number not in memo:
            if number in self.kept and v.first != phase:
                memo[number] = self.out.load(self._address(self.kept[number], "0", j), mask)
            else:
                i = v.instruction
                xs = [self._operand(a, self._read_as(i, a), phase, j, mask, memo) for a in i.args]
                memo[number] = curves.computed(self.out, i, xs)
                if number in self.kept:
                    self.out.store(memo[number], self._address(self.kept[number], "0", j), mask)
        return memo[number]

    def _row(self, number: int) -> None:
        """Compute a value that a row has one element of."""
        v = self.values[number]
        if isinstance(v.instruction.op, Reduce):
            return  # computed at the end of a pass
        xs = []
        for a in v.instruction.args:
            if a in self.values:
                xs.append(self.row_values[a])
            else:
                start = self._start(self._read_as(v.instruction, a), a)
                at = self._address(f"%p{a}", start, "0")
                xs.append(self.out.load_one(at))
        self.row_values[number] = curves.computed(self.out, v.instruction, xs)

    def _store_row(self, number: int) -> None:
        x = self.out.add(f"extractelement {VECTOR} {self.row_values[number]}, i64 0")
        at = self._address(f"%p{len(self.loop.inputs)}", self.row, "0")
        self.out.raw(f"  store float {x}, ptr {at}, align 4")

    # --- memory ---

    def _outer(self, number: int, shape: Shape, j: str, mask: str | None) -> str:
        """Return the vector of an argument that is read as an array of this shape."""
        start = self._start(shape, number)
        if self.loop.inputs[number][-1] == 1 and shape[-1] != 1:
            return self.out.load_one(self._address(f"%p{number}", start, "0"))
        return self.out.load(self._address(f"%p{number}", start, j), mask)

    def _read_as(self, i: Instruction, number: int) -> Shape:
        """Return the shape that an operator reads an argument as, which may broadcast it."""
        if number in self.values or not isinstance(i.op, Reshape | Reduce):
            return i.shape
        return self.loop.inputs[number]

    def _offsets_before(self, phase: int) -> None:
        """Compute the offsets of rows before the loop over columns that uses them."""
        for number in self._needed(phase):
            i = self.values[number].instruction
            for a in i.args:
                if a not in self.values:
                    self._start(self._read_as(i, a), a)
        if self.last in self._roots(phase):
            self._start(self.values[self.last].instruction.shape, None)
        for r in self._reductions(phase):
            i = self.values[r].instruction
            if i.args[0] not in self.values:
                self._start(self._read_as(i, i.args[0]), i.args[0])

    def _start(self, shape: Shape, number: int | None) -> str:
        """Return the index of the element at which the current row begins in an argument.

        The argument is read as an array of this shape. If `number` is None, it is the result.
        """
        if number is None:
            return self._computed_once(("result",), lambda: self._times(self.row, self.columns))
        own = self.loop.inputs[number]
        is_rows = math.prod(shape) == self.loop.rows
        last = len(shape) if is_rows else len(shape) - 1  # axes that make the rows
        inner = 1 if is_rows else own[-1]
        if own[:last] == shape[:last]:
            return self._computed_once(("rows", inner), lambda: self._times(self.row, inner))
        return self._computed_once(
            ("broadcast", own[:last], shape[:last], inner),
            lambda: self._of_axes(own[:last], shape[:last], inner),
        )

    def _of_axes(self, own: Shape, shape: Shape, stride: int) -> str:
        """Return that index where some axes of the argument (`own`) are broadcast to `shape`."""
        total, left = "0", self.row
        for n, size in zip(reversed(own), reversed(shape), strict=True):
            if n != 1:
                index = self.out.add(f"urem i64 {left}, {size}")
                total = self.out.add(f"add i64 {total}, {self._times(index, stride)}")
                stride *= n
            left = self.out.add(f"udiv i64 {left}, {size}")
        return total

    def _computed_once(self, key: tuple, compute: Callable[[], str]) -> str:
        if key not in self.offsets:
            self.offsets[key] = compute()
        return self.offsets[key]

    def _times(self, x: str, n: int) -> str:
        return self.out.add(f"mul i64 {x}, {n}")

    def _address(self, base: str, start: str, j: str) -> str:
        at = start if j == "0" else self.out.add(f"add i64 {start}, {j}")
        return self.out.add(f"getelementptr float, ptr {base}, i64 {at}")
