"""Processes that experiments start: how they ended, and how much memory they used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

_EVERY = 0.1  # seconds between two samples of the memory


class ProcessResult(NamedTuple):
    """How a process ended.

    Attributes:
      status: exit status; negative if a signal ended the process.
      peak_bytes: the largest resident memory of the process and its descendants together, sampled
        ten times a second; memory that they share counts for each of them.
      interrupted: whether Ctrl-C came while it ran. It received Ctrl-C, too, and was waited for.
    """

    status: int
    peak_bytes: int
    interrupted: bool


def run(
    command: Sequence[str], *, log: Path | None = None, env: Mapping[str, str] | None = None
) -> ProcessResult:
    """Run a command to its end.

    Args:
      log: file for its output; None to print where this process prints.
    """
    with ExitStack() as stack:
        to: dict[str, Any] = {}
        if log is not None:
            file = stack.enter_context(log.open("w", encoding="utf-8"))
            to = {"stdout": file, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(command, env=env, **to)
        peak, interrupted = 0, False
        while True:
            try:
                peak = max(peak, _bytes_of(child.pid))
                return ProcessResult(child.wait(_EVERY), peak, interrupted)
            except subprocess.TimeoutExpired:
                continue
            except KeyboardInterrupt:
                interrupted = True


def _bytes_of(pid: int) -> int:
    """Return the resident memory of a process and its descendants; 0 once it has ended."""
    total = 0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_info().rss
    return total


def search_command(
    network: str,
    search: str,
    *,
    seconds: float,
    measurements: int | None = None,
    seed: int,
    cache: Path,
    out: Path,
) -> list[str]:
    """Return the command that runs one search by `experiments.optimize`.

    Args:
      measurements: most timings that it may make; None for no bound.
    """
    bound = [] if measurements is None else [f"--budget_measurements={measurements}"]
    return [
        *(sys.executable, "-m", "experiments.optimize", f"--model={network}"),
        *(f"--search={search}", f"--budget_seconds={seconds:g}", *bound),
        *(f"--seed={seed}", f"--cache_dir={cache}", f"--out={out}"),
    ]
