"""A second process that compiles and times artifacts, so that a job that crashes, hangs or runs out
of memory harms no other.

This is the caller's side; `worker_process` runs at the other end of the pipes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Self

import jax
import jax.export

from xrl_jax.measure.base import SECONDS_PER_JOB, Job
from xrl_jax.measure.target import Target
from xrl_jax.measure.timing import Timing
from xrl_jax.measure.worker_process import read_frame, write_frame


class WorkerError(RuntimeError):
    """No worker process could be started."""


class _LostError(Exception):
    """The worker process ended before it answered; the arguments are a status and an error text."""


class Worker:
    """Times jobs in a process of its own, which is started when first needed and again after each
    loss.

    It may be used from several threads, which take turns job by job. Use it as a context manager,
    or call `close`.

    Args:
      start_timeout: seconds until the process has to answer for the first time.
      process: module and arguments of the process; it answers as `worker_process` does.
      environment: variables that the process has in addition to those of this one.
    """

    def __init__(
        self,
        *,
        start_timeout: float = 120.0,
        process: Sequence[str] = ("xrl_jax.measure.worker_process",),
        environment: Mapping[str, str] = MappingProxyType({}),
    ):
        self._start_timeout = start_timeout
        self._command = tuple(process)
        self._environment = dict(environment)
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None  # the worker's standard error
        self._hello: dict[str, Any] | None = None

    def submit(
        self,
        jobs: Sequence[Job],
        *,
        reference: Job | None = None,
        seconds_per_job: float = SECONDS_PER_JOB,
        timeout: float = 60.0,
        progress: Callable[[int, Timing], None] | None = None,
    ) -> list[Timing]:
        """Return one Timing per job, in order.

        If a job fails, crashes the worker or takes longer than `timeout` seconds (compiling and
        warm-up included), its timing's status says so, and the next job runs in a new worker if the
        old one is lost.

        With `reference`, each job is timed in turn with it, and Timing.relative says how many times
        longer the job takes; None if either of them could not be timed. `progress(index, timing)`
        is called after each job. Raises WorkerError if no worker can be started.
        """
        timings: list[Timing] = []
        for index, job in enumerate(jobs):
            with self._lock:
                timing, reference = self._time(job, reference, seconds_per_job, timeout)
            timings.append(timing)
            if progress is not None:
                progress(index, timing)
        return timings

    @property
    def overhead_seconds(self) -> float:
        """Seconds per call of a function that computes next to nothing, timed when the worker
        started.
        """
        return float(self._started()["overhead_seconds"])

    @property
    def target(self) -> Target:
        """The worker's target, for the store; this process starts no backend to find it out."""
        return Target(**self._started()["target"])

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None while none runs."""
        process = self._process
        return None if process is None else process.pid

    def close(self) -> None:
        """End the process, after waiting for another thread's current job. The worker starts again
        if it is used again.
        """
        with self._lock:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _time(
        self, job: Job, reference: Job | None, seconds: float, timeout: float
    ) -> tuple[Timing, Job | None]:
        """Return the job's timing, and the reference, or None if that turned out not to run."""
        for _ in range(3):  # a worker lost between the two requests has lost its reference
            header = {"do": "time", **_described(job, seconds)}
            if reference is not None:
                header["reference"] = {"identity": reference.identity, "key": reference.key}
            answer = self._ask(header, job.artifact, timeout)
            if not answer.get("needs_reference"):
                return Timing.from_dict(answer["timing"]), reference
            assert reference is not None
            held = self._ask(
                {"do": "hold", **_described(reference, seconds)}, reference.artifact, timeout
            )
            if not held.get("held"):
                reference = None
        lost = Timing.without("killed", "the worker process was lost several times in a row")
        return lost, reference

    def _ask(self, header: dict[str, Any], body: bytes, timeout: float) -> dict[str, Any]:
        """Return the worker's answer, or, if the worker is lost, an answer that says so."""
        self._started()
        try:
            answer = self._exchange(header, body, timeout)
        except _LostError as loss:
            return {"timing": Timing.without(*loss.args).as_dict()}
        if answer.get("broken"):
            self._end()  # the device does not recover within that process
        return answer

    def _started(self) -> dict[str, Any]:
        """Return the greeting of the running worker; start the worker if need be."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()
            if self._process is None or self._hello is None:
                self._start()
                try:
                    hello = self._exchange({"do": "hello"}, b"", self._start_timeout)
                except _LostError as loss:
                    raise WorkerError(f"the timing worker did not start: {loss.args[1]}") from None
                if "target" not in hello:
                    self._end()
                    raise WorkerError(
                        f"the timing worker cannot compute: {hello['timing']['error']}"
                    )
                self._hello = hello
            return self._hello

    def _start(self) -> None:
        if not sys.executable:
            raise WorkerError(
                "no timing worker can be started: sys.executable, the interpreter, is not set"
            )
        self._end()  # the remains of an interrupted start
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the worker runs)
        try:
            self._process = subprocess.Popen(
                # -P: a file in the working folder must not shadow a module of the library.
                [sys.executable, "-P", "-m", *self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=_environment() | self._environment,
                process_group=0,  # the terminal's Ctrl-C is for the parent
            )
        except OSError as error:
            self._end()
            raise WorkerError(f"no timing worker can be started: {error}") from error

    def _exchange(self, header: dict[str, Any], body: bytes, timeout: float) -> dict[str, Any]:
        """Send a frame and wait for the answer. Raises _LostError if the process ends first or is
        stopped after `timeout` seconds.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        # The first to take the token decides: this thread, once it has the answer, or the timer,
        # which must not kill a worker that has answered.
        token = threading.Semaphore(1)
        late = threading.Event()

        def stop() -> None:
            if token.acquire(blocking=False):
                late.set()
                process.kill()

        timer = threading.Timer(timeout, stop)
        timer.daemon = True
        timer.start()
        try:
            write_frame(process.stdin, header, body)
            answer, _ = read_frame(process.stdout)
            if not token.acquire(blocking=False):
                raise EOFError
            return answer
        except (EOFError, OSError):
            returncode = process.wait()
            said = self._last_words()
            self._end()
            if late.is_set():
                raise _LostError("timeout", f"stopped after {timeout:g} seconds{said}") from None
            raise _LostError(
                "killed", f"the worker process ended with {_ending(returncode)}{said}"
            ) from None
        except BaseException:
            self._end()  # interrupted: its next answer would be the one to this request
            raise
        finally:
            timer.cancel()

    def _last_words(self) -> str:
        """Return the end of what the worker wrote to its standard error."""
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 1000))
        text = self._log.read().decode(errors="replace").strip()
        return f"; its last output: {text}" if text else ""

    def _end(self) -> None:
        process, self._process, self._hello = self._process, None, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):  # unwritten data has no reader
                        stream.close()
        if self._log is not None:
            self._log.close()
            self._log = None


