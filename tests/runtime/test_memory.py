"""`runtime.memory`: freed memory is given back to the system."""

from __future__ import annotations

import sys
import weakref

import psutil
import pytest

from xrl_jax.runtime.memory import give_back


class Held:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.me = self


def test_what_only_a_cycle_holds_is_freed() -> None:
    gone = weakref.ref(Held())
    give_back()
    assert gone() is None


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc alone")
def test_freed_memory_in_the_middle_of_the_heap_leaves_the_process() -> None:
    blocks = [bytearray(b"x" * 50_000) for _ in range(4000)]  # 200 MB, each too small for mmap
    end = bytearray(b"x" * 50_000)
    process = psutil.Process()
    before = process.memory_info().rss
    del blocks
    give_back()
    assert before - process.memory_info().rss > 150e6
    assert len(end) == 50_000
