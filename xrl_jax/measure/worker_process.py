"""The process at the other end of `worker.Worker`: compiles artifacts, times them, answers.

The two processes exchange frames over two pipes: a header in JSON and raw bytes, each preceded by
its length, never pickle. This process keeps private copies of the pipes' descriptors, so that
output printed by a library cannot get between the frames. It ends when its parent does, even in the
middle of a job.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import json
import os
import queue
import signal
import struct
import threading
import time
from collections.abc import Callable
from typing import IO, Any, Protocol

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from xrl_jax.libraries.base import CustomCall
from xrl_jax.libraries.registry import calls, register_calls
from xrl_jax.measure.base import EVERYTHING, any_of
from xrl_jax.measure.comparison import call_seconds, calls_per_turn, interleave, warm_up
from xrl_jax.measure.inputs import hlo_hash, random_input
from xrl_jax.measure.target import target_here
from xrl_jax.measure.timing import Timing, error_text, paired_ratio, timing_of
from xrl_jax.runtime.memory import release_memory

MIN_ROUNDS = 5
MAX_ROUNDS = 200
TURN_SECONDS = 2e-4  # short functions are called in a row for about this long
KEPT_REFERENCES = 4
KEPT_BYTES = 1 << 30  # of all references; the last one is kept whatever its size
REFERENCE_CALLS = 4
REFERENCE_SECONDS = 1e-4  # least time of one call
REFERENCE_SIZES = (256, 512, 1024, 2048, 4096)
OVERHEAD_SECONDS = 0.15  # spent on timing the overhead of a call
_LENGTHS = struct.Struct("!IQ")


def write_frame(stream: IO[bytes], header: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(header, allow_nan=False).encode()
    stream.write(_LENGTHS.pack(len(text), len(body)) + text)
    stream.write(body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """Return the next (header, body). Raises EOFError if the stream ends, also within a frame."""

    def exactly(size: int) -> bytes:
        data = stream.read(size)
        if len(data) < size:
            raise EOFError
        return data

    header_size, body_size = _LENGTHS.unpack(exactly(_LENGTHS.size))
    return json.loads(exactly(header_size)), exactly(body_size)


@dataclasses.dataclass
class _Timed:
    """A compiled and warm function with its inputs, and how often to call it in a turn."""

    run: Callable[[], Any]
    calls: int


@dataclasses.dataclass
class _Ready(_Timed):
    """A job that is ready to be timed."""

    compile_seconds: float
    hlo_hash: str
    result_key: tuple[str, ...]  # key, equal for jobs of which only one need be timed
    n_bytes: int  # of inputs; and of constants 3 times: here, in HLO and in compiled code


@dataclasses.dataclass
class _ReferenceKernel(_Timed):
    """The kernel that jobs without a reference are timed in turn with."""

    multiplications: int  # in a call


class Server(Protocol):
    """Answers the requests of a `worker.Worker`, one by one."""

    def answer(self, header: dict[str, Any], body: bytes) -> dict[str, Any]: ...


class _Server:
    """Answers frames. Keeps the last few references, and every result by optimised HLO, inputs and
    settings.
    """

    def __init__(self) -> None:
        self._references: collections.OrderedDict[str, _Ready] = collections.OrderedDict()
        self._reference_kernel: _ReferenceKernel | None = None  # made for the greeting
        self._results: dict[tuple[Any, ...], Timing] = {}
        self._compiled = 0

    def answer(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        try:
            if header["do"] == "hello":
                overhead = _overhead()
                self._reference_kernel = _reference_kernel()
                # JAX's objects up to now are kept for good: the garbage collection before each job
                # would traverse all of them, which takes about as long as a job.
                gc.freeze()
                target = dataclasses.asdict(target_here())
                return {"overhead_seconds": overhead, "target": target}
            if header["do"] == "hold":
                self._hold(header, body)
                return {"held": True}
            named = header.get("reference")
            if named is not None and named["identity"] not in self._references:
                return {"needs_reference": True}
            return {"timing": self._time(header, body).as_dict()}
        except Exception as error:  # whatever goes wrong in a job is that job's result
            failed = Timing.without("failed", error_text(error))
            return {"timing": failed.as_dict(), "broken": not _device_works()}

    def _hold(self, header: dict[str, Any], artifact: bytes) -> None:
        self._references[header["identity"]] = self._ready(header, artifact)
        kept = self._references
        while len(kept) > 1 and (
            len(kept) > KEPT_REFERENCES or sum(r.n_bytes for r in kept.values()) > KEPT_BYTES
        ):
            kept.popitem(last=False)
            release_memory()

    def _time(self, header: dict[str, Any], artifact: bytes) -> Timing:
        if header["slope"]:
            return self._time_slope(header, artifact)
        ready = self._ready(header, artifact)
        named = header.get("reference")
        result_key = (
            *ready.result_key,
            header["launches"],
            header["seconds"],
            None if named is None else named["identity"],
        )
        timing = self._results.get(result_key)
        if timing is None:
            against: _Timed | None = self._reference_kernel
            if named is not None:
                against = self._references[named["identity"]]
                self._references.move_to_end(named["identity"])
            functions: dict[str, _Timed] = {"job": ready}
            if against is not None:
                functions["against"] = against
            samples = interleave(
                {name: each.run for name, each in functions.items()},
                {name: each.calls for name, each in functions.items()},
                seconds=header["seconds"],
                min_rounds=MIN_ROUNDS,
                max_rounds=MAX_ROUNDS,
                rng=np.random.default_rng(0),
                # The reference kernel leaves most of the caches to the job.
                warm_caches=named is not None,
            )
            timing = timing_of(samples["job"], hlo_hash=ready.hlo_hash)
            if against is not None:
                ratio = paired_ratio(
                    samples["job"], samples["against"], rng=np.random.default_rng(0)
                ).value
                if isinstance(against, _ReferenceKernel):
                    reference_seconds = timing.seconds / ratio / against.multiplications
                    timing = dataclasses.replace(timing, reference_seconds=reference_seconds)
                else:
                    timing = dataclasses.replace(timing, relative=ratio)
            self._results[result_key] = timing
        return dataclasses.replace(
            timing,
            compile_seconds=ready.compile_seconds,
            reference="" if named is None else named["key"],
        )

    def _time_slope(self, header: dict[str, Any], artifact: bytes) -> Timing:
        """Return the timing of one copy, from programs with few and with many of them."""
        few, many = header["slope"]
        ready = {n: self._ready(header, artifact, copies=n) for n in (few, many)}
        samples = interleave(
            {str(n): each.run for n, each in ready.items()},
            {str(n): each.calls for n, each in ready.items()},
            seconds=header["seconds"],
            min_rounds=MIN_ROUNDS,
            max_rounds=MAX_ROUNDS,
            rng=np.random.default_rng(0),
            warm_caches=True,
        )
        pairs = zip(samples[str(few)], samples[str(many)], strict=True)
        return timing_of(
            [max(more - less, 0.0) / (many - few) for less, more in pairs],
            hlo_hash=ready[few].hlo_hash,
            compile_seconds=sum(each.compile_seconds for each in ready.values()),
        )

    def _ready(self, header: dict[str, Any], artifact: bytes, *, copies: int = 1) -> _Ready:
        """Compile and warm up an artifact, or a program of copies of it. Raises what JAX raises."""
        self._compiled += 1
        if self._compiled % 50 == 0:
            jax.clear_caches()  # an artifact's trace is never looked up again
        register_calls([CustomCall(name, tuple(data)) for name, data in header["custom_calls"]])
        try:
            exported = jax.export.deserialize(bytearray(artifact))
        except Exception as error:  # the reader of the format raises errors of many types
            raise ValueError(f"the artifact cannot be read: {error_text(error)}") from error
        if exported.nr_devices != 1:
            raise ValueError(
                f"the artifact is for {exported.nr_devices} devices; the worker times on one"
            )
        avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
        n_fixed = header["constants"]
        leaves = [random_input(aval, seed=number) for number, aval in enumerate(avals)]
        # NumPy arrays that are closed over become constants of the compiled code.
        fixed, own = [np.asarray(leaf) for leaf in leaves[:n_fixed]], leaves[n_fixed:]
        # The same values for every copy, but arrays of their own.
        rest = own + [jnp.copy(leaf) for _ in range(copies - 1) for leaf in own]

        def call(*given: Any) -> Any:
            arguments, keywords = jax.tree.unflatten(exported.in_tree, [*fixed, *given])
            return exported.call(*arguments, **keywords)

        def call_all(*given: Any) -> Any:
            return [call(*given[i : i + len(own)]) for i in range(0, len(given), len(own) or 1)]

        start = time.perf_counter()
        options = {name: option_value(value) for name, value in header["options"].items()}
        compiled, rest = _compiled(
            call if copies == 1 else call_all, rest, options, any_layout=header["any_layout"]
        )
        compile_seconds = time.perf_counter() - start

        def run() -> Any:
            return compiled(*rest)

        _, warm = warm_up(run)
        calls = header["launches"] or calls_per_turn(warm, TURN_SECONDS)
        text_hash = hlo_hash(compiled.as_text() or artifact.hex())
        # Options are part of the key: some change the generated code and not the HLO.
        result_key = (
            text_hash,
            str([(aval.shape, str(aval.dtype)) for aval in avals]),
            json.dumps([sorted(options.items()), header["constants"]]),
        )
        n_bytes = sum(map(_bytes, rest)) + 3 * sum(map(_bytes, fixed))
        return _Ready(run, calls, compile_seconds, text_hash, result_key, n_bytes)


def _compiled(
    fn: Callable[..., Any], leaves: list[Any], options: dict[str, Any], *, any_layout: int
) -> tuple[Any, list[Any]]:
    """Return the compiled function, and its arguments laid out as it wants them.

    Args:
      any_layout: see `Job.any_layout`.
    """
    if not any_layout:
        return jax.jit(fn).lower(*leaves).compile(compiler_options=options), leaves
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    free = Format(Layout.AUTO, place)
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    lowered = jax.jit(
        fn,
        in_shardings=tuple(free if own else place for own in any_of(any_layout, len(leaves))),
        out_shardings=free if any_layout == EVERYTHING else place,
    ).lower(*avals)
    compiled = lowered.compile(compiler_options=options)
    formats, _ = compiled.input_formats
    return compiled, [jax.device_put(x, f) for x, f in zip(leaves, formats, strict=True)]


def _bytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def option_value(text: str) -> str | bool:
    """Return a compile option of XLA as JAX wants it: "true" and "false" as booleans."""
    return {"true": True, "false": False}.get(text.lower(), text)


def _warm(fn: Callable[..., Any], *args: Any) -> _Timed:
    compiled = jax.jit(fn).lower(*args).compile()

    def run() -> Any:
        return compiled(*args)

    _, warm = warm_up(run)
    return _Timed(run, calls_per_turn(warm, TURN_SECONDS))


def _overhead() -> float:
    """Return the seconds per call of a compiled addition of eight elements: what any call costs."""
    little = _warm(lambda x: x + 1, random_input(jax.ShapeDtypeStruct((8,), np.float32)))
    samples = interleave(
        {"little": little.run},
        {"little": little.calls},
        seconds=OVERHEAD_SECONDS,
        min_rounds=MIN_ROUNDS,
        max_rounds=MAX_ROUNDS,
        rng=np.random.default_rng(0),
        warm_caches=False,
    )
    return timing_of(samples["little"]).seconds


def _reference_kernel() -> _ReferenceKernel:
    """Return a product of two square matrices, the smallest that takes `REFERENCE_SECONDS`.

    It uses little memory and is called several times in a row, so that it takes the same time after
    a job that has evicted the caches.
    """
    for size in REFERENCE_SIZES:
        x, w = (
            random_input(jax.ShapeDtypeStruct((size, size), np.float32), seed=n) for n in (0, 1)
        )
        product = _warm(jnp.matmul, x, w)
        if call_seconds(product.run) >= REFERENCE_SECONDS:
            break
    return _ReferenceKernel(product.run, REFERENCE_CALLS, multiplications=size**3)


def _device_works() -> bool:
    """Return whether the device still computes: after some faults a process cannot use a GPU any
    more.
    """
    try:
        return bool(np.asarray(jax.device_put(np.ones(8, np.float32)) + 1).sum() == 16.0)
    except Exception:
        return False


def serve(server: Callable[[], Server]) -> None:
    """Answer the parent's frames until it ends.

    Args:
      server: makes what answers, once the pipes are safe from output of libraries.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    inbox: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                inbox.put(read_frame(requests))
        except (EOFError, OSError, ValueError):
            os._exit(0)  # the parent is gone: end even while a job hangs

    threading.Thread(target=read, daemon=True).start()
    made = server()
    while True:
        header, body = inbox.get()
        write_frame(answers, made.answer(header, body))


def _timing_server() -> _Server:
    lib_calls = calls()
    if lib_calls is not None:
        lib_calls.only_time()
    return _Server()


def main() -> None:
    serve(_timing_server)


if __name__ == "__main__":
    main()
