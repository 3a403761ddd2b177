"""The interface of a search: `Strategy(problem, budget, key) -> SearchResult`.

A problem is a program with a rule table and a cost oracle. Its graphs (main and bodies) are
rewritten one by one, since a rewrite of one leaves the others unchanged; the cost of the program is
the sum of their costs, each multiplied by the number of times the graph runs. Searches are composed
of stages of this same type (`search.chain`), each of which starts from the results of those before.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Limits on what a search may spend.

    Attributes:
      seconds: wall time, compiling and measuring included. The check of the result and its final
        timing begin when it has passed at the latest, and their own length is not limited by it.
      measurements: number of regions and programs that may be timed, the best programs included;
        one program is timed in any case. None for no limit.
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
    COLD = "not started: compiling its engine takes about 45 s, once per machine; give it more time"


@dataclass(frozen=True)
class Step:
    """One rewrite on the way to a result."""

    graph: int  # index into Program.graphs
    rule: str
    place: str  # the rewritten node, as text
    gain: float  # predicted seconds saved by one run of the graph; negative for a temporary loss
    error: float = 0.0  # relative error that it causes in the results on its own


@dataclass(frozen=True)
class Progress:
    """Data for a progress display; `start_seconds` and `best_seconds` are predictions for the whole
    program.
    """

    phase: str
    start_seconds: float
    best_seconds: float
    candidates: int
    measurements: int
    left_seconds: float


class Listener(Protocol):
    """A callback that a search calls from time to time with its progress."""

    def __call__(self, progress: Progress, /) -> None: ...


def ignore(_: Progress | str) -> None:
    """Do nothing: the default listener."""


@dataclass(frozen=True)
class Narrowed:
    """What narrow types cost a program.

    Attributes:
      before: the program without them.
      error: the relative error that they cause in the results, measured on calibration inputs.
    """

    before: Program
    error: float


@dataclass(frozen=True)
class Found:
    """A rewritten program.

    Attributes:
      seconds: predicted seconds of one run.
      steps: the rewrites that led to it.
      options: XLA compile options under which it was timed.
      timing: of the whole program, interleaved with the original; None where it was not timed.
      narrowed: set where it has narrow types that the original does not have.
    """

    program: Program
    seconds: float
    steps: tuple[Step, ...] = ()
    options: Options = ()
    timing: Timing | None = None
    narrowed: Narrowed | None = None

    @property
    def relative(self) -> float:
        """The program's time as a share of the original's, both timed interleaved; its seconds
        where that share is missing; infinite where it was not timed or failed.
        """
        t = self.timing
        if t is None or not (t.ok or t.relative is not None):
            return math.inf
        return t.seconds if t.relative is None else t.relative


@dataclass(frozen=True)
class FrontierPoint:
    """A program that no other timed one beats in both time and error.

    Attributes:
      relative: its time as a share of the original's, both timed interleaved.
      error: the relative error that its narrow types cause in the results.
      types: how many weights it has in each narrow type, as text; "" for none.
    """

    relative: float
    error: float
    types: str = ""


def frontier(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Return the points that no other point beats, the least error first.

    >>> points = [FrontierPoint(0.5, 1e-2), FrontierPoint(0.9, 0.0), FrontierPoint(0.6, 2e-2)]
    >>> [p.error for p in frontier(points)]
    [0.0, 0.01]
    """
    best: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.error, p.relative)):
        if not best or point.relative < best[-1].relative:
            best.append(point)
    return tuple(best)


@dataclass(frozen=True)
class SearchResult:
    """The best programs found and why the search stopped.

    Attributes:
      best: never empty. If programs were timed, only those, the fastest first. Otherwise the most
        promising first and the original last; only programs from another starting point may be
        predicted to be slower than the original.
      start_seconds: predicted for the original.
      candidates: number of candidates examined.
      stop: why the search ended.
      history: (seconds since the start, best predicted seconds) whenever the best improved.
      note: a sentence on anything else worth knowing about the search; "" for nothing.
      frontier: where a tolerance was given, what time each budget of error bought.
    """

    best: tuple[Found, ...]
    start_seconds: float
    candidates: int
    stop: StopReason
    history: tuple[tuple[float, float], ...] = ()
    note: str = ""
    frontier: tuple[FrontierPoint, ...] = ()

    def with_note(self, more: str) -> SearchResult:
        """Return the result with one more sentence in its note."""
        return replace(self, note=f"{self.note}; {more}" if self.note else more)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the search; later stages must then be brief."""
        return self.stop is StopReason.INTERRUPTED


@dataclass(frozen=True)
class Problem:
    """The input of a search.

    Attributes:
      program: the original.
      rules: compiled rules that the search may use.
      oracle: gives costs, and measures those it does not know yet.
      listener: called with the progress of the search.
      phase: called with a few words on the present activity.
      recalled: the result of an earlier search of the same program; None for none.
      found: the results of the stages before this one; None at the beginning.
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
        """The results of the stages before this one; at the beginning, the original only."""
        if self.found is not None:
            return self.found
        seconds = predicted(self.program, self.oracle.costs)
        return SearchResult((Found(self.program, seconds),), seconds, 0, StopReason.EXHAUSTED)


Strategy = Callable[[Problem, Budget, jax.Array], SearchResult]


def predicted(program: Program, costs: CostTable) -> float:
    """Return the seconds of one run of the program that the cost table predicts.

    The result is the same to the last bit however the nodes are numbered, which depends on the
    rewrites that led to the program.
    """
    nodes = [price(costs, g)[0].nodes for g in program.graphs]
    seconds = [math.fsum(np.asarray(f.cost)[np.asarray(f.op) != ops.HOLE]) for f in nodes]
    return math.fsum(c * s for c, s in zip(program.counts, seconds, strict=True))


def unpriced(program: Program) -> SearchResult:
    """Return a result with only the original, before anything is known of its cost."""
    return SearchResult((Found(program, math.inf),), math.inf, 0, StopReason.EXHAUSTED)


def assemble(program: Program, graphs: Mapping[int, TensorGraph]) -> Program:
    """Return the program with some graphs replaced, by index into `Program.graphs`."""
    return program.with_graphs([graphs.get(i, g) for i, g in enumerate(program.graphs)])


def options_text(options: tuple[tuple[str, str], ...]) -> str:
    """Return compile options as text, for display and for keys."""
    return " ".join(f"{k}={v or '(none)'}" for k, v in options) or "(default)"
