"""LLVM IR that converts an array from a narrow type to float32."""

from __future__ import annotations

from dataclasses import dataclass

from xrl_jax.libraries.onednn.code import ELEMENTS, WIDE, WIDTH, Code
from xrl_jax.libraries.onednn.machine_code import SMALL, Kernel

_BLOCK = 256  # vectors that a thread converts at a time


@dataclass(frozen=True)
class Converted:
    """`n` adjacent elements of type `dtype`, in float32."""

    n: int
    dtype: str

    def text(self, name: str) -> str:
        """Return the definition of `name`(table, first block, block after the last).

        The elements that are left after the last whole vector belong to the last block: a vector
        that ends with them converts some others again. There is at least one whole vector.
        """
        out, kind = Code(), ELEMENTS[self.dtype]
        vectors = self.n // WIDTH

        def convert(start: str) -> None:
            x = out.load_widened(out.at("%p0", start, kind), self.dtype)
            out.store(x, out.at("%p1", start))

        with out.function(f"void @{name}(ptr %table, i64 %from, i64 %to) {WIDE}", 2):
            first = out.add(f"mul i64 %from, {_BLOCK}")
            end = out.least(out.add(f"mul i64 %to, {_BLOCK}"), str(vectors))
            with out.loop("vector", first, end) as v:
                convert(out.add(f"mul i64 {v}, {WIDTH}"))
            if self.n % WIDTH:
                with out.only_if("rest", out.add(f"icmp eq i64 %to, {self.blocks}")):
                    convert(str(self.n - WIDTH))
        return out.text

    @property
    def blocks(self) -> int:
        return -(-(self.n // WIDTH) // _BLOCK)


def kernel_of(what: Converted, name: str) -> Kernel:
    """Return the kernel, whose parts are the blocks."""
    return Kernel(what.text(name), what.blocks, what.n < SMALL)
