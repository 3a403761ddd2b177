"""A live display of a search: phase, best so far, candidates, measurements, time left.

On a terminal two lines are redrawn; elsewhere a plain line is printed from time to time. Drawing
happens only when the search calls, never in a thread, which would disturb timings.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, TextIO

from xrl_jax.report.units import count_text, seconds_text
from xrl_jax.search.base import Progress

_LINE_SECONDS = 10.0  # between plain lines
_DRAW_SECONDS = 0.2  # between two updates on a terminal


class LiveProgress:
    """A context manager that serves as the listener of a search.

    Args:
      name: name of the function or network, shown at the start of lines.
      seconds: the budget, for the progress bar.
      progress: whether to show anything.
      file: the stream to write to; standard error by default, so that standard output has results
        only.
      clock: returns seconds since any fixed time, monotonically.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        *,
        progress: bool = True,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._seconds = seconds
        self._shown = progress
        self._file = file
        self._clock = clock
        self._start = clock()
        self._last: float | None = None
        self._progress = Progress("", math.inf, math.inf, 0, 0, seconds)
        self._live: Any = None

    def __enter__(self) -> LiveProgress:
        self._start = self._clock()
        self._last = None
        if self._shown:
            self._guarded(self._open)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        live, self._live = self._live, None
        if live is not None:
            self._guarded(live.stop)

    def __call__(self, progress: Progress) -> None:
        """Show the progress, unless the display was updated a moment ago."""
        self._progress = progress
        if not self._shown:
            return
        now = self._clock()
        pause = _LINE_SECONDS if self._live is None else _DRAW_SECONDS
        if self._last is not None and now - self._last < pause:
            return
        self._last = now
        if self._live is None:
            self._guarded(lambda: self._print(progress, now))
        else:
            self._guarded(lambda: self._live.update(self._drawn(progress), refresh=True))

    def phase(self, phase: str) -> None:
        """Show a new phase, with the other values as shown last."""
        left = max(self._seconds - (self._clock() - self._start), 0.0)
        self(replace(self._progress, phase=phase, left_seconds=left))

    def say(self, text: str) -> None:
        """Print a line that stays."""
        line = f"{self._name}: {text}"
        if not self._shown:
            return
        if self._live is None:
            self._guarded(lambda: print(line, file=self._file or sys.stderr, flush=True))
        else:
            self._guarded(lambda: self._live.console.print(line, markup=False, highlight=False))

    def _guarded(self, action: Callable[[], Any]) -> None:
        """Run the action; if it fails (closed pipe, odd encoding), show nothing from then on."""
        try:
            action()
        except Exception:  # whatever the terminal raises, the search must go on
            self._shown = False
            self._live = None

    def _open(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._file or sys.stderr)
        if console.is_terminal and not console.is_dumb_terminal:
            live = Live(console=console, auto_refresh=False, transient=True)
            live.start()
            self._live = live

    def _print(self, progress: Progress, now: float) -> None:
        left = f"{progress.left_seconds:.0f} s left"
        line = f"[{now - self._start:4.0f} s] {self._name}: {'; '.join(_facts(progress))}; {left}"
        print(line, file=self._file or sys.stderr, flush=True)

    def _drawn(self, progress: Progress) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        phase, *numbers = _facts(progress)
        total = max(self._seconds, 1e-9)
        used = min(max(total - progress.left_seconds, 0.0), total)
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"{self._name}: {phase}", style="bold"),
            ProgressBar(total=total, completed=used, width=20),
            Text(f"{progress.left_seconds:.0f} s left"),
        )
        return Group(head, Text("  " + "; ".join(numbers), no_wrap=True, overflow="ellipsis"))


def _facts(progress: Progress) -> tuple[str, ...]:
    """Return phase, best so far, candidates and measurements as text."""
    best = f"best {seconds_text(progress.best_seconds)} predicted"
    if 0 < progress.best_seconds < float("inf"):
        best += f" ({progress.start_seconds / progress.best_seconds:.2f} x)"
    return (
        progress.phase,
        best,
        f"{count_text(progress.candidates)} candidates",
        f"{count_text(progress.measurements)} measured",
    )
