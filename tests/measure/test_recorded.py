"""Timings come from a record; what it lacks is asked elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xrl_jax.measure.base import Job
from xrl_jax.measure.recorded import Recorded
from xrl_jax.measure.target import Target
from xrl_jax.measure.timing import Timing

TARGET = Target("NVIDIA H200", "", 0, "jax 1", "")


def timing(seconds: float) -> Timing:
    return Timing(seconds, seconds, seconds, repeats=1)


class Asked:
    """A measurer that takes one second for everything and remembers what it was asked."""

    target, overhead_seconds = TARGET, 0.0

    def __init__(self) -> None:
        self.keys: list[str] = []

    def submit(self, jobs: Sequence[Job], **_: Any) -> list[Timing]:
        self.keys += [job.key for job in jobs]
        return [timing(1.0) for _ in jobs]

    def close(self) -> None:
        pass


def test_recorded_jobs_are_not_timed_again() -> None:
    other = Asked()
    measurer = Recorded({"a": timing(2.0)}, other)
    assert [t.seconds for t in measurer.submit([Job("a", b""), Job("b", b"")])] == [2.0, 1.0]
    assert other.keys == ["b"]


def test_a_job_is_compared_with_its_reference() -> None:
    measurer = Recorded({"a": timing(2.0)}, Asked())
    (found,) = measurer.submit([Job("a", b"")], reference=Job("b", b""))
    assert (found.relative, found.reference) == (2.0, "b")


def test_another_record_is_another_target() -> None:
    one, two = (Recorded({"a": timing(s)}, Asked()).target for s in (1.0, 2.0))
    assert one != two and one.platform == "gpu" and one.device == TARGET.device
