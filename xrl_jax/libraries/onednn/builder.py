"""Steps of a call as they are made: values in their layouts, and memory between the steps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from xrl_jax.libraries.onednn.c_api import (
    DST,
    SCRATCHPAD,
    SRC,
    Desc,
    Library,
    Prim,
    UnimplementedError,
)
from xrl_jax.libraries.onednn.native import Later, Own, Place
from xrl_jax.libraries.onednn.spec import Shape

_ALIGNED = 64  # bytes


@dataclass
class Block:
    """Memory between steps: bytes, and the steps that it has to last from and to."""

    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Part:
    """What begins so many bytes after a block."""

    block: Block
    offset: int


Where = Place | Block | Part
What = int | Later | Own  # a primitive, or what code of ours computes


def block_of(place: Block | Part) -> Block:
    return place.block if isinstance(place, Part) else place


@dataclass
class Value:
    """An array: its layout, in the order of its axes, and where it lies."""

    desc: Desc
    place: Where


@dataclass
class Builder:
    """Steps and the values they have made so far."""

    lib: Library
    values: list[Value] = field(default_factory=list)
    steps: list[tuple[What, list[tuple[int, Desc, Where]]]] = field(default_factory=list)

    # --- memory ---

    def block(self, desc: Desc) -> Block:
        now = len(self.steps)
        return Block(self.lib.nbytes(desc), now, now)

    def run(self, prim: Prim, args: Sequence[tuple[int, Value]]) -> None:
        """Append a step; it lengthens the life of what it reads and writes."""
        listed: list[tuple[int, Desc, Where]] = [(which, v.desc, v.place) for which, v in args]
        scratch = self.lib.of(prim, "scratchpad")
        if nbytes := self.lib.nbytes(scratch):
            listed.append((SCRATCHPAD, scratch, Block(nbytes, len(self.steps), len(self.steps))))
        self.append(self.primitive(prim), listed)

    def primitive(self, prim: Prim) -> What:
        """What can be executed."""
        return self.lib.primitive(prim)

    def append(self, what: What, listed: list[tuple[int, Desc, Where]]) -> None:
        for _, _, place in listed:
            if not isinstance(place, Place):
                block_of(place).last = len(self.steps)
        self.steps.append((what, listed))

    def result(self, desc: Desc, output: Place | None) -> Value:
        return Value(desc, output or self.block(desc))

    # --- layouts ---

    def as_laid_out(self, value: Value, desc: Desc) -> Value:
        """The same array in another layout, or where it is."""
        if self.lib.equal(value.desc, desc):
            # Strides of axes of size 1 may differ, and the library has no good kernel for any but
            # those that it would choose itself.
            return Value(desc, value.place)
        moved = Value(desc, self.block(desc))
        self.run(self.lib.reorder(value.desc, desc), [(SRC, value), (DST, moved)])
        return moved

    def row_major(self, values: Sequence[Value], shapes: Sequence[Shape]) -> list[Value]:
        """The same arrays, row-major."""
        pairs = zip(values, shapes, strict=True)
        return [self.as_laid_out(v, self.lib.desc(s)) for v, s in pairs]

    def wanted(self, shape: Sequence[int], order: Sequence[int], output: Place | None) -> Desc:
        """The layout of a result with axes in this order: what the library likes, or the one that
        is row-major in the order of `shape` where it is returned.
        """
        if output is None:
            return self.lib.any_desc([shape[a] for a in order])
        return self.lib.permuted(self.lib.desc(shape), order)

    def reshaped(self, x: Value, shape: Shape, new: Shape) -> Value:
        """The same numbers in another shape: where they lie, if the layout allows it."""
        with contextlib.suppress(UnimplementedError):
            return Value(self.lib.reshaped(x.desc, new), x.place)
        return Value(self.lib.desc(new), self.as_laid_out(x, self.lib.desc(shape)).place)

    def turned(self, value: Value, order: Sequence[int]) -> Value:
        return Value(self.lib.permuted(value.desc, order), value.place)


def laid_out(blocks: Sequence[Block]) -> tuple[list[int], int]:
    """Offsets of the blocks, none over another that lives at the same time; and bytes in all.

    First fit, largest first.
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
