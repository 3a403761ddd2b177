"""Returning unused memory to the system."""

from __future__ import annotations

import ctypes
import gc
import sys


def release_memory() -> None:
    """Free objects that are only held by reference cycles, and return freed memory to the system.

    glibc keeps freed memory for later requests. After the weights of a network were converted, or
    compiled in, that amounts to gigabytes, which another process, or the next step, may need.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # exists in glibc only
        if trim is not None:
            trim(0)
