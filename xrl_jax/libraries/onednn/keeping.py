"""Machine code for bounds and for the largest values of windows, which keep NaN, as LLVM's
intermediate language.

It runs where the library's kernels met NaN (`flags`), so it is made once, for all sizes: these are
numbers that it is given.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from xrl_jax.libraries.onednn import curves
from xrl_jax.libraries.onednn.curves import INTRINSICS, WIDTH, Code
from xrl_jax.libraries.onednn.machine_code import WIDE
from xrl_jax.libraries.onednn.spec import Clip


@dataclass(frozen=True)
class Bounded:
    """The first array's numbers within bounds are the second array, which may be the same."""

    n: int
    clip: Clip

    @property
    def name(self) -> str:
        return "bounded"

    @property
    def numbers(self) -> list[int]:
        """What the code is given."""
        low = -math.inf if self.clip.low is None else self.clip.low
        high = math.inf if self.clip.high is None else self.clip.high
        return [self.n, _bits(low), _bits(high)]


@dataclass(frozen=True)
class Largest:
    """The largest numbers of windows along the middle axis of an array [outer, n, inner] are
    another, [outer, m, inner].

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
        return "largest"

    @property
    def numbers(self) -> list[int]:
        """What the code is given."""
        sizes = self.outer * self.m, self.m, self.inner, self.n, self.window
        return [*sizes, self.stride, self.low]


def _bits(x: float) -> int:
    return int.from_bytes(struct.pack("<f", x), "little")


def code() -> str:
    """A module with the functions `bounded`(table) and `largest`(table): addresses of the argument,
    of the result and of the numbers are in the table.
    """
    return f"""{INTRINSICS}
declare float @llvm.maximum.f32(float, float)
declare float @llvm.minimum.f32(float, float)
{_bounded()}
{_LARGEST}"""


_HEAD = """
  %x = load ptr, ptr %table
  %y_at = getelementptr ptr, ptr %table, i64 1
  %y = load ptr, ptr %y_at
  %numbers_at = getelementptr ptr, ptr %table, i64 2
  %numbers = load ptr, ptr %numbers_at"""


def _bounded() -> str:
    out = Code()
    out.raw(f"define void @bounded(ptr %table) {WIDE} {{\nentry:{_HEAD}")
    out.raw("  %n = load i64, ptr %numbers")
    bounds = []
    for i, name in enumerate(("low", "high"), 1):
        out.raw(f"  %{name}_at = getelementptr i64, ptr %numbers, i64 {i}")
        out.raw(f"  %{name} = load float, ptr %{name}_at")
        bounds.append(out.spread(f"%{name}"))
    out.raw(f"  %whole = and i64 %n, {-WIDTH}\n  br label %some")
    out.raw("some:\n  %i = phi i64 [0, %entry], [%i_next, %work]")
    out.raw("  %more = icmp slt i64 %i, %whole\n  br i1 %more, label %work, label %one")
    out.raw("work:")
    x = out.load(out.add("getelementptr float, ptr %x, i64 %i"), None)
    x = curves.combined(out, "min", curves.combined(out, "max", x, bounds[0]), bounds[1])
    out.store(x, out.add("getelementptr float, ptr %y, i64 %i"), None)
    out.raw(f"  %i_next = add i64 %i, {WIDTH}\n  br label %some")
    out.raw("one:\n  %j = phi i64 [%i, %some], [%j_next, %last]")
    out.raw("  %left = icmp slt i64 %j, %n\n  br i1 %left, label %last, label %end")
    out.raw("last:")
    at = out.add("getelementptr float, ptr %x, i64 %j")
    x = out.add(f"load float, ptr {at}, align 4")
    x = out.add(f"call float @llvm.maximum.f32(float {x}, float %low)")
    x = out.add(f"call float @llvm.minimum.f32(float {x}, float %high)")
    to = out.add("getelementptr float, ptr %y, i64 %j")
    out.raw(f"  store float {x}, ptr {to}, align 4")
    out.raw("  %j_next = add i64 %j, 1\n  br label %one\nend:\n  ret void\n}")
    return out.text


_LARGEST = f"""
define void @largest(ptr %table) {{
entry:{_HEAD}
  %windows = load i64, ptr %numbers
  %m_at = getelementptr i64, ptr %numbers, i64 1
  %m = load i64, ptr %m_at
  %inner_at = getelementptr i64, ptr %numbers, i64 2
  %inner = load i64, ptr %inner_at
  %n_at = getelementptr i64, ptr %numbers, i64 3
  %n = load i64, ptr %n_at
  %window_at = getelementptr i64, ptr %numbers, i64 4
  %window = load i64, ptr %window_at
  %stride_at = getelementptr i64, ptr %numbers, i64 5
  %stride = load i64, ptr %stride_at
  %low_at = getelementptr i64, ptr %numbers, i64 6
  %low = load i64, ptr %low_at
  %all = mul i64 %windows, %inner
  br label %result

result:
  %r = phi i64 [0, %entry], [%r_next, %found]
  %more = icmp slt i64 %r, %all
  br i1 %more, label %begin, label %end

begin:
  %c = urem i64 %r, %inner
  %w = udiv i64 %r, %inner
  %i = urem i64 %w, %m
  %o = udiv i64 %w, %m
  %step = mul i64 %i, %stride
  %from = sub i64 %step, %low
  %line = mul i64 %o, %n
  br label %position

position:
  %k = phi i64 [0, %begin], [%k_next, %next]
  %best = phi float [0xFFF0000000000000, %begin], [%better, %next]
  %left = icmp slt i64 %k, %window
  br i1 %left, label %check, label %found

check:
  %at = add i64 %from, %k
  %is_in = icmp ult i64 %at, %n
  br i1 %is_in, label %take, label %next

take:
  %row = add i64 %line, %at
  %start = mul i64 %row, %inner
  %place = add i64 %start, %c
  %value_at = getelementptr float, ptr %x, i64 %place
  %value = load float, ptr %value_at, align 4
  %larger = call float @llvm.maximum.f32(float %best, float %value)
  br label %next

next:
  %better = phi float [%best, %check], [%larger, %take]
  %k_next = add i64 %k, 1
  br label %position

found:
  %result_at = getelementptr float, ptr %y, i64 %r
  store float %best, ptr %result_at, align 4
  %r_next = add i64 %r, 1
  br label %result

end:
  ret void
}}
"""
