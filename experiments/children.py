"""Processes that experiments start: how they ended, and the memory they took."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

_EVERY = 0.1  # seconds between two looks at the memory


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
      status: exit status; that of a signal is negative.
      peak_bytes: the most memory that the process and those it started held at a time, looked at
        ten times a second; what they share counts for each.
      interrupted: Ctrl-C came while it ran. It had it, too, and was waited for.
    """

    status: int
    peak_bytes: int
    interrupted: bool


def run(
    command: Sequence[str], *, log: Path | None = None, env: Mapping[str, str] | None = None
) -> Ended:
    """Run a command to its end.

    Args:
      log: file for what it prints; None: where this process prints.
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
                return Ended(child.wait(_EVERY), peak, interrupted)
            except subprocess.TimeoutExpired:
                continue
            except KeyboardInterrupt:
                interrupted = True


def _bytes_of(pid: int) -> int:
    """Resident memory of a process and of those it started; 0 once it has ended."""
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
    """The command of one search by `experiments.optimize`.

    Args:
      measurements: bound for its timings; None for none.
    """
    bound = [] if measurements is None else [f"--budget_measurements={measurements}"]
    return [
        *(sys.executable, "-m", "experiments.optimize", f"--model={network}"),
        *(f"--search={search}", f"--budget_seconds={seconds:g}", *bound),
        *(f"--seed={seed}", f"--cache_dir={cache}", f"--out={out}"),
    ]
