"""What a process tells of its memory."""

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


def test_the_peak_is_told_after_it_and_is_that_of_the_process_alone() -> None:
    """300 MiB and what importing takes; the process that starts it holds 1,024."""
    held = bytearray(os.urandom(1)) * (1 << 30)
    done = subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True)
    assert 300 < int(done.stdout) < 900 < len(held) >> 20
