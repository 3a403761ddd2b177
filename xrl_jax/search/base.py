"""What a search is: `Strategy(problem, budget, key) -> SearchResult`.

A problem is a program with a rule table and a cost oracle. Its graphs (main and bodies) are
rewritten one by one, since a rewrite of one leaves the others as they are; the cost of the program
is the sum of theirs, each times its count. Searches are composed of stages (`search.chain`), which
have the same type: each begins with what the one before has found.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from xrl_jax.cost.model import Oracle, price
from xrl_jax.cost.programs import Options
from xrl_jax.cost.roofline import CostTable
from xrl_jax.graph import ops
from xrl_jax.graph.graph import TensorGraph
from xrl_jax.language.table import CompiledRules
from xrl_jax.measure.timing import Timing
from xrl_jax.program.program import Program


@dataclass(frozen=True)
class Budget:
    """What a search may spend.

    Attributes:
      seconds: of wall time, compiling and measuring included. The check of the result and its
        final timing begin when they have passed at the latest, and take as long as they take.
      measurements: how many regions and programs may be timed, the best programs included, of
        which one is timed in any case; None for no bound.
    """

    seconds: float = 60.0
    measurements: int | None = None

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"Budget.seconds must be positive, got {self.seconds}")
        if self.measurements is not None and self.measurements < 0:
            raise ValueError(f"Budget.measurements must not be negative, got {self.measurements}")


class StopReason(enum.Enum):
    """Why a search ended."""

    EXHAUSTED = "nothing left to try"
    STALLED = "nothing better for a while"
    SECONDS = "out of time"
    MEASUREMENTS = "out of measurements"
    INTERRUPTED = "interrupted"
    COLD = "not begun: its engine takes some 45 s to compile, once on this machine: give more time"


@dataclass(frozen=True)
class Step:
    """One rewrite on the way to a result."""

    graph: int  # index into Program.graphs
    rule: str
    place: str  # the rewritten node, in text
    gain: float  # predicted seconds saved by one run of the graph; negative for a temporary loss


@dataclass(frozen=True)
class Progress:
    """What a progress display shows; seconds are predicted, of the whole program."""

    phase: str
    start_seconds: float
    best_seconds: float
    candidates: int
    measurements: int
    left_seconds: float


class Listener(Protocol):
    """Called now and then with the state of a search."""

    def __call__(self, progress: Progress, /) -> None: ...


def ignore(_: Progress | str) -> None:
    """A listener that shows nothing."""


@dataclass(frozen=True)
class Found:
    """A rewritten program.

    Attributes:
      seconds: predicted.
      steps: that led to it.
      options: of XLA, that it was timed under.
      timing: of the whole program in turn with the original; None where it was not timed.
    """

    program: Program
    seconds: float
    steps: tuple[Step, ...] = ()
    options: Options = ()
    timing: Timing | None = None

    @property
    def relative(self) -> float:
        """What share of the original's time it takes, timed in turn with it; seconds where that is
        missing, infinite where it was not timed or failed.
        """
        t = self.timing
        if t is None or not (t.ok or t.relative is not None):
            return math.inf
        return t.seconds if t.relative is None else t.relative


@dataclass(frozen=True)
class SearchResult:
    """The best programs found and why the search stopped.

    Attributes:
      best: never empty. Where programs were timed, those that were, the fastest first. Else the
        most promising first and the original last; only what began from another starting point may
        be predicted to be slower than the original.
      start_seconds: predicted for the original.
      candidates: how many candidates were looked at.
      stop: why it ended.
      history: (seconds since the start, best predicted seconds) whenever the best improved.
      note: what else is to be known of the search, in a sentence; "" for nothing.
    """

    best: tuple[Found, ...]
    start_seconds: float
    candidates: int
    stop: StopReason
    history: tuple[tuple[float, float], ...] = ()
    note: str = ""

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C has ended it: what follows is to be brief."""
        return self.stop is StopReason.INTERRUPTED


@dataclass(frozen=True)
class Problem:
    """What a search works on.

    Attributes:
      program: the original.
      rules: compiled rules it may use.
      oracle: costs; it measures what it does not know.
      listener: told of progress.
      phase: told what is being done, in a few words.
      recalled: what an earlier search of the same program has ended with.
      found: what the stages before this one have found; None at the beginning.
    """

    program: Program
    rules: CompiledRules
    oracle: Oracle
    listener: Listener = ignore
    phase: Callable[[str], Any] = ignore
    recalled: Found | None = None
    found: SearchResult | None = None

    @property
    def so_far(self) -> SearchResult:
        """What was found before; the original alone at the beginning."""
        if self.found is not None:
            return self.found
        seconds = predicted(self.program, self.oracle.costs)
        return SearchResult((Found(self.program, seconds),), seconds, 0, StopReason.EXHAUSTED)


Strategy = Callable[[Problem, Budget, jax.Array], SearchResult]


def predicted(program: Program, costs: CostTable) -> float:
    """Seconds of one run of the program, as the table has it: to the last bit the same however its
    nodes are numbered, which depends on the way that led to it.
    """
    nodes = [price(costs, g)[0].nodes for g in program.graphs]
    seconds = [math.fsum(np.asarray(f.cost)[np.asarray(f.op) != ops.HOLE]) for f in nodes]
    return math.fsum(c * s for c, s in zip(program.counts, seconds, strict=True))


def unpriced(program: Program) -> SearchResult:
    """The original alone, before anything is known of what it takes."""
    return SearchResult((Found(program, math.inf),), math.inf, 0, StopReason.EXHAUSTED)


def assemble(program: Program, graphs: Mapping[int, TensorGraph]) -> Program:
    """The program with some graphs replaced by index."""
    return program.with_graphs([graphs.get(i, g) for i, g in enumerate(program.graphs)])


def options_text(options: tuple[tuple[str, str], ...]) -> str:
    """Compile options as they are shown and keyed."""
    return " ".join(f"{k}={v or '(none)'}" for k, v in options) or "(default)"
