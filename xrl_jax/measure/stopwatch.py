"""A budget of wall time."""

from __future__ import annotations

import dataclasses
import time

from xrl_jax.runtime.ctrl_c import raise_lost_ctrl_c


@dataclasses.dataclass
class Stopwatch:
    """A budget of seconds that starts at once; the only clock a search sees."""

    seconds: float
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        return self.seconds - self.elapsed

    @property
    def done(self) -> bool:
        """Whether the budget is used up. Raises a Ctrl-C that was lost, because callers would stop
        here.
        """
        raise_lost_ctrl_c()
        return self.left <= 0

    def part(self, share: float) -> Stopwatch:
        """Return a stopwatch that starts now and ends after `share` of the seconds left."""
        return Stopwatch(max(self.left, 0.0) * share)
