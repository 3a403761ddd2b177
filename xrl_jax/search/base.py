"""What a search is: `Strategy(problem, budget, key) -> SearchResult`.

A problem is a program with a rule table and a cost oracle. Its graphs (main and bodies) are
rewritten one by one, since a rewrite of one leaves the others as they are; the cost of the program
is the sum of theirs, each times its count.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import jax
import numpy as np

from xrl_jax.cost.model import Oracle, price
from xrl_jax.cost.roofline import CostTable
from xrl_jax.graph import ops
from xrl_jax.graph.graph import TensorGraph
from xrl_jax.language.table import CompiledRules
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.program.program import Program

if TYPE_CHECKING:
    from xrl_jax.search.states import State


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

    def __call__(self, progress: Progress) -> None: ...


def ignore(progress: Progress) -> None:
    """A listener that shows nothing."""


@dataclass(frozen=True)
class Found:
    """A rewritten program with its predicted seconds and the steps that led to it."""

    program: Program
    seconds: float
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Problem:
    """What a search works on.

    Attributes:
      program: the original.
      rules: compiled rules it may use.
      oracle: costs; it measures what it does not know.
      listener: told of progress.
      known: what is known to be worth timing before any search: what an earlier one of the same
        program has ended with.
    """

    program: Program
    rules: CompiledRules
    oracle: Oracle
    listener: Listener = ignore
    known: Found | None = None


@dataclass(frozen=True)
class SearchResult:
    """The best programs found and why the search stopped.

    Attributes:
      best: never empty; what was known before the search comes first, then the best
        prediction, then what else is worth timing, in this order; the original is the last, and
        only what began from an opening may be predicted to be slower.
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


Strategy = Callable[[Problem, Budget, jax.Array], SearchResult]
_S = TypeVar("_S", bound=Strategy)


def without_engine(strategy: _S) -> _S:
    """Mark a strategy that does not call the engine of `search.states`: it is compiled for others
    before their time begins.
    """
    strategy.engine = False  # type: ignore[attr-defined]
    return strategy


def calls_engine(strategy: Strategy) -> bool:
    """Whether the engine is to be compiled for a strategy."""
    return getattr(strategy, "engine", True)


@dataclass(frozen=True)
class Alone:
    """A strategy that is judged by what it finds alone: nothing that is known without it is timed
    beside that, the fastest is not refined (`search.refine`), and most of the time is its own.
    """

    strategy: Strategy

    @property
    def __name__(self) -> str:  # as reports call it
        return getattr(self.strategy, "__name__", "custom")

    @property
    def engine(self) -> bool:
        return calls_engine(self.strategy)

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        return self.strategy(problem, budget, key)


Reached = tuple["State", list[Step]]  # a state of one graph and the steps to it


@dataclass
class Run:
    """Bookkeeping shared by the strategies: clock, best so far, reason to stop.

    Predictions change as timings come in, for the original as well; so `best_seconds` is what share
    of the original's the best one is predicted to take, times `start_seconds`.

    Attributes:
      parts: predicted seconds of each graph in one run of the program, as well as it can be done so
        far.
      counts: how often each graph runs.
      reached: the best states of each graph so far, best first, which survive an interruption.
      original: the cost table, and what it predicts for the original.
      note: see `SearchResult`.
    """

    problem: Problem
    budget: Budget
    clock: Stopwatch = field(init=False)
    candidates: int = 0
    stop: StopReason = StopReason.EXHAUSTED
    start_seconds: float = 0.0
    best_seconds: float = float("inf")
    history: list[tuple[float, float]] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)
    counts: tuple[float, ...] = ()
    reached: dict[int, list[Reached]] = field(default_factory=dict)
    original: tuple[CostTable, float] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        self.clock = Stopwatch(self.budget.seconds)

    def out_of_budget(self, clock: Stopwatch | None = None) -> bool:
        """Whether the search (or the part of it that has `clock`) must end; says why in `stop`."""
        spent = self.problem.oracle.spending.measurements
        if self.clock.done or (clock is not None and clock.done):
            self.stop = StopReason.SECONDS
        elif self.budget.measurements is not None and spent >= self.budget.measurements:
            self.stop = StopReason.MEASUREMENTS
        else:
            return False
        return True

    def stalled(self) -> None:
        """Note that a part of the search was given up; what ran out of its budget stays noted."""
        if self.stop is StopReason.EXHAUSTED:
            self.stop = StopReason.STALLED

    def start(self, counts: Sequence[float], seconds: Sequence[float]) -> None:
        """Note how often each graph of the original runs and what one run of it takes."""
        self.go_on(counts, seconds)
        self.start_seconds = sum(self.parts)

    def go_on(self, counts: Sequence[float], seconds: Sequence[float]) -> None:
        """The search goes on from another program: note how often its graphs run and their time."""
        self.counts = tuple(counts)
        self.parts = [c * s for c, s in zip(counts, seconds, strict=True)]
        self.reached = {}

    def keep(self, index: int, reached: Sequence[Reached]) -> None:
        """Note the best states of a graph so far, best first."""
        self.reached[index] = list(reached)
        self.parts[index] = self.counts[index] * reached[0][0].seconds

    def report(self, phase: str) -> None:
        """Tell the listener, and note an improvement."""
        costs = self.problem.oracle.table()
        if self.original is None or self.original[0] is not costs:
            self.original = costs, predicted(self.problem.program, costs)
        seconds = self.start_seconds * sum(self.parts) / max(self.original[1], 1e-12)
        if seconds < self.best_seconds:
            self.best_seconds = seconds
            self.history.append((self.clock.elapsed, seconds))
        self.problem.listener(
            Progress(
                phase,
                self.start_seconds,
                self.best_seconds,
                self.candidates,
                self.problem.oracle.spending.measurements,
                max(self.clock.left, 0.0),
            )
        )


def predicted(program: Program, costs: CostTable) -> float:
    """Seconds of one run of the program, as the table has it: to the last bit the same however its
    nodes are numbered, which depends on the way that led to it.
    """
    nodes = [price(costs, g)[0].nodes for g in program.graphs]
    seconds = [math.fsum(np.asarray(f.cost)[np.asarray(f.op) != ops.HOLE]) for f in nodes]
    return math.fsum(c * s for c, s in zip(program.counts, seconds, strict=True))


def assemble(program: Program, graphs: Mapping[int, TensorGraph]) -> Program:
    """The program with some graphs replaced by index."""
    return program.with_graphs([graphs.get(i, g) for i, g in enumerate(program.graphs)])


def options_text(options: tuple[tuple[str, str], ...]) -> str:
    """Compile options as they are shown and keyed."""
    return " ".join(f"{k}={v or '(none)'}" for k, v in options) or "(default)"
