"""Memory, status and output of processes that an experiment starts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from experiments.children import run

ALLOCATE = "import time; held = b'x' * ({0} << 20); time.sleep(1.0)"
OF_TWO = """
import subprocess, sys
held = b"x" * (100 << 20)
subprocess.run([sys.executable, "-c", "import time; held = b'x' * (200 << 20); time.sleep(1.0)"])
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_peak_memory_excludes_the_parent_process() -> None:
    held = bytearray(os.urandom(1)) * (300 << 20)
    assert 50 << 20 < run(python(ALLOCATE.format(50))).peak_bytes < len(held)


def test_peak_memory_includes_child_processes() -> None:
    assert 300 << 20 < run(python(OF_TWO)).peak_bytes < 400 << 20


def test_the_status_is_returned_and_output_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert run(python("print('so far'); raise SystemExit(3)"), log=log).status == 3
    assert log.read_text() == "so far\n"


def test_ctrl_c_waits_for_the_process_to_end() -> None:
    threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ended = run(python("import time; time.sleep(1.5)"))
    finally:
        signal.signal(signal.SIGINT, previous)
    assert (ended.status, ended.interrupted) == (0, True)
