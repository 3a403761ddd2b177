"""The steps of a call while they are built: values in their layouts, and memory between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xrl_jax.libraries.onednn.c_api import (
    DST,
    SCRATCHPAD,
    SRC,
    Desc,
    Library,
    Prim,
    UnimplementedError,
)
from xrl_jax.libraries.onednn.native import Generated, Later, Place
from xrl_jax.libraries.onednn.server import MOST_ARGUMENTS
from xrl_jax.libraries.onednn.spec import Shape

_ALIGNED = 64  # bytes


@dataclass
class Block:
    """Temporary memory: its size in bytes, and the first and the last step that use it."""

    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Part:
    """Memory that begins `offset` bytes after the start of a block."""

    block: Block
    offset: int


Location = Place | Block | Part
Executable = int | Later | Generated  # a primitive, or the description of generated code


def block_of(place: Block | Part) -> Block:
    return place.block if isinstance(place, Part) else place


def _memory_of(place: Block | Part) -> tuple[int, int]:
    """Return the block's identity, and the offset into it."""
    return id(block_of(place)), place.offset if isinstance(place, Part) else 0


@dataclass
class Value:
    """An array: its layout, in the order of its axes, and where it is stored."""

    desc: Desc
    place: Location


class _Copy(NamedTuple):
    """A copy of an array in another layout, and the number of steps after which it is there."""

    original: Value  # held, because `copies` knows its memory by id
    copy: Value
    n_steps: int


@dataclass
class Builder:
    """The steps so far, and the values that they compute.

    Attributes:
      copies: arrays in other layouts, for further readers.
    """

    lib: Library
    values: list[Value] = field(default_factory=list)
    steps: list[tuple[Executable, list[tuple[int, Desc, Location]]]] = field(default_factory=list)
    copies: dict[Hashable, _Copy] = field(default_factory=dict)

    # --- memory ---

    def block(self, desc: Desc) -> Block:
        now = len(self.steps)
        return Block(self.lib.nbytes(desc), now, now)

    def run(self, prim: Prim, args: Sequence[tuple[int, Value]]) -> None:
        """Append a step; the blocks that it reads and writes have to last until then."""
        listed: list[tuple[int, Desc, Location]] = [(which, v.desc, v.place) for which, v in args]
        scratch = self.lib.of(prim, "scratchpad")
        if nbytes := self.lib.nbytes(scratch):
            listed.append((SCRATCHPAD, scratch, Block(nbytes, len(self.steps), len(self.steps))))
        if len(listed) > MOST_ARGUMENTS:
            raise UnimplementedError(f"a primitive has {len(listed)} arguments, which is too many")
        self.append(self.primitive(prim), listed)

    def primitive(self, prim: Prim) -> Executable:
        """Return what a step executes for a primitive descriptor."""
        return self.lib.primitive(prim)

    def forget_steps(self, n_steps: int) -> None:
        """Remove the steps after the first `n_steps`."""
        del self.steps[n_steps:]
        self.copies = {k: c for k, c in self.copies.items() if c.n_steps <= n_steps}

    def append(self, executable: Executable, args: list[tuple[int, Desc, Location]]) -> None:
        for _, _, place in args:
            if not isinstance(place, Place):
                block_of(place).last = len(self.steps)
        self.steps.append((executable, args))

    def result(self, desc: Desc, output: Place | None) -> Value:
        return Value(desc, output or self.block(desc))

    # --- layouts ---

    def to_layout(self, value: Value, desc: Desc) -> Value:
        """Return the array in another layout; without a copy if it has that layout already, or
        there is one.
        """
        if self.lib.equal(value.desc, desc):
            # Equal layouts may differ in the strides of axes of size 1, and the library has good
            # kernels only for the strides that it would choose itself.
            return Value(desc, value.place)
        at = value.place
        place = at if isinstance(at, Place) else _memory_of(at)
        key = place, *((self.lib.layout(d), self.lib.dtype(d)) for d in (value.desc, desc))
        if key not in self.copies:
            self.copies[key] = _Copy(value, self.new_copy(value, desc), len(self.steps))
        return Value(desc, self.copies[key].copy.place)

    def new_copy(self, value: Value, desc: Desc) -> Value:
        """Return a copy of the array in another layout, which no other step reads."""
        copy = Value(desc, self.block(desc))
        self.run(self.lib.reorder(value.desc, desc), [(SRC, value), (DST, copy)])
        return copy

    def row_major(self, values: Sequence[Value], shapes: Sequence[Shape]) -> list[Value]:
        """Return the arrays in row-major layout."""
        pairs = zip(values, shapes, strict=True)
        return [self.to_layout(v, self.lib.desc(s)) for v, s in pairs]

    def requested_layout(
        self,
        shape: Sequence[int],
        order: Sequence[int],
        output: Place | None,
        dtype: str = "float32",
    ) -> Desc:
        """Return the layout to request for a result with its axes in this order: the library's
        choice, or, if the call returns the result, the one that is row-major in the order of
        `shape`.
        """
        if output is None:
            return self.lib.any_desc([shape[a] for a in order], dtype)
        return self.lib.permuted(self.lib.desc(shape), order)

    def reshaped(self, x: Value, shape: Shape, new: Shape) -> Value:
        """Return the array in another shape, without a copy if the layout allows it."""
        with contextlib.suppress(UnimplementedError):
            return Value(self.lib.reshaped(x.desc, new), x.place)
        return Value(self.lib.desc(new), self.to_layout(x, self.lib.desc(shape)).place)

    def transposed(self, value: Value, order: Sequence[int]) -> Value:
        return Value(self.lib.permuted(value.desc, order), value.place)


def assign_offsets(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """Return the blocks' offsets and the bytes in all; blocks in use at a time do not overlap.

    The algorithm is first fit, largest first.
    """
    offsets = [0] * len(blocks)
    placed: list[int] = []
    for i in sorted(range(len(blocks)), key=lambda i: -blocks[i].nbytes):
        b = blocks[i]
        at = 0
        for j in sorted(placed, key=lambda j: offsets[j]):
            other = blocks[j]
            if other.first <= b.last and b.first <= other.last and offsets[j] < at + b.nbytes:
                at = max(at, -(-(offsets[j] + other.nbytes) // _ALIGNED) * _ALIGNED)
        offsets[i] = at
        placed.append(i)
    return offsets, max((o + b.nbytes for o, b in zip(offsets, blocks, strict=True)), default=0)
