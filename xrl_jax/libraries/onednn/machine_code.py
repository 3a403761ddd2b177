"""Generated kernels: how threads share their work, and how they are compiled."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from xrl_jax.libraries.onednn.code import DECLARATIONS

SMALL = 1 << 14  # elements; with fewer, waking threads costs more than it saves
# Addresses of OpenMP's `GOMP_parallel`, `omp_get_num_threads` and `omp_get_thread_num`, as LLVM
# constants.
Parallel = tuple[str, str, str]


class Kernel(NamedTuple):
    """LLVM IR for work of several parts, which threads may share.

    Attributes:
      text: the definition of a function of the table (addresses of the arguments and of the
        result), the first part and the one after the last.
      n: number of parts.
      is_small: whether the work is too small to be worth waking threads.
      signals: whether the processor's flags that it sets are a message, see `flags`.
    """

    text: str
    n: int
    is_small: bool
    signals: bool = False


MakeKernel = Callable[[Any, str], Kernel]  # takes a description and the function's name


def module(make: MakeKernel, what: Any, name: str, parallel: Parallel | None) -> str:
    """Return a module with the function `name`(table), which does all parts of a kernel.

    Without `parallel` one thread does them. The processor's flags (see `flags`) are restored
    afterwards, unless they are a message, because vectors that are only partly filled may divide
    zero by zero.
    """
    parts = f"{name}_parts"
    kernel = make(what, parts)
    start, n_threads, number = parallel or ("", "", "")
    restored = "" if kernel.signals else "call void @llvm.x86.sse.ldmxcsr(ptr %mode)"
    if parallel is None or kernel.is_small:
        return f"""{DECLARATIONS}{kernel.text}
define void @{name}(ptr %table) {{
  %mode = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %mode)
  call void @{parts}(ptr %table, i64 0, i64 {kernel.n})
  {restored}
  ret void
}}
"""
    return f"""{DECLARATIONS}{kernel.text}
define void @{name}_of_thread(ptr %table) {{
  %mode = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %mode)
  %n32 = call i32 {n_threads}()
  %i32 = call i32 {number}()
  %n = sext i32 %n32 to i64
  %i = sext i32 %i32 to i64
  %after = add i64 %i, 1
  %first_all = mul i64 %i, {kernel.n}
  %end_all = mul i64 %after, {kernel.n}
  %first = sdiv i64 %first_all, %n
  %end = sdiv i64 %end_all, %n
  call void @{parts}(ptr %table, i64 %first, i64 %end)
  {restored}
  ret void
}}

define void @{name}(ptr %table) {{
  call void {start}(ptr @{name}_of_thread, ptr %table, i32 0, i32 0)
  ret void
}}
"""


def pointer(address: int) -> str:
    return f"inttoptr (i64 {address} to ptr)"


def addresses(code: str, *names: str) -> list[int]:
    """Compile the code and return the addresses of these functions."""
    import llvmlite.binding as llvm

    engine = _engine()
    module = llvm.parse_assembly(code)
    module.verify()
    engine.add_module(module)
    engine.finalize_object()
    return [int(engine.get_function_address(name)) for name in names]


@functools.cache
def _engine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    return forever(llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine))


def forever(x: Any) -> Any:
    """Return the object, which Python now never frees: calls may still run while it exits."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
    return x
