"""State of a running search (clock, best so far, reason to stop) and of one graph's turn in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from xrl_jax.cost.roofline import CostTable
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.search.base import (
    Budget,
    Found,
    Problem,
    Progress,
    SearchResult,
    Step,
    StopReason,
    predicted,
)
from xrl_jax.search.states import Space, State

Reached = tuple[State, list[Step]]  # a state of one graph and the steps to it


@dataclass
class Run:
    """Bookkeeping shared by searches: clock, best so far, reason to stop.

    Predictions change as timings come in, for the original as well; so `best_seconds` is the
    predicted time of the best program relative to the original, multiplied by `start_seconds`.

    Attributes:
      parts: predicted seconds of each graph in one run of the program, in its best state so far.
      counts: how often each graph runs in one run of the program.
      reached: the best states of each graph so far, best first; they survive an interruption.
      original: the cost table, and its prediction for the original.
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
        """Return whether the search, or the part that has `clock`, must end; set `stop` if so."""
        spent = self.problem.oracle.spending.measurements
        if self.clock.done or (clock is not None and clock.done):
            self.stop = StopReason.SECONDS
        elif self.budget.measurements is not None and spent >= self.budget.measurements:
            self.stop = StopReason.MEASUREMENTS
        else:
            return False
        return True

    def stalled(self) -> None:
        """Record that a part of the search was abandoned, unless a budget was exhausted before."""
        if self.stop is StopReason.EXHAUSTED:
            self.stop = StopReason.STALLED

    def start(self, counts: Sequence[float], seconds: Sequence[float]) -> None:
        """Record how often each graph of the original runs and the seconds of one run of it."""
        self.continue_from(counts, seconds)
        self.start_seconds = sum(self.parts)

    def continue_from(self, counts: Sequence[float], seconds: Sequence[float]) -> None:
        """Go on from another program: record how often its graphs run and their seconds."""
        self.counts = tuple(counts)
        self.parts = [c * s for c, s in zip(counts, seconds, strict=True)]
        self.reached = {}

    def keep(self, index: int, reached: Sequence[Reached]) -> None:
        """Record the best states of a graph so far, best first."""
        self.reached[index] = list(reached)
        self.parts[index] = self.counts[index] * reached[0][0].seconds

    def result(self, best: tuple[Found, ...]) -> SearchResult:
        """Return the search's result; the last program of `best` is the original."""
        original, history = best[-1].seconds, tuple(self.history)
        return SearchResult(best, original, self.candidates, self.stop, history, self.note)

    def report(self, phase: str) -> None:
        """Pass the progress to the listener, and record an improvement in `history`."""
        costs = self.problem.oracle.costs
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


class Turn(NamedTuple):
    """The turn of one graph in a search that goes through the graphs of a program.

    Attributes:
      space: the search space of the graph.
      reached: its states so far, best first.
      index: of the graph in `Program.graphs`.
      clock: the time that the turn has.
    """

    run: Run
    space: Space
    reached: list[Reached]
    index: int
    clock: Stopwatch
    key: jax.Array
