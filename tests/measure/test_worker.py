"""The worker times artifacts in its own process; a failure costs one job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import pytest

from xrl_jax.measure import worker_process
from xrl_jax.measure.base import EVERYTHING, Job
from xrl_jax.measure.target import target_here
from xrl_jax.measure.timing import Timing
from xrl_jax.measure.worker import Worker, WorkerError, _described
from xrl_jax.measure.worker_process import MAX_ROUNDS, MIN_ROUNDS, read_frame, write_frame

ROOT = Path(__file__).resolve().parents[2]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def artifact(fn, *avals) -> bytes:
    return bytes(jax.export.export(jax.jit(fn))(*avals).serialize())


SMALL = Job("small", artifact(lambda x: jnp.tanh(x) + 1.0, f32(64)))
LARGE = Job("large", artifact(lambda x: x @ x, f32(384, 384)))
ENDLESS = Job(
    "endless",
    artifact(lambda x: jax.lax.while_loop(lambda _: True, lambda y: y + 1.0, x), f32(4)),
)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as shared:
        yield shared


def one(worker: Worker, job: Job, **options) -> Timing:
    (timing,) = worker.submit([job], **{"seconds_per_job": 0.02, "timeout": 60.0, **options})
    return timing


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_job_is_compiled_and_timed(worker):
    timing = one(worker, SMALL)
    assert timing.ok and timing.error == ""
    assert 0.0 < timing.low <= timing.seconds <= timing.high
    assert MIN_ROUNDS <= timing.repeats <= MAX_ROUNDS
    assert timing.compile_seconds > 0.0 and len(timing.hlo_hash) == 32
    assert timing.relative is None and timing.reference == ""


def test_jobs_are_answered_in_their_order_and_reported_one_by_one(worker):
    seen = []
    timings = worker.submit(
        [LARGE, SMALL, LARGE],
        seconds_per_job=0.02,
        progress=lambda index, timing: seen.append((index, timing)),
    )
    assert seen == list(enumerate(timings))
    assert timings[0].hlo_hash == timings[2].hlo_hash != timings[1].hlo_hash
    assert timings[0].seconds > timings[1].seconds


def test_a_job_is_timed_alternately_with_its_reference(worker):
    larger, same = worker.submit([LARGE, SMALL], reference=SMALL, seconds_per_job=0.05)
    assert larger.relative is not None and larger.relative > 2.0
    assert same.relative is not None and 0.5 < same.relative < 2.0
    assert larger.reference == same.reference == "small"


def test_without_a_reference_a_fixed_kernel_measures_how_busy_the_machine_is(worker):
    small, large = one(worker, SMALL), one(worker, LARGE)
    assert small.reference_seconds is not None and large.reference_seconds is not None
    assert (
        0.3 < small.reference_seconds / large.reference_seconds < 3.0
    )  # the same kernel, timed twice
    assert one(worker, LARGE, reference=SMALL).reference_seconds is None


def test_a_failing_reference_does_not_affect_the_timing_of_a_job(worker):
    timing = one(worker, SMALL, reference=Job("broken", b"broken"))
    assert timing.ok and timing.relative is None and timing.reference == ""


def test_equal_optimised_programs_are_timed_once(worker):
    def renamed(y):
        return 1.0 + jnp.tanh(y)

    first = one(worker, SMALL)
    second = one(worker, Job("another key", artifact(renamed, f32(64))))
    assert second.hlo_hash == first.hlo_hash and second.seconds == first.seconds
    # Options may change the generated code although the HLO stays the same.
    options = (("xla_cpu_enable_fast_math", "true"),)
    assert one(worker, Job("fast", SMALL.artifact, options)).seconds != first.seconds


def test_the_overhead_of_a_call_is_less_than_a_call_that_computes(worker):
    assert 0.0 < worker.overhead_seconds < one(worker, LARGE).seconds


def test_the_worker_runs_on_the_same_machine(worker):
    assert worker.target == target_here()


@pytest.mark.parametrize(
    ("job", "error"),
    [
        (Job("cut", SMALL.artifact[:100]), "the artifact cannot be read"),
        (Job("option", SMALL.artifact, (("no_such_option", "1"),)), "no_such_option"),
    ],
)
def test_a_failed_job_reports_why(worker, job, error):
    one(worker, SMALL)  # starts the process
    pid = worker.pid
    failed, after = worker.submit([job, SMALL], seconds_per_job=0.02)
    assert failed.status == "failed" and error in failed.error
    assert after.ok and worker.pid == pid


def test_a_job_that_asks_for_too_much_memory_does_not_affect_others(worker):
    huge = Job("huge", artifact(lambda x: x + 1.0, f32(1 << 45)))
    failed, after = worker.submit([huge, SMALL], seconds_per_job=0.02)
    assert failed.status in ("failed", "killed") and failed.error
    assert after.ok


def test_inputs_of_every_kind(worker):
    def mixed(x, n, mask, key, pair):
        noise = jax.random.uniform(key, (4,), jnp.float32)
        return jnp.where(mask, x[n], noise) + pair["left"].real

    avals = (
        jax.ShapeDtypeStruct((8,), jnp.bfloat16),
        jax.ShapeDtypeStruct((4,), jnp.int32),
        jax.ShapeDtypeStruct((4,), jnp.bool_),
        jax.ShapeDtypeStruct((), jax.random.key(0).dtype),
        {"left": jax.ShapeDtypeStruct((4,), jnp.complex64)},
    )
    assert one(worker, Job("mixed", artifact(mixed, *avals))).error == ""


def test_artifacts_with_64_bit_types_can_be_timed(worker):
    with jax.enable_x64(True):
        wide = artifact(lambda x: x * 2.0, jax.ShapeDtypeStruct((4,), jnp.float64))
    assert one(worker, Job("wide", wide)).error == ""


def test_a_fixed_number_of_calls_per_sample(worker):
    timing = one(worker, Job("launches", SMALL.artifact, launches=3), seconds_per_job=0.0)
    assert timing.ok and timing.repeats == MIN_ROUNDS


def test_the_time_of_one_copy_is_the_slope_between_two_programs(worker):
    one = Job("copies", LARGE.artifact, slope=(2, 6))
    copies, alone = worker.submit([one, LARGE], seconds_per_job=0.3)
    assert copies.status == "ok", copies.error
    assert copies.seconds < 3 * alone.seconds  # of one, not of six


def test_xla_may_choose_layouts(worker):
    timing = one(worker, Job("any layout", LARGE.artifact, any_layout=EVERYTHING))
    assert timing.status == "ok", timing.error


def test_two_threads_share_a_worker(worker):
    results: dict[str, list[Timing]] = {}

    def work(job: Job) -> None:
        results[job.key] = worker.submit([job] * 4, reference=job, seconds_per_job=0.02)

    threads = [threading.Thread(target=work, args=(job,)) for job in (SMALL, LARGE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {job.key: one(worker, job).hlo_hash for job in (SMALL, LARGE)}
    assert {key: {t.hlo_hash for t in each} for key, each in results.items()} == {
        key: {value} for key, value in expected.items()
    }


def test_the_worker_ignores_ctrl_c(worker):
    one(worker, SMALL)
    pid = worker.pid
    os.kill(pid, signal.SIGINT)
    assert one(worker, LARGE).ok and worker.pid == pid


def test_a_job_that_hangs_is_stopped_and_the_next_goes_on(worker):
    one(worker, SMALL)
    pid = worker.pid
    hung, after = worker.submit([ENDLESS, SMALL], reference=SMALL, timeout=3.0)
    assert hung.status == "timeout" and "stopped after 3 seconds" in hung.error
    assert after.ok and after.relative is not None
    assert worker.pid != pid and not is_running(pid)


def test_a_job_that_kills_the_worker_does_not_affect_others(worker):
    one(worker, SMALL)
    victim = worker.pid
    killer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
    killer.start()
    killed, after = worker.submit([ENDLESS, SMALL], seconds_per_job=0.02)
    killer.join()
    assert killed.status == "killed" and "SIGKILL" in killed.error
    assert after.ok and worker.pid != victim


def test_a_worker_that_died_between_jobs_is_replaced(worker):
    one(worker, SMALL)
    os.kill(worker.pid, signal.SIGKILL)
    # Wait until all its threads are gone; it counts as a zombie before that.
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert one(worker, SMALL, reference=SMALL).ok


@pytest.fixture
def interruptible():
    # Tests that a shell starts in the background ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_in_the_parent_leaves_a_worker_that_can_be_used(worker):
    one(worker, SMALL)
    pid = worker.pid
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        worker.submit([ENDLESS])
    timer.join()
    assert not is_running(pid)
    assert one(worker, SMALL).ok


def test_a_worker_starts_when_needed_and_ends_with_close():
    with Worker() as short:
        assert short.pid is None
        assert short.submit([]) == [] and short.pid is None
        first = one(short, SMALL)
        pid = short.pid
        assert first.ok and pid is not None and is_running(pid)
        short.close()
        assert short.pid is None and not is_running(pid)
        # It starts again, and the same program has the same hash.
        assert one(short, SMALL).hlo_hash == first.hlo_hash


def test_a_worker_ends_with_its_parent_even_while_a_job_hangs(tmp_path):
    (tmp_path / "endless").write_bytes(ENDLESS.artifact)
    body = """
