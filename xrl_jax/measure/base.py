"""Jobs to be timed, and the interface of what times them: `Job` and `Measurer`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

import jax
from jax.interpreters import mlir

from xrl_jax.libraries.base import CustomCall
from xrl_jax.measure.target import Target
from xrl_jax.measure.timing import Timing

SECONDS_PER_JOB = 0.15


class Measurer(Protocol):
    """Times jobs on a target: a worker process here, a device elsewhere, or a record of one."""

    @property
    def target(self) -> Target:
        """The target that the timings are of."""
        ...

    @property
    def overhead_seconds(self) -> float:
        """Seconds per call of a function that computes next to nothing."""
        ...

    def submit(
        self,
        jobs: Sequence[Job],
        *,
        reference: Job | None = None,
        seconds_per_job: float = SECONDS_PER_JOB,
        timeout: float = 60.0,
    ) -> list[Timing]:
        """Return one timing per job, in order; if a job cannot be timed, the timing's status says
        so.

        Args:
          reference: each job is timed in turn with it; `Timing.relative` says how many times longer
            the job takes.
          timeout: seconds that a job may take, compiling and warm-up included.
        """
        ...

    def close(self) -> None:
        """Release what the measurer holds; it starts again if it is used again."""
        ...


EVERYTHING = -1  # see `Job.any_layout`


@dataclasses.dataclass(frozen=True)
class Job:
    """A function to time. `artifact` is `jax.export.export(f)(*avals).serialize()` with static
    shapes on one device.
    """

    key: str  # the timing key; returned as Timing.reference by jobs timed against this one
    artifact: bytes
    options: tuple[tuple[str, str], ...] = ()  # of XLA; "true" and "false" are booleans
    launches: int = 0  # calls in a row that make one sample; 0: as many as fill 0.2 ms
    constants: int = 0  # this many leading flat arguments are constants of the compiled code
    custom_calls: tuple[CustomCall, ...] = ()  # library calls that the artifact makes by name
    # This many leading flat arguments are laid out as XLA's kernels want them; EVERYTHING for all
    # arguments and the results. Constants are laid out so in any case.
    any_layout: int = 0
    # Two numbers of copies in one program, or (): the timing is the difference of the two programs'
    # times, for one copy. So it is that of the kernels, without their launch. Each copy has
    # arguments of its own, so that large ones come from memory.
    slope: tuple[int, ...] = ()

    @functools.cached_property
    def identity(self) -> str:
        """Hash of everything that decides the result, except the key."""
        digest = hashlib.sha256(
            json.dumps(
                [
                    *(sorted(self.options), self.launches, self.constants),
                    *(self.any_layout, self.slope),
                ]
            ).encode()
        )
        digest.update(_code_of(self.artifact))
        return digest.hexdigest()


def any_of(any_layout: int, arguments: int) -> list[bool]:
    """Return which of this many arguments XLA lays out, given `Job.any_layout`."""
    return [any_layout == EVERYTHING or n < any_layout for n in range(arguments)]


def _code_of(artifact: bytes) -> bytes:
    """Return the code of an artifact without its source locations, which depend on the caller that
    exported the program.
    """
    try:
        exported = jax.export.deserialize(bytearray(artifact))
        with mlir.make_ir_context():
            module = exported.mlir_module(serialized=False)
            return mlir.module_to_string(module, enable_debug_info=False).encode()
    except Exception:  # of many types; the worker reports it as the job's failure
        return artifact
