"""Generated code that detects whether a call has met NaN, as LLVM IR.

The library's clipping, maxima and rectifiers turn NaN into a number, where XLA's preserve it. But
the instructions they consist of (MAXPS, MINPS, ordered comparisons) set a flag of the processor
when they meet NaN, and so do instructions that turn numbers into NaN; overflow sets another flag.
Flags belong to a thread and stay set until they are cleared. So a list of steps that may lose NaN
is run unchanged, then the flags of all threads are read, and if one is set, a second list of steps,
which preserves NaN, computes the results again. With ordinary values, the cost is one reading of
the flags.

OpenMP ends threads where a part of the work needs fewer of them, and their flags are lost. A new
thread inherits the flags of the thread that starts it. So the flag for subnormal operands, which
the processor never sets where it treats them as zeros (`server`), serves as a mark on all threads
but the first: a thread without the mark is new. If new threads are found after a list of steps, its
flags are read after each step from then on.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, sections 10.2.3 and
11.5.2.
"""

from __future__ import annotations

from collections.abc import Mapping

from xrl_jax.libraries.onednn.code import Code

_INVALID, _SUBNORMAL, _OVERFLOW, _ALL = 1, 2, 8, 63
_BAD = _INVALID | _OVERFLOW
# Offsets in the queue, in bytes: whether flags may be set from before the next call, the flags that
# were seen, how many calls were repeated because of them, and how many threads have their flags
# read.
QUEUE = {"unclear": 224, "seen": 232, "careful_runs": 240, "threads": 248}


def write_run(out: Code, at: Mapping[str, str]) -> None:
    """Write `run`(frame, plan), which runs the plan's fast list of steps and, if a flag says that
    they met NaN, then the list that preserves NaN.

    A plan is an array of i64: the addresses of the fast list and of the one that preserves NaN (0
    where the fast one does), and whether to read the flags after each step.

    Args:
      at: addresses in the queue, as constants.
    """
    with out.function("ptr @run(ptr %frame, ptr %plan)", returns=True):
        out.raw("  %result = alloca ptr")
        fast, careful = (out.item("%plan", i, "ptr") for i in (0, 1))
        unclear = out.add(f"load i64, ptr {at['unclear']}")
        out.raw(f"  store i64 1, ptr {at['unclear']}")
        is_safe = out.add(f"icmp eq ptr {careful}, null")
        with out.only_if("plain", is_safe):
            _steps(out, fast, "false")
        with out.only_if("guarded", out.opposite(is_safe)):
            with out.only_if("clear", out.add(f"icmp ne i64 {unclear}, 0")):
                out.raw("  call void @probe()")
            out.raw(f"  store i32 0, ptr {at['seen']}")
            watched = out.add(f"icmp ne i64 {out.item('%plan', 2)}, 0")
            first = _steps(out, fast, watched)
            out.raw(f"  call void @probe()\n  store i64 0, ptr {at['unclear']}")
            of_interest = out.add(f"select i1 {watched}, i32 {_BAD}, i32 {_BAD | _SUBNORMAL}")
            seen = out.add(f"load i32, ptr {at['seen']}")
            found = out.add(f"and i32 {seen}, {of_interest}")
            is_found = out.add(f"icmp ne i32 {found}, 0")
            has_run = out.add(f"icmp eq ptr {first}, null")
            with out.only_if("again", out.add(f"and i1 {is_found}, {has_run}")):
                new = out.add(f"icmp ne i32 {out.add(f'and i32 {found}, {_SUBNORMAL}')}, 0")
                watch = out.add(f"zext i1 {out.add(f'or i1 {watched}, {new}')} to i64")
                out.raw(f"  store i64 {watch}, ptr {out.at('%plan', '2', 'i64')}")
                out.raw(f"  store i64 1, ptr {at['unclear']}")
                count = out.add(f"load i64, ptr {at['careful_runs']}")
                more = out.add(f"add i64 {count}, 1")
                out.raw(f"  store i64 {more}, ptr {at['careful_runs']}")
                _steps(out, careful, "false")
        out.raw(f"  ret ptr {out.add('load ptr, ptr %result')}")


def _steps(out: Code, steps: str, watched: str) -> str:
    made = out.add(f"call ptr @steps(ptr %frame, ptr {steps}, i1 {watched})")
    out.raw(f"  store ptr {made}, ptr %result")
    return made


def write_probe(out: Code, at: Mapping[str, str], threads: tuple[str, str] | None) -> None:
    """Write `probe`(), which adds the threads' flags to those in the queue, and clears them.

    Args:
      threads: addresses of `GOMP_parallel` and `omp_get_thread_num`, as constants; None where flags
        cannot be read.
    """
    if threads is None:
        with out.function("void @probe()"):
            return
    start, number = threads
    with out.function("void @probe_thread(ptr %nothing)"):
        out.raw("  %slot = alloca i32\n  call void @llvm.x86.sse.stmxcsr(ptr %slot)")
        flags = out.add("load i32, ptr %slot")
        is_first = out.add(f"icmp eq i32 {out.add(f'call i32 {number}()')}, 0")
        mark = out.add(f"select i1 {is_first}, i32 0, i32 {_SUBNORMAL}")
        changed = out.add(f"xor i32 {flags}, {mark}")
        found = out.add(f"and i32 {changed}, {_BAD | _SUBNORMAL}")
        mode = out.add(f"and i32 {flags}, {~_ALL}")
        out.raw(f"  store i32 {out.add(f'or i32 {mode}, {mark}')}, ptr %slot")
        out.raw("  call void @llvm.x86.sse.ldmxcsr(ptr %slot)")
        with out.only_if("found", out.add(f"icmp ne i32 {found}, 0")):
            out.add(f"atomicrmw or ptr {at['seen']}, i32 {found} seq_cst")
    with out.function("void @probe()"):
        n = out.add(f"load i32, ptr {at['threads']}")
        out.raw(f"  call void {start}(ptr @probe_thread, ptr null, i32 {n}, i32 0)")
