"""The peak memory that a process reports."""

from __future__ import annotations

import os
import subprocess
import sys

PEAK = """
from experiments.memory import peak_bytes
held = bytearray(b"x") * (300 << 20)
del held
print(peak_bytes() >> 20)
"""


def test_the_peak_is_kept_and_excludes_the_parent_process() -> None:
    """The process allocates 300 MiB besides its imports; its parent holds 1,024 MiB."""
    held = bytearray(os.urandom(1)) * (1 << 30)
    done = subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True)
    assert 300 < int(done.stdout) < 900 < len(held) >> 20
