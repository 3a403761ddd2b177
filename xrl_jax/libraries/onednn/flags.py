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

_INVALID, _SUBNORMAL, _OVERFLOW, _ALL = 1, 2, 8, 63

# A plan is an array of i64: the list that is fast and the one that keeps NaN (0 where the first one
# does), and whether to look after each step.
RUN_SAFELY = """
define ptr @run(ptr %frame, ptr %plan) {{
entry:
  %fast = load ptr, ptr %plan
  %careful_at = getelementptr i64, ptr %plan, i64 1
  %careful = load ptr, ptr %careful_at
  %unclear_at = getelementptr i8, ptr {desk}, i64 {unclear}
  %unclear = load i64, ptr %unclear_at
  store i64 1, ptr %unclear_at
  %is_safe = icmp eq ptr %careful, null
  br i1 %is_safe, label %plain, label %guarded

plain:
  %only = call ptr @steps(ptr %frame, ptr %fast, i1 false)
  ret ptr %only

guarded:
  %is_clear = icmp eq i64 %unclear, 0
  br i1 %is_clear, label %begin, label %clear

clear:
  call void @look()
  br label %begin

begin:
  %seen_at = getelementptr i8, ptr {desk}, i64 {seen}
  store i32 0, ptr %seen_at
  %watched_at = getelementptr i64, ptr %plan, i64 2
  %watched_number = load i64, ptr %watched_at
  %watched = icmp ne i64 %watched_number, 0
  %first = call ptr @steps(ptr %frame, ptr %fast, i1 %watched)
  call void @look()
  store i64 0, ptr %unclear_at
  %seen = load i32, ptr %seen_at
  %of_interest = select i1 %watched, i32 {bad}, i32 {any}
  %found = and i32 %seen, %of_interest
  %is_fine = icmp eq i32 %found, 0
  %has_failed = icmp ne ptr %first, null
  %is_done = or i1 %is_fine, %has_failed
  br i1 %is_done, label %done, label %again

done:
  ret ptr %first

again:
  %new = and i32 %found, {subnormal}
  %are_new = icmp ne i32 %new, 0
  %watch = or i1 %watched, %are_new
  %watch_number = zext i1 %watch to i64
  store i64 %watch_number, ptr %watched_at
  store i64 1, ptr %unclear_at
  %count_at = getelementptr i8, ptr {desk}, i64 {careful_runs}
  %count = load i64, ptr %count_at
  %count_next = add i64 %count, 1
  store i64 %count_next, ptr %count_at
  %second = call ptr @steps(ptr %frame, ptr %careful, i1 false)
  ret ptr %second
}}
"""
NUMBERS = {
    "subnormal": _SUBNORMAL,
    "bad": _INVALID | _OVERFLOW,
    "any": _INVALID | _OVERFLOW | _SUBNORMAL,
    "not_flags": ~_ALL,
}


def look(start: str, number: str) -> str:
    """The function `look`(), given `GOMP_parallel` and `omp_get_thread_num`: it tells the desk what
    the threads' flags are, and clears them.
    """
    return _LOOK.replace("{start}", start).replace("{number}", number)


LOOK_AT_NOTHING = """
define void @look() {{
  ret void
}}
"""
_LOOK = """
define void @look_at_one(ptr %nothing) {{
entry:
  %slot = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %slot)
  %flags = load i32, ptr %slot
  %number = call i32 {number}()
  %is_first = icmp eq i32 %number, 0
  %mark = select i1 %is_first, i32 0, i32 {subnormal}
  %changed = xor i32 %flags, %mark
  %found = and i32 %changed, {any}
  %mode = and i32 %flags, {not_flags}
  %marked = or i32 %mode, %mark
  store i32 %marked, ptr %slot
  call void @llvm.x86.sse.ldmxcsr(ptr %slot)
  %nothing_found = icmp eq i32 %found, 0
  br i1 %nothing_found, label %end, label %tell

tell:
  %seen = getelementptr i8, ptr {desk}, i64 {seen}
  %before = atomicrmw or ptr %seen, i32 %found seq_cst
  br label %end

end:
  ret void
}}

define void @look() {{
  %threads_at = getelementptr i8, ptr {desk}, i64 {threads}
  %threads = load i32, ptr %threads_at
  call void {start}(ptr @look_at_one, ptr null, i32 %threads, i32 0)
  ret void
}}
"""
