"""LLVM IR of the server thread, which makes all calls, and of its clients.

A list of steps is an array of i64: its length, then for each step an address, its kind (0: a
primitive, 1: generated code, 2: the descriptor of a primitive that is created when first needed),
the number of arguments and for each of these four values as in `native.Step`.

Source: XLA, xla/ffi/api/c_api.h (the offsets below); `jax.ffi.include_dir()` has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xrl_jax.libraries.onednn import flags
from xrl_jax.libraries.onednn.code import DECLARATIONS, Code

MOST_ARGUMENTS = 64  # of one primitive
INDEX_BITS = 16  # of the code of a place in a buffer: its index; the offset in bytes is above them
# Byte offsets in the queue, the memory that the server thread and its clients share: three
# semaphores, the request and its result, the address of the arena, and the fields of `flags`.
QUEUE = {
    "free": 0,
    "asked": 64,
    "answered": 128,
    "frame": 192,
    "plan": 200,
    "result": 208,
    "arena": 216,
    **flags.QUEUE,
}
QUEUE_BYTES = 256
# Offsets into XLA's structures. A call frame has an extension, the table of XLA's functions and, 32
# bytes into the lists of arguments and of results, the addresses of the buffers. The extension is
# non-null in a query for metadata, and points to these: a version of two numbers, and traits.
_EXTENSION, _API, _ARGUMENTS, _RESULTS = 8, 16, 40 + 32, 80 + 32
_DATA = 24  # of a buffer
_METADATA, _MAJOR, _MINOR, _TRAITS = 24, 24, 28, 32
_CREATE_ERROR = 48
# How the processor treats subnormal numbers is a setting of each thread, inherited by the threads
# that it starts: here they are read and written as zeros, as in XLA's threads. Otherwise each takes
# many times as long, and a softmax is full of them.
_FLUSH = 0x1F80 | 0x8040
_MESSAGE = "a primitive of oneDNN has failed"
_ERROR = "{i64, ptr, ptr, i32}"  # size, null, message, code
_MEMORY = "{i32, ptr}"  # the number of an argument, and its memory


def code(at: Mapping[str, str], threads: tuple[str, str] | None) -> str:
    """Return a module with `serve`(nothing), run by the server thread, and `call`(frame, plan).

    Args:
      at: constants by name: addresses of the library's functions, of its engine, of the semaphore
        functions, and of the fields in `QUEUE`.
      threads: as for `flags.write_probe`.
    """
    out = Code()
    flags.write_probe(out, at, threads)
    _write_steps(out, at)
    flags.write_run(out, at)
    _write_semaphores(out, at)
    _write_serve(out, at)
    _write_call(out, at)
    size = len(_MESSAGE) + 1
    message = f'@message = private constant [{size} x i8] c"{_MESSAGE}\\00"\n'
    return DECLARATIONS + message + out.text


def _write_steps(out: Code, at: Mapping[str, str]) -> None:
    """Write `steps`(frame, list, whether to inspect the flags after each primitive).

    It returns null, or an error made by XLA.
    """
    with out.function("ptr @steps(ptr %frame, ptr %list, i1 %watched)", returns=True):
        out.raw(f"  %memories = alloca [{MOST_ARGUMENTS} x {_MEMORY}]")
        out.raw(f"  %table = alloca [{MOST_ARGUMENTS} x ptr]")
        out.raw("  %slot = alloca ptr\n  %status = alloca i32")
        arguments, results = out.field("%frame", _ARGUMENTS), out.field("%frame", _RESULTS)
        arena = out.add(f"load ptr, ptr {at['arena']}")
        made = out.add(f"call i32 {at['stream_create']}(ptr %slot, ptr {at['engine']}, i32 1)")
        stream = out.add("load ptr, ptr %slot")

        def step(_: str, values: Sequence[str]) -> list[str]:
            worst, here = values
            is_own = out.add(f"icmp eq i64 {out.item(here, 1)}, 1")
            is_primitive = out.opposite(is_own)
            n, rows = out.item(here, 2), out.at(here, "3", "i64")
            with out.loop("argument", "0", n) as j:
                row = out.at(rows, out.add(f"mul i64 {j}, 4"), "i64")
                _place(out, row, arguments, results, arena)
                data = out.add("load ptr, ptr %slot")
                with out.only_if("address", is_own):
                    out.raw(f"  store ptr {data}, ptr {out.at('%table', j, 'ptr')}")
                with out.only_if("memory", is_primitive):
                    memory = out.at("%memories", j, _MEMORY)
                    out.raw(f"  store i32 {out.item(row, 0, 'i32')}, ptr {memory}")
                    place, desc = out.at(memory, "8", "i8"), out.item(row, 1, "ptr")
                    given = f"ptr {place}, ptr {desc}, ptr {at['engine']}, ptr {data}"
                    out.add(f"call i32 {at['memory_create']}({given})")
            out.raw(f"  store i32 {worst}, ptr %status")
            with out.only_if("own", is_own):
                out.raw(f"  call void {out.item(here, 0, 'ptr')}(ptr %table)")
            with out.only_if("primitive", is_primitive):
                _execute(out, at, here, stream, n)
                with out.loop("free", "0", n) as k:
                    old = out.field(out.at("%memories", k, _MEMORY), 8)
                    out.add(f"call i32 {at['memory_destroy']}(ptr {old})")
            following = out.at(rows, out.add(f"mul i64 {n}, 4"), "i64")
            return [out.add("load i32, ptr %status"), following]

        first, n_steps = out.at("%list", "1", "i64"), out.item("%list", 0)
        worst, _ = out.carried("step", "0", n_steps, "1", [made, first], step, ("i32", "ptr"))
        out.add(f"call i32 {at['stream_destroy']}(ptr {stream})")
        out.raw("  store ptr null, ptr %slot")
        with out.only_if("failed", out.add(f"icmp ne i32 {worst}, 0")):
            error = out.add(f"alloca {_ERROR}")
            out.raw(f"  store {_ERROR} {{i64 32, ptr null, ptr @message, i32 13}}, ptr {error}\n")
            create = out.field(out.field("%frame", _API), _CREATE_ERROR)
            out.raw(f"  store ptr {out.add(f'call ptr {create}(ptr {error})')}, ptr %slot")
        out.raw(f"  ret ptr {out.add('load ptr, ptr %slot')}")


def _place(out: Code, row: str, arguments: str, results: str, arena: str) -> None:
    """Write the address of a step's argument to `%slot`."""
    kind, where = out.item(row, 2), out.item(row, 3)
    is_number = out.add(f"icmp sge i64 {kind}, 2")
    with out.only_if("from_start", is_number):
        in_arena = out.add(f"icmp eq i64 {kind}, 2")
        start = out.add(f"select i1 {in_arena}, ptr {arena}, ptr null")
        out.raw(f"  store ptr {out.at(start, where, 'i8')}, ptr %slot")
    with out.only_if("from_buffer", out.opposite(is_number)):
        is_argument = out.add(f"icmp eq i64 {kind}, 0")
        buffers = out.add(f"select i1 {is_argument}, ptr {arguments}, ptr {results}")
        index = out.add(f"and i64 {where}, {(1 << INDEX_BITS) - 1}")
        offset = out.add(f"lshr i64 {where}, {INDEX_BITS}")
        buffer = out.add(f"load ptr, ptr {out.at(buffers, index, 'ptr')}")
        out.raw(f"  store ptr {out.at(out.field(buffer, _DATA), offset, 'i8')}, ptr %slot")


