"""LLVM IR that rounds an array to int8: its largest element, then its levels.

The largest element is found by parts, one for each block of elements. The levels of every block
are relative to the largest of all parts. Of an array that is not finite the factor is infinite and
the levels are 0: the product of the two sets the flag for which the call is run again (`flags`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xrl_jax.libraries.base import LEAST_SCALE, LEVELS
from xrl_jax.libraries.onednn.code import INTEGERS, VECTOR, WIDE, WIDTH, ZEROS, Code, digits
from xrl_jax.libraries.onednn.machine_code import SMALL, Kernel

_BLOCK = 1024  # vectors that a thread reads at a time
_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000  # bits of a float32


@dataclass(frozen=True)
class _Blocks:
    """`n` adjacent elements of float32, at least one whole vector, in blocks."""

    n: int

    @property
    def blocks(self) -> int:
        return -(-(self.n // WIDTH) // _BLOCK)

    def _bounds(self, out: Code, block: str) -> tuple[str, str]:
        """Return the first vector of a block and the one after its last."""
        first = out.add(f"mul i64 {block}, {_BLOCK}")
        return first, out.least(out.add(f"add i64 {first}, {_BLOCK}"), str(self.n // WIDTH))

    def _is_last(self, out: Code, block: str) -> str:
        return out.add(f"icmp eq i64 {block}, {self.blocks - 1}")


@dataclass(frozen=True)
class Largest(_Blocks):
    """The bits of the largest magnitude of each block; those of NaN are larger than any."""

    def text(self, name: str) -> str:
        """Return the definition of `name`(table, first block, block after the last)."""
        out = Code()

        def larger(start: str, than: str) -> str:
            return larger_magnitude(out, out.at("%p0", start), than)

        def with_vector(v: str, found: Sequence[str]) -> list[str]:
            return [larger(out.add(f"mul i64 {v}, {WIDTH}"), found[0])]

        head = f"void @{name}(ptr %table, i64 %from, i64 %to) {WIDE}"
        with out.function(head, 2), out.loop("block", "%from", "%to") as block:
            first, end = self._bounds(out, block)
            (most,) = out.carried("vector", first, end, "1", [ZEROS], with_vector, [INTEGERS])
            if self.n % WIDTH:  # a vector that ends with the rest reads some elements again
                with_rest = larger(str(self.n - WIDTH), most)
                is_last = self._is_last(out, block)
                most = out.add(f"select i1 {is_last}, {INTEGERS} {with_rest}, {INTEGERS} {most}")
            largest = largest_of(out, most)
            out.raw(f"  store i32 {largest}, ptr {out.at('%p1', block)}, align 4")
        return out.text


@dataclass(frozen=True)
class Levels(_Blocks):
    """The levels in int8, given the parts of `Largest`; their factor is the argument before."""

    def text(self, name: str) -> str:
        """Return the definition of `name`(table, first block, block after the last)."""
        out = Code()

        def larger(i: str, found: Sequence[str]) -> list[str]:
            part = out.add(f"load i32, ptr {out.at('%p1', i)}, align 4")
            more = out.add(f"icmp sgt i32 {part}, {found[0]}")
            return [out.add(f"select i1 {more}, i32 {part}, i32 {found[0]}")]

        with out.function(f"void @{name}(ptr %table, i64 %from, i64 %to) {WIDE}", 4):
            (bits,) = out.carried("part", "0", str(self.blocks), "1", ["0"], larger, ["i32"])
            is_finite, scale, inverse = factors(out, bits, LEVELS)
            with out.only_if("first", out.add("icmp eq i64 %from, 0")):
                out.raw(f"  store float {scale}, ptr %p2, align 4")

            def convert(start: str) -> None:
                x = out.at("%p0", start)
                narrow = rounded(out, x, inverse, is_finite, "i8")
                at = out.at("%p3", start, "i8")
                out.raw(f"  store <{WIDTH} x i8> {narrow}, ptr {at}, align 1")

            with out.loop("block", "%from", "%to") as block:
                first, end = self._bounds(out, block)
                with out.loop("vector", first, end) as v:
                    convert(out.add(f"mul i64 {v}, {WIDTH}"))
                if self.n % WIDTH:
                    with out.only_if("rest", self._is_last(out, block)):
                        convert(str(self.n - WIDTH))
        return out.text


def larger_magnitude(out: Code, at: str, than: str) -> str:
    """Return the larger of the bits of a vector's magnitudes and of others; those of NaN are larger
    than any.
    """
    mask = ", ".join([f"i32 {_MAGNITUDE}"] * WIDTH)
    bits = out.add(f"load {INTEGERS}, ptr {at}, align 4")
    size = out.add(f"and {INTEGERS} {bits}, <{mask}>")
    more = out.add(f"icmp sgt {INTEGERS} {size}, {than}")
    return out.add(f"select <{WIDTH} x i1> {more}, {INTEGERS} {size}, {INTEGERS} {than}")


def largest_of(out: Code, bits: str) -> str:
    """Return the largest integer of a vector."""
    return out.add(f"call i32 @llvm.vector.reduce.smax.v{WIDTH}i32({INTEGERS} {bits})")


def factors(out: Code, bits: str, most: int) -> tuple[str, str, str]:
    """Return whether the largest magnitude, given as bits, is finite; the factor with which `most`
    is that magnitude, which is infinite where it is not; and a vector of the factor's inverse.
    """
    is_finite = out.add(f"icmp slt i32 {bits}, {_INFINITY}")
    size = out.add(f"bitcast i32 {bits} to float")
    step = out.add(f"fdiv float {size}, {digits(most)}")
    least = digits(LEAST_SCALE)
    is_more = out.add(f"fcmp ogt float {step}, {least}")
    step = out.add(f"select i1 {is_more}, float {step}, float {least}")
    scale = out.add(f"select i1 {is_finite}, float {step}, float {digits(float('inf'))}")
    return is_finite, scale, out.splat(out.add(f"fdiv float {digits(1.0)}, {step}"))


def rounded(out: Code, at: str, inverse: str, is_finite: str, kind: str) -> str:
    """Return the levels of a vector as integers of an LLVM type; 0 where it is not finite."""
    x = out.add(f"select i1 {is_finite}, {VECTOR} {out.load(at)}, {VECTOR} {ZEROS}")
    x = out.add(f"fmul {VECTOR} {x}, {inverse}")
    x = out.add(f"call {VECTOR} @llvm.nearbyint.v{WIDTH}f32({VECTOR} {x})")
    whole = out.add(f"fptosi {VECTOR} {x} to {INTEGERS}")
    return out.add(f"trunc {INTEGERS} {whole} to <{WIDTH} x {kind}>")


def kernel_of(what: Largest | Levels, name: str) -> Kernel:
    """Return the kernel, whose parts are the blocks."""
    return Kernel(what.text(name), what.blocks, what.n < SMALL)
