"""Memory that is no longer needed, given back."""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Free what only cycles of references hold, and return freed memory to the system.

    glibc keeps what is freed for the next request. After the weights of a network were converted,
    or compiled in, that is gigabytes, which another process, or the next step, may need.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
        if trim is not None:
            trim(0)
