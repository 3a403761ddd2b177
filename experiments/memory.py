"""The memory that a training or a row of `rl_benchmark` took, told by its own process."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import jax

_STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """The most memory that JAX's default device has held; of a CPU, the most of this process."""
    of_device = jax.devices()[0].memory_stats()
    if of_device:
        return of_device["peak_bytes_in_use"]
    # Linux counts what the process that started this one held in its `ru_maxrss`.
    told = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text()) if _STATUS.is_file() else None
    if told:
        return int(told[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