def _execute(out: Code, at: Mapping[str, str], here: str, stream: str, n: str) -> None:
    """Run a step's primitive, creating it if need be; combine its status into `%status`."""

    def add_status(new: str) -> None:
        before = out.add("load i32, ptr %status")
        out.raw(f"  store i32 {out.add(f'or i32 {before}, {new}')}, ptr %status")

    what = out.at(here, "1", "i64")
    with out.only_if("build", out.add(f"icmp eq i64 {out.item(here, 1)}, 2")):
        prim = out.item(here, 0, "ptr")
        made = out.add(f"call i32 {at['primitive_create']}(ptr {here}, ptr {prim})")
        add_status(made)
        with out.only_if("keep", out.add(f"icmp eq i32 {made}, 0")):
            out.raw(f"  store i64 0, ptr {what}")
    with out.only_if("go", out.add(f"icmp eq i64 {out.item(here, 1)}, 0")):
        given = f"ptr {out.item(here, 0, 'ptr')}, ptr {stream}, i32 {out.item(here, 2, 'i32')}"
        add_status(out.add(f"call i32 {at['primitive_execute']}({given}, ptr %memories)"))
        with out.only_if("watch", "%watched"):
            out.raw("  call void @probe()")


def _write_semaphores(out: Code, at: Mapping[str, str]) -> None:
    """Write `wait`(semaphore) and `post`(semaphore)."""
    with out.function("void @wait(ptr %semaphore)"):
        out.raw("  br label %again\nagain:  ; a signal ends the waiting early")
        status = out.add(f"call i32 {at['sem_wait']}(ptr %semaphore)")
        out.raw(f"  br i1 {out.add(f'icmp eq i32 {status}, 0')}, label %end, label %again\nend:")
    with out.function("void @post(ptr %semaphore)"):
        out.add(f"call i32 {at['sem_post']}(ptr %semaphore)")


