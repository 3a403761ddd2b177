"""A search in its course: clock, best so far, reason to stop; and one graph's turn in it."""

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

    def result(self, best: tuple[Found, ...]) -> SearchResult:
        """What the search ends with; the last of the best is the original."""
        original, history = best[-1].seconds, tuple(self.history)
        return SearchResult(best, original, self.candidates, self.stop, history, self.note)

    def report(self, phase: str) -> None:
        """Tell the listener, and note an improvement."""
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
    """One graph of a program in a search that goes through them.

    Attributes:
      space: of the graph.
      reached: its states so far, best first.
      index: of the graph in the program.
      clock: the time it has.
    """

    run: Run
    space: Space
    reached: list[Reached]
    index: int
    clock: Stopwatch
    key: jax.Array
