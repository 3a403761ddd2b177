"""XLA custom calls that run a list of library primitives and generated kernels in order.

XLA's interface for custom calls takes one function without further data. So each list gets a
function of a few instructions that passes the list's address to `call`, which all lists share
(`server`): no external compiler is needed, and no Python runs in the call.

XLA calls from any of its threads. OpenMP gives each calling thread a team of its own, and the
system often puts two threads of a team on one processor, where they stay for the duration of a
call: networks of a few milliseconds then take twice as long. So a single thread, the server thread,
makes all calls, one after the other; it and its team are each bound to a processor, XLA's threads
are not.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import mmap
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from xrl_jax.libraries.onednn import (
    attention,
    blocked,
    convert,
    int16,
    keeping,
    levels,
    rows,
    server,
    stream,
    tiles,
)
from xrl_jax.libraries.onednn.attention import Attended
from xrl_jax.libraries.onednn.blocked import Blocked
from xrl_jax.libraries.onednn.c_api import Desc, Library, Prim
from xrl_jax.libraries.onednn.convert import Converted
from xrl_jax.libraries.onednn.int16 import Products16, RowLevels
from xrl_jax.libraries.onednn.keeping import Clipped, WindowMax
from xrl_jax.libraries.onednn.levels import Largest, Levels
from xrl_jax.libraries.onednn.machine_code import (
    MakeKernel,
    addresses,
    forever,
    module,
    pointer,
)
from xrl_jax.libraries.onednn.server import MOST_ARGUMENTS, QUEUE, QUEUE_BYTES
from xrl_jax.libraries.onednn.spec import Loop
from xrl_jax.libraries.onednn.stream import Streamed
from xrl_jax.libraries.onednn.tiles import Results, Tiles

# Descriptions of generated kernels: of those compiled for their sizes, and of all.
_SizedKernel = (
    Loop
    | Tiles
    | Results
    | Streamed
    | Blocked
    | Attended
    | Converted
    | Largest
    | Levels
    | RowLevels
    | Products16
)
Generated = _SizedKernel | Clipped | WindowMax
_PAGE = 1 << 21  # bytes of a large page
_ARGUMENT, _RESULT, _ARENA, _ADDRESS = 0, 1, 2, 3
_PRIMITIVE, _GENERATED, _LATER = 0, 1, 2


class Place(NamedTuple):
    """Location of an array: in argument or result `at` of the call, `offset` bytes after its
    start, or at byte `at` of the arena.
    """

    kind: int
    at: int
    offset: int = 0

    @classmethod
    def argument(cls, at: int) -> Place:
        return cls(_ARGUMENT, at)

    @classmethod
    def result(cls, at: int) -> Place:
        return cls(_RESULT, at)

    @classmethod
    def arena(cls, at: int) -> Place:
        return cls(_ARENA, at)

    @property
    def code(self) -> int:
        """The location within the memory of its kind, as `server` reads it."""
        return self.at if self.kind == _ARENA else self.at | self.offset << server.INDEX_BITS


class Later(NamedTuple):
    """A primitive that is created when it is first executed."""

    prim: Prim


class Step(NamedTuple):
    """A primitive or a generated kernel, with its arguments.

    An argument is given by its number in the library's interface, its layout and its place. The
    last argument of a generated kernel is its result.
    """

    primitive: int | Later | Generated
    args: tuple[tuple[int, Desc, Place], ...]


_LOCK = threading.Lock()
_timed_only = False
_NUMBERS = itertools.count()  # for the names of generated kernels
# Memory whose addresses are in generated code; lists by name.
_KEPT: dict[str, Any] = forever({})


def register(
    lib: Library, name: str, steps: Sequence[Step], arena: int = 0, careful: Sequence[Step] = ()
) -> None:
    """Register a list of steps with XLA under this name, unless it is registered already.

    Args:
      arena: bytes of the arena that the steps need.
      careful: steps with the same results that keep NaN, where `steps` do not; see `flags`.
    """
    with _LOCK:
        if name in _KEPT:
            return
        if careful and lib.threads() is None:  # its threads' flags cannot be read
            steps, careful = careful, ()
        lists = [_encoded(lib, some) for some in (steps, careful) if some]
        if careful and _timed_only:
            lists[1][0] = 0  # no steps
        starts = [x.ctypes.data for x in lists]
        plan = np.asarray([*starts, 0, 0][:3], np.int64)
        _KEPT[name] = plan, lists
        function = name.replace(".", "_")
        call, at = pointer(_server(lib)), pointer(plan.ctypes.data)
        _grow_arena(arena)
        _watch_threads(lib.n_threads())
        (address,) = addresses(server.passes_on(function, call, at), function)
        capsule = _capsule(address)
        jax.ffi.register_ffi_target(name, capsule, platform="cpu", api_version=1)


def only_time() -> None:
    """Turn off reruns because of NaN, for calls that are registered from now on.

    Random weights overflow in a deep network, and the time asked for is that of ordinary values.
    """
    global _timed_only
    _timed_only = True


def careful_runs() -> int:
    """Return how many calls so far were rerun because they met NaN or values that overflow."""
    return _in_queue("careful_runs", ctypes.c_int64).value if "the queue" in _KEPT else 0


def _in_queue(name: str, kind: Any) -> Any:
    return kind.from_address(ctypes.addressof(_KEPT["the queue"]) + QUEUE[name])


def _encoded(lib: Library, steps: Sequence[Step]) -> np.ndarray:
    """Encode the steps as int64 values, in the format that `server` describes."""
    numbers: list[int] = [len(steps)]
    for what, args in steps:
        if len(args) > MOST_ARGUMENTS:
            raise ValueError(f"a primitive has {len(args)} arguments, which is too many")
        more: list[int] = []
        match what:
            case int():
                head = what, _PRIMITIVE
            case Later(prim):
                head = prim, _LATER
            case Clipped() | WindowMax():
                head = _keeping_functions()[what.name], _GENERATED
                more = [0, 0, _ADDRESS, _parameters(what).ctypes.data]
            case _:
                head = _compiled(lib, what), _GENERATED
        numbers += [*head, len(args) + len(more) // 4]
        for which, desc, place in args:
            numbers += [which, desc, place.kind, place.code]
        numbers += more
    return np.asarray(numbers, np.int64)


@functools.cache
def _parameters(what: Clipped | WindowMax) -> np.ndarray:
    """Return the parameters for the code of `keeping`, in memory that is never freed."""
    return forever(np.asarray(what.parameters, np.int64))


@functools.cache
def _keeping_functions() -> dict[str, int]:
    """Compile the code of `keeping`; return the addresses of its functions by name."""
    names = "clipped", "window_max"
    return dict(zip(names, addresses(keeping.code(), *names), strict=True))


_KERNELS: dict[type, MakeKernel] = {
    Loop: rows.kernel_of,
    Tiles: tiles.kernel_of,
    Results: tiles.kernel_of,
    Streamed: stream.kernel_of,
    Blocked: blocked.kernel_of,
    Attended: attention.kernel_of,
    Converted: convert.kernel_of,
    Largest: levels.kernel_of,
    Levels: levels.kernel_of,
    RowLevels: int16.kernel_of,
    Products16: int16.kernel_of,
}


@functools.cache
def _compiled(lib: Library, what: _SizedKernel) -> int:
    """Compile a generated kernel and return its address."""
    threads = lib.threads()
    parallel = None
    if threads is not None:
        start, n_threads, number = map(pointer, threads)
        parallel = start, n_threads, number
    name = f"own{next(_NUMBERS)}"
    (address,) = addresses(module(_KERNELS[type(what)], what, name, parallel), name)
    return address


def _grow_arena(n_bytes: int) -> None:
    """Make the arena at least `n_bytes` long.

    One arena serves all calls, since they run one at a time. Memory that XLA allocated for each
    call could be fresh from the system, with a page fault and zeroing for every page. An arena that
    has become too small is kept, because a call may be using it.
    """
    arenas: list[mmap.mmap] = _KEPT.setdefault("the arenas", [])
    if n_bytes > (len(arenas[-1]) - _PAGE if arenas else 0):
        memory = mmap.mmap(-1, 2 * n_bytes + _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        arenas.append(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start += -start % _PAGE
        _in_queue("arena", ctypes.c_void_p).value = start


def _watch_threads(n: int) -> None:
    """Make the probe of `flags` inspect at least `n` threads.

    A primitive is created for as many threads as the thread that creates it may use.
    """
    threads = _in_queue("threads", ctypes.c_int32)
    threads.value = max(threads.value, n)


@functools.cache
def _server(lib: Library) -> int:
    """Start the server thread and return the address of `call`."""
    libc = ctypes.CDLL(None)
    queue = ctypes.create_string_buffer(QUEUE_BYTES)
    start = ctypes.addressof(queue)
    _KEPT["the queue"] = queue
    _in_queue("unclear", ctypes.c_int64).value = 1
    for name, number in (("free", 1), ("asked", 0), ("answered", 0)):
        libc.sem_init(ctypes.c_void_p(start + QUEUE[name]), 0, number)
    functions = [
        *("stream_create", "stream_destroy", "memory_create", "memory_destroy"),
        *("primitive_create", "primitive_execute"),
    ]
    at = {name: start + offset for name, offset in QUEUE.items()}
    at |= {f: lib.address(f"dnnl_{f}") for f in functions} | {"engine": lib.engine}
    for name in ("sem_wait", "sem_post"):
        at[name] = int(ctypes.cast(getattr(libc, name), ctypes.c_void_p).value or 0)
    constants = {name: pointer(address) for name, address in at.items()}
    threads = lib.threads()
    read_by = None if threads is None else (pointer(threads[0]), pointer(threads[2]))
    serve, call = addresses(server.code(constants, read_by), "serve", "call")
    thread = ctypes.c_ulong()
    status = libc.pthread_create(ctypes.byref(thread), None, ctypes.c_void_p(serve), None)
    if status:
        raise OSError(status, "no thread could be started for oneDNN")
    libc.pthread_detach(thread)
    return call


def _capsule(address: int) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, None, None)
