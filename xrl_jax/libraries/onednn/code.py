"""A builder for functions in LLVM IR: vectors, addresses, loops, tests.

Vectors have `WIDTH` elements of float32. Where an array ends within a vector, a mask says which
elements exist.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

WIDTH = 16  # elements of a vector; LLVM splits it where registers are smaller
VECTOR = f"<{WIDTH} x float>"
INTEGERS, BOOLS = f"<{WIDTH} x i32>", f"<{WIDTH} x i1>"
SUFFIX = f"v{WIDTH}f32"  # of intrinsics on vectors
ZEROS = "zeroinitializer"
FMA = f"call {VECTOR} @llvm.fmuladd.{SUFFIX}"
# Without these, LLVM prefers half of the registers' width on some processors.
WIDE = '"prefer-vector-width"="512" "min-legal-vector-width"="512"'

_UNARY = ("sqrt", "fabs", "floor", "ceil")
DECLARATIONS = "\n".join(
    [
        *(f"declare {VECTOR} @llvm.{n}.{SUFFIX}({VECTOR})" for n in _UNARY),
        *(
            f"declare {VECTOR} @llvm.{n}.{SUFFIX}({VECTOR}, {VECTOR})\n"
            f"declare float @llvm.{n}.f32(float, float)"
            for n in ("maximum", "minimum")
        ),
        f"declare {VECTOR} @llvm.nearbyint.{SUFFIX}({VECTOR})",
        f"declare i32 @llvm.vector.reduce.smax.v{WIDTH}i32({INTEGERS})",
        f"declare {VECTOR} @llvm.fmuladd.{SUFFIX}({VECTOR}, {VECTOR}, {VECTOR})",
        f"declare float @llvm.vector.reduce.fadd.{SUFFIX}(float, {VECTOR})",
        *(
            f"declare float @llvm.vector.reduce.{n}.{SUFFIX}({VECTOR})"
            for n in ("fmaximum", "fminimum")
        ),
        f"declare {VECTOR} @llvm.masked.load.{SUFFIX}.p0(ptr, i32, {BOOLS}, {VECTOR})",
        f"declare void @llvm.masked.store.{SUFFIX}.p0({VECTOR}, ptr, i32, {BOOLS})",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
        # These read and write a thread's MXCSR, which holds the flags that `flags` reads.
        "declare void @llvm.x86.sse.stmxcsr(ptr)",
        "declare void @llvm.x86.sse.ldmxcsr(ptr)",
        "",
    ]
)


# LLVM types of the elements of arrays, by the names of their types.
ELEMENTS = {"float32": "float", "bfloat16": "i16", "float16": "half", "int8": "i8"}


def constant(x: float) -> str:
    """Return a vector constant of equal elements, rounded to float32."""
    return "<" + ", ".join([f"float {digits(x)}"] * WIDTH) + ">"


def digits(x: float) -> str:
    """Return the literal of a scalar, rounded to float32."""
    single = struct.unpack("f", struct.pack("f", x))[0]
    return f"0x{struct.pack('>d', single).hex().upper()}"


def first(n: int) -> str:
    """Return the mask of the first `n` elements of a vector."""
    return "<" + ", ".join(f"i1 {'true' if i < n else 'false'}" for i in range(WIDTH)) + ">"


@dataclass
class Code:
    """The lines of functions written so far."""

    lines: list[str] = field(default_factory=list)
    block: str = "entry"  # the basic block that is being written
    count: int = 0

    @property
    def text(self) -> str:
        return "\n".join([*self.lines, ""])

    def raw(self, line: str) -> None:
        self.lines.append(line)

    def add(self, right: str) -> str:
        """Append an instruction and return the name of its value."""
        self.count += 1
        self.lines.append(f"  %v{self.count} = {right}")
        return f"%v{self.count}"

    @contextmanager
    def function(self, head: str, n_arrays: int = 0, *, returns: bool = False) -> Iterator[None]:
        """Write a function whose body the `with` block writes; the addresses of its arrays, which
        are in `%table`, are loaded as `%p0` and so on.

        Args:
          returns: whether the `with` block writes the return itself, because there is a result.
        """
        self.raw(f"define {head} {{\nentry:")
        self.block = "entry"
        for i in range(n_arrays):
            self.raw(f"  %p{i}_at = getelementptr ptr, ptr %table, i64 {i}")
            self.raw(f"  %p{i} = load ptr, ptr %p{i}_at")
        yield
        self.raw("}" if returns else "  ret void\n}")

    # --- integers and addresses ---

    def at(self, base: str, index: str, kind: str = "float") -> str:
        """Return the address of an array's element."""
        return self.add(f"getelementptr {kind}, ptr {base}, i64 {index}")

    def item(self, base: str, index: int, kind: str = "i64") -> str:
        """Load an element of an array whose elements have eight bytes."""
        return self.add(f"load {kind}, ptr {self.at(base, str(index), 'i64')}")

    def field(self, base: str, offset: int, kind: str = "ptr") -> str:
        """Load the value that lies `offset` bytes after an address."""
        return self.add(f"load {kind}, ptr {self.at(base, str(offset), 'i8')}")

    def least(self, a: str, b: str) -> str:
        less = self.add(f"icmp slt i64 {a}, {b}")
        return self.add(f"select i1 {less}, i64 {a}, i64 {b}")

    def largest(self, a: str, b: str) -> str:
        more = self.add(f"icmp sgt i64 {a}, {b}")
        return self.add(f"select i1 {more}, i64 {a}, i64 {b}")

    def ceiling(self, a: str, b: str) -> str:
        """Return a / b, rounded up."""
        less = self.add(f"sub i64 {b}, 1")
        return self.add(f"sdiv i64 {self.add(f'add i64 {a}, {less}')}, {b}")

    # --- vectors ---

    def load(self, at: str, mask: str | None = None) -> str:
        """Load a vector; elements that the mask excludes are 0."""
        if mask is None:
            return self.add(f"load {VECTOR}, ptr {at}, align 4")
        return self.add(
            f"call {VECTOR} @llvm.masked.load.{SUFFIX}.p0(ptr {at}, i32 4, {BOOLS} {mask}, "
            f"{VECTOR} {ZEROS})"
        )

    def load_widened(self, at: str, dtype: str) -> str:
        """Load a vector of this type as float32."""
        if dtype == "float32":
            return self.load(at)
        narrow = f"<{WIDTH} x {ELEMENTS[dtype]}>"
        x = self.add(f"load {narrow}, ptr {at}, align {1 if dtype == 'int8' else 2}")
        if dtype == "float16":
            return self.add(f"fpext {narrow} {x} to {VECTOR}")
        if dtype == "int8":
            bits = self.add(f"sext {narrow} {x} to {INTEGERS}")
            return self.add(f"sitofp {INTEGERS} {bits} to {VECTOR}")
        # The bits of a bfloat16 are the upper half of those of a float32.
        bits = self.add(f"zext {narrow} {x} to {INTEGERS}")
        sixteen = ", ".join(["i32 16"] * WIDTH)
        shifted = self.add(f"shl {INTEGERS} {bits}, <{sixteen}>")
        return self.add(f"bitcast {INTEGERS} {shifted} to {VECTOR}")

    def load_one(self, at: str) -> str:
        """Load a scalar into all elements of a vector."""
        return self.splat(self.add(f"load float, ptr {at}, align 4"))

    def splat(self, x: str, kind: str = "float") -> str:
        many = f"<{WIDTH} x {kind}>"
        one = self.add(f"insertelement {many} poison, {kind} {x}, i64 0")
        return self.add(f"shufflevector {many} {one}, {many} poison, {INTEGERS} {ZEROS}")

    def store(self, x: str, at: str, mask: str | None = None) -> None:
        if mask is None:
            self.raw(f"  store {VECTOR} {x}, ptr {at}, align 4")
        else:
            self.raw(
                f"  call void @llvm.masked.store.{SUFFIX}.p0({VECTOR} {x}, ptr {at}, i32 4, "
                f"{BOOLS} {mask})"
            )

    # --- loops and tests ---

    def carried(
        self,
        name: str,
        start: str,
        end: str,
        step: str,
        values: Sequence[str],
        body: Callable[[str, list[str]], Sequence[str]],
        kinds: Sequence[str] = (),
    ) -> list[str]:
        """Write a loop that carries values through its iterations; return the final values.

        Args:
          body: writes an iteration, given the loop variable and the values; returns the values for
            the next iteration.
          kinds: LLVM types of the values, by default vectors.
        """
        before, own = self.block, [f"%{name}_{k}" for k in range(len(values))]
        head = len(self.lines) + 2  # after the line of the loop variable
        with self.loop(name, start, end, step) as i:
            made = body(i, own)
            last = self.block
        rows = zip(own, values, made, kinds or [VECTOR] * len(own), strict=True)
        self.lines[head:head] = [
            f"  {x} = phi {kind} [{old}, %{before}], [{new}, %{last}]" for x, old, new, kind in rows
        ]
        return own

    @contextmanager
    def loop(self, name: str, start: str, end: str, step: str = "1") -> Iterator[str]:
        """Write a loop whose body the `with` block writes; yield the name of the loop variable."""
        before, i = self.block, f"%{name}_i"
        self.raw(f"  br label %{name}\n{name}:")
        head = len(self.lines)
        self.raw("")  # set below, once the body's last block is known
        self.raw(f"  %{name}_more = icmp slt i64 {i}, {end}")
        self.raw(f"  br i1 %{name}_more, label %{name}_body, label %{name}_end\n{name}_body:")
        self.block = f"{name}_body"
        yield i
        self.lines[head] = f"  {i} = phi i64 [{start}, %{before}], [{i}_next, %{self.block}]"
        self.raw(f"  {i}_next = add i64 {i}, {step}\n  br label %{name}\n{name}_end:")
        self.block = f"{name}_end"

    @contextmanager
    def only_if(self, name: str, test: str) -> Iterator[None]:
        """Make the code that the `with` block writes run only if the test holds."""
        self.raw(f"  br i1 {test}, label %{name}_do, label %{name}_done\n{name}_do:")
        self.block = f"{name}_do"
        yield
        self.raw(f"  br label %{name}_done\n{name}_done:")
        self.block = f"{name}_done"

    def opposite(self, test: str) -> str:
        return self.add(f"xor i1 {test}, true")
