"""`runtime.memory`: freed memory is given back to the system."""

from __future__ import annotations

import sys
import weakref

import psutil
import pytest

from xrl_jax.runtime.memory import release_memory


class Held:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.me = self


def test_objects_held_only_by_a_reference_cycle_are_freed() -> None:
    gone = weakref.ref(Held())
    release_memory()
    assert gone() is None


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc alone")
def test_freed_memory_inside_the_heap_is_returned_to_the_system() -> None:
    blocks = [bytearray(b"x" * 50_000) for _ in range(4000)]  # 200 MB, each too small for mmap
    end = bytearray(b"x" * 50_000)
    process = psutil.Process()
    before = process.memory_info().rss
    del blocks
    release_memory()
    assert before - process.memory_info().rss > 150e6
    assert len(end) == 50_000