import pathlib, sys, threading, time
from xrl_jax.measure.base import Job
from xrl_jax.measure.worker import Worker
worker = Worker()
worker.overhead_seconds
job = Job("endless", pathlib.Path(sys.argv[1]).read_bytes())
threading.Thread(target=worker.submit, args=([job],), daemon=True).start()
time.sleep(1.0)
print(worker.pid, flush=True)
time.sleep(100.0)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", body, str(tmp_path / "endless")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 20.0
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def test_references_are_kept_within_a_memory_limit(monkeypatch):
    """Each reference takes 4,000 bytes, or three times as many if it has constants."""
    monkeypatch.setattr(worker_process, "KEPT_BYTES", 12_000)
    server = worker_process._Server()

    def hold(name: str, *, constants: int = 0) -> list[str]:
        job = Job(name, artifact(lambda x: x + 1.0, f32(1000)), constants=constants)
        header = {"do": "hold", **_described(job, 0.1), "identity": name}
        assert server.answer(header, job.artifact) == {"held": True}
        return list(server._references)

    assert [hold(n)[0] for n in "abcd"] == ["a", "a", "a", "b"]
    assert hold("e", constants=1) == ["e"]
    monkeypatch.setattr(worker_process, "KEPT_BYTES", 1)
    assert hold("f") == ["f"]


