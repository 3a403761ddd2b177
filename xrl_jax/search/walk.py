"""Traversal of a program's graphs one by one: the frame of searches that rewrite graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.program.program import Program
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.search.base import (
    Budget,
    Found,
    Problem,
    SearchResult,
    StopReason,
    assemble,
    predicted,
)
from xrl_jax.search.descend import measure_graph
from xrl_jax.search.run import Reached, Run, Turn
from xrl_jax.search.starting_points import StartingPoint, starting_points
from xrl_jax.search.states import Space, State, in_one_bucket

# Searches one graph; returns states with the steps to them, best first.
GraphSearch = Callable[[Turn], list[Reached]]


class Phase(NamedTuple):
    """A part of a search, applied to all graphs before the next part begins."""

    search: GraphSearch
    share: float = 1.0  # of the time left when it begins


@dataclass(frozen=True)
class Walk:
    """Search of every graph of a program, costliest first, each with its share of the time left.

    Each phase starts from the states that the one before it reached. The results are combined: the
    i-th best program has the i-th best state of every graph. Ctrl-C ends the search and keeps the
    states recorded by `Run.keep`.

    Attributes:
      measure_share: share of the time, at most, for timing a program's regions before rewriting it.
      start_share: share of the time, at most, for making the starting points.
      least_timed: number of programs of a starting point that are timed whole even where they are
        predicted to be slower than the original: predictions for the programs of one starting point
        err alike, by a tenth and more.
      most_slowdown: a starting point this many times slower than the best is not searched further.
      least_share: least share of the time left for a graph, however cheap it is.
    """

    measure_share: float = 0.15
    start_share: float = 0.8
    least_timed: int = 2
    most_slowdown: float = 1.1
    least_share: float = 0.05

    def __call__(
        self,
        problem: Problem,
        budget: Budget,
        key: jax.Array,
        phases: Sequence[Phase],
        *,
        from_starting_points: bool = False,
    ) -> SearchResult:
        """Run the phases and return their result.

        Args:
          from_starting_points: search from each of `starting_points`, in turn, instead of from the
            program itself.
        """
        run = Run(problem, budget)
        program, oracle = problem.program, problem.oracle
        found: list[tuple[StartingPoint, list[Found]]] = []
        try:
            with plain_ctrl_c():
                states = self._first_states(run, program)
                run.start(program.counts, [s.seconds for _, s in states])
                run.report("measured the original")
                points = [StartingPoint(program)]
                if from_starting_points:
                    clock = run.clock.part(self.start_share)
                    points = starting_points(program, problem.rules, oracle.costs, clock)
                for n, point in enumerate(points):
                    clock = run.clock.part(1.0 / (len(points) - n))
                    earlier = [each[0].program for _, each in found]
                    # Even where no time is left: the starting point itself may be the best.
                    programs = self._search_from(run, point, earlier, clock, key, phases)
                    found.append((point, programs))
                    if run.stop is StopReason.INTERRUPTED:
                        break
        except KeyboardInterrupt:
            run.stop = StopReason.INTERRUPTED
        start = Found(program, predicted(program, oracle.costs))
        kept = [
            [
                f
                for n, f in enumerate(each)
                if f.seconds < start.seconds or (point.steps and n < self.least_timed)
            ]
            for point, each in found
        ]
        return run.result((*_interleaved(kept), start))

    def _first_states(self, run: Run, program: Program) -> list[tuple[Space, State]]:
        """Return the first state of each graph, after timing regions (at most `measure_share`)."""
        oracle, clock = run.problem.oracle, run.clock.part(self.measure_share)
        space = Space(run.problem.rules, jnp.asarray(program.digests()))
        starts = []
        for graph in in_one_bucket(program):
            state = space.start(graph, oracle.costs)
            measure_graph(oracle, state.graph, clock, run.budget.measurements)
            starts.append(state)
        return [(space, space.reprice(s, oracle.costs)) for s in starts]

    def _search_from(
        self,
        run: Run,
        point: StartingPoint,
        earlier: Sequence[Program],
        clock: Stopwatch,
        key: jax.Array,
        phases: Sequence[Phase],
    ) -> list[Found]:
        """Return what the phases find from one starting point, in the order of `_combine`.

        Args:
          earlier: the best programs of earlier starting points.
        """
        program, oracle = point.program, run.problem.oracle
        starts: list[tuple[Space, State]] = []
        found: dict[int, list[Reached]] = {}
        try:
            with plain_ctrl_c():
                starts = self._first_states(run, program)
                run.continue_from(program.counts, [s.seconds for _, s in starts])
                keys = jax.random.split(key, len(phases))
                for phase, phase_key in zip(phases, keys, strict=True):
                    if found and earlier:  # all under the present cost table, which knows more
                        least = min(predicted(program, oracle.costs) for program in earlier)
                        best = _combine(run, point, starts, found)[0]
                        if best.seconds > self.most_slowdown * least:
                            break
                    self._phase(
                        run, phase.search, starts, found, clock.part(phase.share), phase_key
                    )
        except KeyboardInterrupt:
            run.stop = StopReason.INTERRUPTED
            found = {**run.reached, **found}
        return _combine(run, point, starts, found)

    def _phase(
        self,
        run: Run,
        search: GraphSearch,
        starts: Sequence[tuple[Space, State]],
        found: dict[int, list[Reached]],
        clock: Stopwatch,
        key: jax.Array,
    ) -> None:
        """Search on from the states found of each graph, the costliest first; update `found`."""
        oracle = run.problem.oracle
        weights = [c * s.seconds for c, (_, s) in zip(run.counts, starts, strict=True)]
        order = sorted(range(len(starts)), key=lambda i: -weights[i])
        for n, (i, graph_key) in enumerate(
            zip(order, jax.random.split(key, len(order)), strict=True)
        ):
            if run.out_of_budget(clock):
                break
            space, start = starts[i]
            left = max(sum(weights[j] for j in order[n:]), 1e-12)
            share = min(max(weights[i] / left, self.least_share), 1.0)
            reached = found.get(i, [(start, [])])
            reached = [(space.reprice(s, oracle.costs), steps) for s, steps in reached]
            found[i] = search(Turn(run, space, reached, i, clock.part(share), graph_key))
            run.keep(i, [(space.reprice(s, oracle.costs), steps) for s, steps in found[i]])


def _interleaved(found: Sequence[Sequence[Found]]) -> list[Found]:
    """Return the best of each starting point, then the second of each, and so on; in each round the
    best prediction first.

    Predictions for one starting point err alike, so programs of different ones are timed first.
    """
    turns = itertools.zip_longest(*found)
    return [f for turn in turns for f in sorted(filter(None, turn), key=lambda f: f.seconds)]


def _combine(
    run: Run,
    point: StartingPoint,
    starts: Sequence[tuple[Space, State]],
    found: Mapping[int, Sequence[Reached]],
) -> list[Found]:
    """Return the programs that states of the graphs combine to, the best first.

    The i-th best program has the i-th best state of every graph. The starting point itself comes
    second at the latest: a gain is predicted region by region, and may be a loss in the whole.
    """
    program, costs = point.program, run.problem.oracle.costs
    results: list[Found] = []
    seen: set[tuple] = set()
    for rank in range(max((len(f) for f in found.values()), default=0)):
        graphs, seconds, steps, ids = {}, 0.0, list(point.steps), []
        for i, (count, (space, start)) in enumerate(zip(program.counts, starts, strict=True)):
            state = start
            if i in found:
                state, taken = found[i][min(rank, len(found[i]) - 1)]
                graphs[i] = state.graph
                steps += taken
            seconds += count * space.reprice(state, costs).seconds
            ids.append(space.identity(state))
        if tuple(ids) not in seen:
            seen.add(tuple(ids))
            results.append(Found(assemble(program, graphs), seconds, tuple(steps)))
    itself = Found(program, predicted(program, costs), point.steps)
    best, *rest = sorted([*results, itself], key=lambda f: f.seconds)
    return [best, *sorted(rest, key=lambda f: f is not itself)]