def _described(job: Job, seconds: float) -> dict[str, Any]:
    return {
        "identity": job.identity,
        "options": dict(job.options),
        "launches": job.launches,
        "constants": job.constants,
        "any_layout": job.any_layout,
        "slope": job.slope,
        "custom_calls": job.custom_calls,
        "seconds": seconds,
    }


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"


def python_path(*more: Path) -> str:
    """Return PYTHONPATH for a worker process: xrl_jax, then `more` folders, then this process's."""
    folders = [Path(__file__).resolve().parents[2], *more, os.environ.get("PYTHONPATH")]
    return os.pathsep.join(str(folder) for folder in folders if folder)


def _environment() -> dict[str, str]:
    """Return this process's environment, with the settings made through jax.config added."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = python_path()
    platforms = getattr(jax.config, "jax_platforms", None)
    if platforms:
        environment["JAX_PLATFORMS"] = platforms
    # An artifact states its types; this allows 64-bit ones whatever the flag is in the thread that
    # submits it.
    environment["JAX_ENABLE_X64"] = "True"
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the parent uses the device as well
    for name in ("JAX_DEBUG_NANS", "JAX_DEBUG_INFS", "JAX_DISABLE_JIT", "JAX_LOG_COMPILES"):
        environment.pop(name, None)  # random inputs may well give NaNs
    return environment
