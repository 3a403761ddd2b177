"""A `Measurer` that answers from timings recorded on a device, wherever it is now."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence

from xrl_jax.measure.base import SECONDS_PER_JOB, Job, Measurer
from xrl_jax.measure.target import Target
from xrl_jax.measure.timing import Timing


class Recorded:
    """Returns recorded timings; for jobs that were never timed, what another measurer says.

    The same record and the same jobs give the same timings, bit for bit, if that measurer's are.

    Args:
      timings: what was recorded, by the keys of jobs.
      other: for what is not there, on a target of the same kind.
    """

    def __init__(self, timings: Mapping[str, Timing], other: Measurer) -> None:
        self._timings, self._other = dict(timings), other
        text = json.dumps({k: t.as_dict() for k, t in sorted(timings.items())})
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def target(self) -> Target:
        """The target of `other`, with a hash of the record."""
        target = self._other.target
        return dataclasses.replace(target, versions=f"{target.versions} record {self._digest}")

    @property
    def overhead_seconds(self) -> float:
        return self._other.overhead_seconds

    def submit(
        self,
        jobs: Sequence[Job],
        *,
        reference: Job | None = None,
        seconds_per_job: float = SECONDS_PER_JOB,
        timeout: float = 60.0,
    ) -> list[Timing]:
        """See `Measurer.submit`. With a reference, the ratio is that of both timings."""

        def one(job: Job) -> Timing:
            known = self._timings.get(job.key)
            if known is not None:
                return known
            (timing,) = self._other.submit([job], seconds_per_job=seconds_per_job, timeout=timeout)
            return timing

        if reference is None:
            return [one(job) for job in jobs]
        against = one(reference)
        return [_relative(one(job), against, reference.key) for job in jobs]

    def close(self) -> None:
        self._other.close()


def _relative(timing: Timing, reference: Timing, key: str) -> Timing:
    if not (timing.ok and reference.ok):
        return timing
    relative = timing.seconds / reference.seconds
    return dataclasses.replace(timing, relative=relative, reference=key)
