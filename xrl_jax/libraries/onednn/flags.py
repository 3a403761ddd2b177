"""Machine code that sees whether a call has met NaN, as LLVM's intermediate language.

The library's bounds, maxima and rectifiers make NaN a number, where XLA's keep it. But the
instructions that they are made of (MAXPS, MINPS, ordered comparisons) set a flag of the processor
when they meet NaN, and so do those that make NaN of numbers; overflow sets another. Flags are of a
thread and stay set until they are cleared. So a list of steps that may lose NaN is run as it is,
the flags of all threads are read after it, and where one is set another list, which keeps NaN,
makes the results again. Ordinary numbers cost one look at the flags.

OpenMP ends threads where a part of the work is for fewer of them, and their flags are lost. New
threads have the flags of the one that starts them; so the flag for subnormal operands, which the
processor never sets where it takes them as zeros (`native`), marks all threads but the first, and
a thread without it is a new one. A list in which threads are found to be new is looked after step
by step from then on.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, sections 10.2.3 and
11.5.2.
"""

from __future__ import annotations

from collections.abc import Mapping

from xrl_jax.libraries.onednn.code import Code

_INVALID, _SUBNORMAL, _OVERFLOW, _ALL = 1, 2, 8, 63
_BAD = _INVALID | _OVERFLOW
# What is in the queue for this, in bytes: whether flags may be set that are none of the next
# call's, those that were seen, how many calls were made again for them, and of how many threads
# they are.
QUEUE = {"unclear": 224, "seen": 232, "careful_runs": 240, "threads": 248}


def write_run(out: Code, at: Mapping[str, str]) -> None:
    """`run`(frame, plan): the plan's steps, again and with care where a flag says that they met
    NaN.

    A plan is an array of i64: the list that is fast and the one that keeps NaN (0 where the first
    one does), and whether to look after each step.

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
    """`probe`(), which tells the queue what the threads' flags are, and clears them.

    Args:
      threads: `GOMP_parallel` and `omp_get_thread_num`; None where flags cannot be read.
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
