"""Machine code of the calls, as LLVM's intermediate language, and its compilation.

Source: XLA, xla/ffi/api/c_api.h (the offsets below); `jax.ffi.include_dir()` has it.
"""

from __future__ import annotations

import functools
from typing import Any

# A list is an array of i64: its length, then for each step an address, of what (0: a primitive,
# 1: code of ours, 2: the descriptor of a primitive that is made when first needed), the number of
# arguments and for each of these four numbers as in `native.Step`. Offsets into XLA's structures:
# call frame: extension 8, api 16, arguments 40 + 32, results 80 + 32; buffer: data 24; metadata
# extension: metadata 24, whose version is at 24 and 28 and whose traits are at 32; api:
# Error_Create 48.
RUN = """
@message = private constant [33 x i8] c"a primitive of oneDNN has failed\\00"

define ptr @steps(ptr %frame, ptr %plan, i1 %watched) {{
entry:
  %args = alloca [{most} x {{i32, ptr}}]
  %slot = alloca ptr
  %table = alloca [{most} x ptr]
  %arguments_at = getelementptr i8, ptr %frame, i64 72
  %arguments = load ptr, ptr %arguments_at
  %results_at = getelementptr i8, ptr %frame, i64 112
  %results = load ptr, ptr %results_at
  %arena_at = getelementptr i8, ptr {desk}, i64 {arena}
  %arena = load ptr, ptr %arena_at
  %made = call i32 {stream_create}(ptr %slot, ptr {engine}, i32 1)
  %stream = load ptr, ptr %slot
  %n_steps = load i64, ptr %plan
  %first = getelementptr i64, ptr %plan, i64 1
  br label %step

step:
  %i = phi i64 [0, %entry], [%i_next, %freed]
  %at = phi ptr [%first, %entry], [%at_next, %freed]
  %worst = phi i32 [%made, %entry], [%worst_next, %freed]
  %more = icmp slt i64 %i, %n_steps
  br i1 %more, label %open, label %end

open:
  %primitive_number = load i64, ptr %at
  %primitive = inttoptr i64 %primitive_number to ptr
  %what_at = getelementptr i64, ptr %at, i64 1
  %what = load i64, ptr %what_at
  %is_loop = icmp eq i64 %what, 1
  %n_at = getelementptr i64, ptr %at, i64 2
  %n = load i64, ptr %n_at
  %rows = getelementptr i64, ptr %at, i64 3
  br label %argument

argument:
  %j = phi i64 [0, %open], [%j_next, %address], [%j_next, %memory]
  %in = icmp slt i64 %j, %n
  br i1 %in, label %place, label %ready

place:
  %row_offset = mul i64 %j, 4
  %row = getelementptr i64, ptr %rows, i64 %row_offset
  %id64 = load i64, ptr %row
  %id = trunc i64 %id64 to i32
  %desc_at = getelementptr i64, ptr %row, i64 1
  %desc_number = load i64, ptr %desc_at
  %desc = inttoptr i64 %desc_number to ptr
  %kind_at = getelementptr i64, ptr %row, i64 2
  %kind = load i64, ptr %kind_at
  %where_at = getelementptr i64, ptr %row, i64 3
  %where = load i64, ptr %where_at
  %is_number = icmp sge i64 %kind, 2
  br i1 %is_number, label %from_start, label %from_buffer

from_start:
  %in_arena = icmp eq i64 %kind, 2
  %start = select i1 %in_arena, ptr %arena, ptr null
  %inner = getelementptr i8, ptr %start, i64 %where
  br label %placed

from_buffer:
  %is_argument = icmp eq i64 %kind, 0
  %buffers = select i1 %is_argument, ptr %arguments, ptr %results
  %buffer_at = getelementptr ptr, ptr %buffers, i64 %where
  %buffer = load ptr, ptr %buffer_at
  %data_at = getelementptr i8, ptr %buffer, i64 24
  %outer = load ptr, ptr %data_at
  br label %placed

placed:
  %data = phi ptr [%inner, %from_start], [%outer, %from_buffer]
  %j_next = add i64 %j, 1
  br i1 %is_loop, label %address, label %memory

address:
  %address_slot = getelementptr [{most} x ptr], ptr %table, i64 0, i64 %j
  store ptr %data, ptr %address_slot
  br label %argument

memory:
  %id_slot = getelementptr [{most} x {{i32, ptr}}], ptr %args, i64 0, i64 %j, i32 0
  store i32 %id, ptr %id_slot
  %memory_slot = getelementptr [{most} x {{i32, ptr}}], ptr %args, i64 0, i64 %j, i32 1
  call i32 {memory_create}(ptr %memory_slot, ptr %desc, ptr {engine}, ptr %data)
  br label %argument

ready:
  br i1 %is_loop, label %loop, label %execute

loop:
  call void %primitive(ptr %table)
  br label %freed

execute:
  %is_there = icmp eq i64 %what, 0
  br i1 %is_there, label %go, label %build

build:
  %creation = call i32 {primitive_create}(ptr %at, ptr %primitive)
  %created = icmp eq i32 %creation, 0
  br i1 %created, label %keep, label %executed

keep:
  store i64 0, ptr %what_at
  %new = load ptr, ptr %at
  br label %go

go:
  %ready_one = phi ptr [%primitive, %execute], [%new, %keep]
  %n32 = trunc i64 %n to i32
  %now = call i32 {primitive_execute}(ptr %ready_one, ptr %stream, i32 %n32, ptr %args)
  br i1 %watched, label %watch, label %executed

watch:
  call void @look()
  br label %executed

executed:
  %outcome = phi i32 [%creation, %build], [%now, %go], [%now, %watch]
  %status = or i32 %worst, %outcome
  br label %free

free:
  %k = phi i64 [0, %executed], [%k_next, %one]
  %left = icmp slt i64 %k, %n
  br i1 %left, label %one, label %freed

one:
  %old_slot = getelementptr [{most} x {{i32, ptr}}], ptr %args, i64 0, i64 %k, i32 1
  %old = load ptr, ptr %old_slot
  call i32 {memory_destroy}(ptr %old)
  %k_next = add i64 %k, 1
  br label %free

freed:
  %worst_next = phi i32 [%worst, %loop], [%status, %free]
  %i_next = add i64 %i, 1
  %length = mul i64 %n, 4
  %at_next = getelementptr i64, ptr %rows, i64 %length
  br label %step

end:
  call i32 {stream_destroy}(ptr %stream)
  %good = icmp eq i32 %worst, 0
  br i1 %good, label %fine, label %failed

fine:
  ret ptr null

failed:
  %error = alloca {{i64, ptr, ptr, i32}}
  store {{i64, ptr, ptr, i32}} {{i64 32, ptr null, ptr @message, i32 13}}, ptr %error
  %api_at = getelementptr i8, ptr %frame, i64 16
  %api = load ptr, ptr %api_at
  %create_at = getelementptr i8, ptr %api, i64 48
  %create = load ptr, ptr %create_at
  %result = call ptr %create(ptr %error)
  ret ptr %result
}}

define void @wait(i64 %at) {{
entry:
  %semaphore = getelementptr i8, ptr {desk}, i64 %at
  br label %again

again:  ; a signal ends the waiting early
  %status = call i32 {sem_wait}(ptr %semaphore)
  %done = icmp eq i32 %status, 0
  br i1 %done, label %end, label %again

end:
  ret void
}}

define void @post(i64 %at) {{
  %semaphore = getelementptr i8, ptr {desk}, i64 %at
  call i32 {sem_post}(ptr %semaphore)
  ret void
}}

define ptr @serve(ptr %nothing) {{
entry:
  %mode = alloca i32
  store i32 {flush}, ptr %mode
  call void @llvm.x86.sse.ldmxcsr(ptr %mode)
  br label %next

next:
  call void @wait(i64 {asked})
  %frame_at = getelementptr i8, ptr {desk}, i64 {frame}
  %frame = load ptr, ptr %frame_at
  %plan_at = getelementptr i8, ptr {desk}, i64 {plan}
  %plan = load ptr, ptr %plan_at
  %result = call ptr @run(ptr %frame, ptr %plan)
  %result_at = getelementptr i8, ptr {desk}, i64 {result}
  store ptr %result, ptr %result_at
  call void @post(i64 {answered})
  br label %next
}}

define ptr @call(ptr %frame, ptr %plan) {{
  %extension_at = getelementptr i8, ptr %frame, i64 8
  %extension = load ptr, ptr %extension_at
  %is_call = icmp eq ptr %extension, null
  br i1 %is_call, label %ask, label %metadata

metadata:
  %metadata_at = getelementptr i8, ptr %extension, i64 24
  %about = load ptr, ptr %metadata_at
  %major = getelementptr i8, ptr %about, i64 24
  store i32 0, ptr %major
  %minor = getelementptr i8, ptr %about, i64 28
  store i32 1, ptr %minor
  %traits = getelementptr i8, ptr %about, i64 32
  store i32 0, ptr %traits
  ret ptr null

ask:
  call void @wait(i64 {free})
  %frame_at = getelementptr i8, ptr {desk}, i64 {frame}
  store ptr %frame, ptr %frame_at
  %plan_at = getelementptr i8, ptr {desk}, i64 {plan}
  store ptr %plan, ptr %plan_at
  call void @post(i64 {asked})
  call void @wait(i64 {answered})
  %result_at = getelementptr i8, ptr {desk}, i64 {result}
  %result = load ptr, ptr %result_at
  call void @post(i64 {free})
  ret ptr %result
}}
"""
PASS_ON = """
define ptr @{name}(ptr %frame) {{
  %result = call ptr {call}(ptr %frame, ptr {plan})
  ret ptr %result
}}
"""


