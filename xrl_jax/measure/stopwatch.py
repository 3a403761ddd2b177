"""A budget of wall time."""

from __future__ import annotations

import dataclasses
import time

from xrl_jax.runtime.ctrl_c import raise_lost_ctrl_c


@dataclasses.dataclass
class Stopwatch:
    """What is left of a budget of seconds; the only clock a search sees."""

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
        """Whether nothing is left. Raises a Ctrl-C that was lost: whoever looks here would stop."""
        raise_lost_ctrl_c()
        return self.left <= 0

    def part(self, share: float) -> Stopwatch:
        """A stopwatch that starts now and ends after `share` of what is left."""
        return Stopwatch(max(self.left, 0.0) * share)
