"""Peak memory of a training or of a row of `rl_benchmark`, read in its own process."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import jax

_STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """Return the peak memory of JAX's default device; for a CPU, that of this process."""
    of_device = jax.devices()[0].memory_stats()
    if of_device:
        return of_device["peak_bytes_in_use"]
    # On Linux `ru_maxrss` includes the memory of the process that started this one.
    found = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text()) if _STATUS.is_file() else None
    if found:
        return int(found[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