def test_the_identity_of_a_job_ignores_source_lines():
    def made_elsewhere() -> bytes:
        return artifact(lambda x: jnp.tanh(x) + 1.0, f32(64))

    again = Job("small", made_elsewhere())
    assert again.artifact != SMALL.artifact  # it contains source lines
    assert again.identity == SMALL.identity
    assert Job("small", artifact(lambda x: jnp.tanh(x) + 2.0, f32(64))).identity != SMALL.identity


def test_prints_do_not_corrupt_the_message_frames():
    body = """
import os
from xrl_jax.measure import worker_process
def noisy():
    print("stray", flush=True)
    os.write(1, b"stray")
    return 1.0
worker_process._overhead = noisy
worker_process.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", body],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    write_frame(process.stdin, {"do": "hello"})
    answer, body_bytes = read_frame(process.stdout)
    assert answer["overhead_seconds"] == 1.0 and body_bytes == b""
    rest, said = process.communicate()
    assert rest == b"" and said.count(b"stray") == 2 and process.returncode == 0


@pytest.mark.parametrize(
    ("executable", "message"),
    [
        ("/no/such/python", "No such file"),
        ("/bin/false", "did not start: the worker process ended with exit status 1"),
        ("", "sys.executable, the interpreter, is not set"),
    ],
)
def test_a_worker_that_cannot_start_reports_why(monkeypatch, executable, message):
    monkeypatch.setattr(sys, "executable", executable)
    with Worker() as worker, pytest.raises(WorkerError, match=message):
        worker.submit([SMALL])


def test_the_error_output_of_a_worker_is_passed_on(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    with Worker() as worker, pytest.raises(WorkerError, match="xla_no_such_flag"):
        worker.submit([SMALL])


def test_a_worker_that_does_not_answer_at_the_start_is_an_error():
    with Worker(start_timeout=0.05) as worker, pytest.raises(WorkerError, match=r"after 0\.05 sec"):
        worker.submit([SMALL])


def test_the_worker_does_not_preallocate_gpu_memory(worker):
    one(worker, SMALL)
    file = Path(f"/proc/{worker.pid}/environ")
    if not file.exists():
        pytest.skip("needs /proc")
    assert b"XLA_PYTHON_CLIENT_PREALLOCATE=false" in file.read_bytes().split(b"\0")
