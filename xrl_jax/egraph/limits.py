"""Where a saturation stops, and what its iterations did: the same for terms and tensors."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from xrl_jax.measure.stopwatch import Stopwatch


class Stop(enum.Enum):
    """Why a saturation ended."""

    PROVEN = "the goals are proven"
    SATURATED = "no rule adds anything"
    ITERATIONS = "limit on iterations"
    NODES = "limit on e-nodes"
    SECONDS = "limit on seconds"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Limits:
    """Where a saturation stops; after the iteration that reached a limit."""

    iterations: int = 30
    nodes: int = 10_000
    seconds: float = 60.0


DEFAULT = Limits()


@dataclass(frozen=True)
class Iteration:
    """What an iteration did.

    Attributes:
      nodes, classes: numbers of e-nodes and classes after it.
      matches: number of matches that were applied, by rule.
    """

    nodes: int
    classes: int
    matches: tuple[int, ...]


def reached(limits: Limits, iterations: Sequence[Iteration], clock: Stopwatch) -> Stop | None:
    """Return the limit that these iterations have reached, if any."""
    if iterations[-1].nodes >= limits.nodes:
        return Stop.NODES
    if len(iterations) >= limits.iterations:
        return Stop.ITERATIONS
    return Stop.SECONDS if clock.done else None