# The intrinsics that read and write a thread's MXCSR, which has the flags of `flags`.
MXCSR = """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
"""
# LLVM prefers half of the registers' width on some processors.
WIDE = '"prefer-vector-width"="512" "min-legal-vector-width"="512"'
SMALL = 1 << 14  # numbers for which threads are not worth their waking
# Constants of OpenMP's `GOMP_parallel`, `omp_get_num_threads` and `omp_get_thread_num`.
Parallel = tuple[str, str, str]


def shared_out(name: str, n: int, parallel: Parallel | None) -> str:
    """The function `name`(table) that calls `name`_rows(table, first, end) for `n` rows, shared out
    between the threads; None for one thread.

    The flags of `flags` stay as they were: vectors that are not full may divide zero by zero.
    """
    if parallel is None:
        return f"""{MXCSR}
define void @{name}(ptr %table) {{
  %mode = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %mode)
  call void @{name}_rows(ptr %table, i64 0, i64 {n})
  call void @llvm.x86.sse.ldmxcsr(ptr %mode)
  ret void
}}
"""
    start, n_threads, number = parallel
    return f"""{MXCSR}
define void @{name}_part(ptr %table) {{
  %mode = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %mode)
  %n32 = call i32 {n_threads}()
  %i32 = call i32 {number}()
  %n = sext i32 %n32 to i64
  %i = sext i32 %i32 to i64
  %after = add i64 %i, 1
  %first_all = mul i64 %i, {n}
  %end_all = mul i64 %after, {n}
  %first = sdiv i64 %first_all, %n
  %end = sdiv i64 %end_all, %n
  call void @{name}_rows(ptr %table, i64 %first, i64 %end)
  call void @llvm.x86.sse.ldmxcsr(ptr %mode)
  ret void
}}

define void @{name}(ptr %table) {{
  call void {start}(ptr @{name}_part, ptr %table, i32 0, i32 0)
  ret void
}}
"""


def pointer(address: int) -> str:
    return f"inttoptr (i64 {address} to ptr)"


def addresses(code: str, *names: str) -> list[int]:
    """Of functions in the code, compiled."""
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
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
