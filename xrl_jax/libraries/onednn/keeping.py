"""Generated code for clipping and for the largest values of windows that preserves NaN, as LLVM IR.

It runs mainly where the library's kernels met NaN (`flags`), so it is compiled once for all sizes,
which are passed to it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from xrl_jax.libraries.onednn import curves
from xrl_jax.libraries.onednn.code import DECLARATIONS, WIDE, WIDTH, Code, digits
from xrl_jax.libraries.onednn.spec import Clip


@dataclass(frozen=True)
class Clipped:
    """Clips the `n` elements of one array into a second one, which may be the same."""

    n: int
    clip: Clip

    @property
    def name(self) -> str:
        return "clipped"

    @property
    def parameters(self) -> list[int]:
        """The integers that are passed to the code."""
        low = -math.inf if self.clip.low is None else self.clip.low
        high = math.inf if self.clip.high is None else self.clip.high
        return [self.n, _bits(low), _bits(high)]


@dataclass(frozen=True)
class WindowMax:
    """Reduces windows along the middle axis of an array [outer, n, inner] to their largest
    elements, an array [outer, m, inner].

    Attributes:
      low: padding before the axis.
    """

    outer: int
    n: int
    inner: int
    m: int
    window: int
    stride: int
    low: int

    @property
    def name(self) -> str:
        return "window_max"

    @property
    def parameters(self) -> list[int]:
        """The integers that are passed to the code."""
        sizes = self.outer * self.m, self.m, self.inner, self.n, self.window
        return [*sizes, self.stride, self.low]


def _bits(x: float) -> int:
    return int.from_bytes(struct.pack("<f", x), "little")


def code() -> str:
    """Return a module with the functions `clipped`(table) and `window_max`(table).

    The table has the addresses of the argument, of the result and of `parameters`.
    """
    out = Code()
    with out.function(f"void @clipped(ptr %table) {WIDE}", 3):
        n = out.item("%p2", 0)
        low, high = out.item("%p2", 1, "float"), out.item("%p2", 2, "float")
        bounds = {"max": (low, out.splat(low)), "min": (high, out.splat(high))}
        whole = out.add(f"and i64 {n}, {-WIDTH}")
        with out.loop("vector", "0", whole, str(WIDTH)) as i:
            x = out.load(out.at("%p0", i))
            for kind, (_, bound) in bounds.items():
                x = curves.combined(out, kind, x, bound)
            out.store(x, out.at("%p1", i))
        with out.loop("number", whole, n) as i:
            x = out.add(f"load float, ptr {out.at('%p0', i)}, align 4")
            for kind, (bound, _) in bounds.items():
                x = out.add(f"call float @llvm.{kind}imum.f32(float {x}, float {bound})")
            out.raw(f"  store float {x}, ptr {out.at('%p1', i)}, align 4")
    _write_window_max(out)
    return DECLARATIONS + out.text


def _write_window_max(out: Code) -> None:
    with out.function("void @window_max(ptr %table)", 3):
        windows, m, inner, n, window, stride, low = (out.item("%p2", i) for i in range(7))
        with out.loop("result", "0", out.add(f"mul i64 {windows}, {inner}")) as r:
            column, w = (out.add(f"{op} i64 {r}, {inner}") for op in ("urem", "udiv"))
            i, o = (out.add(f"{op} i64 {w}, {m}") for op in ("urem", "udiv"))
            start = out.add(f"sub i64 {out.add(f'mul i64 {i}, {stride}')}, {low}")
            end = out.least(out.add(f"add i64 {start}, {window}"), n)
            line = out.add(f"mul i64 {o}, {n}")

            def larger(k: str, best: Sequence[str]) -> list[str]:
                row = out.add(f"mul i64 {out.add(f'add i64 {line}, {k}')}, {inner}")
                at = out.at("%p0", out.add(f"add i64 {row}, {column}"))
                x = out.add(f"load float, ptr {at}, align 4")
                return [out.add(f"call float @llvm.maximum.f32(float {best[0]}, float {x})")]

            lowest = digits(-math.inf)
            first = out.largest(start, "0")
            (best,) = out.carried("position", first, end, "1", [lowest], larger, ("float",))
            out.raw(f"  store float {best}, ptr {out.at('%p1', r)}, align 4")