def _write_serve(out: Code, at: Mapping[str, str]) -> None:
    with out.function("ptr @serve(ptr %nothing)", returns=True):
        out.raw(f"  %mode = alloca i32\n  store i32 {_FLUSH}, ptr %mode")
        out.raw("  call void @llvm.x86.sse.ldmxcsr(ptr %mode)\n  br label %next\nnext:")
        out.raw(f"  call void @wait(ptr {at['asked']})")
        frame, plan = (out.add(f"load ptr, ptr {at[name]}") for name in ("frame", "plan"))
        result = out.add(f"call ptr @run(ptr {frame}, ptr {plan})")
        out.raw(f"  store ptr {result}, ptr {at['result']}")
        out.raw(f"  call void @post(ptr {at['answered']})\n  br label %next")


def _write_call(out: Code, at: Mapping[str, str]) -> None:
    """Write `call`(frame, plan), which answers XLA's query for metadata, or has the plan run."""
    with out.function("ptr @call(ptr %frame, ptr %plan)", returns=True):
        out.raw("  %result = alloca ptr\n  store ptr null, ptr %result")
        extension = out.field("%frame", _EXTENSION)
        is_question = out.add(f"icmp ne ptr {extension}, null")
        with out.only_if("metadata", is_question):
            about = out.field(extension, _METADATA)
            for offset, value in ((_MAJOR, 0), (_MINOR, 1), (_TRAITS, 0)):
                out.raw(f"  store i32 {value}, ptr {out.at(about, str(offset), 'i8')}")
        with out.only_if("ask", out.opposite(is_question)):
            out.raw(f"  call void @wait(ptr {at['free']})")
            out.raw(f"  store ptr %frame, ptr {at['frame']}\n  store ptr %plan, ptr {at['plan']}")
            out.raw(f"  call void @post(ptr {at['asked']})")
            out.raw(f"  call void @wait(ptr {at['answered']})")
            answer = out.add(f"load ptr, ptr {at['result']}")
            out.raw(f"  store ptr {answer}, ptr %result")
            out.raw(f"  call void @post(ptr {at['free']})")
        out.raw(f"  ret ptr {out.add('load ptr, ptr %result')}")


def passes_on(name: str, call: str, plan: str) -> str:
    """Return a module with the function `name`(frame), which calls `call` with this plan."""
    out = Code()
    with out.function(f"ptr @{name}(ptr %frame)", returns=True):
        result = out.add(f"call ptr {call}(ptr %frame, ptr {plan})")
        out.raw(f"  ret ptr {result}")
    return out.text
