"""Going through the graphs of a program one by one: the frame all strategies share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.cost.timing import Stopwatch
from xrl_jax.graph.graph import grow
from xrl_jax.search.base import (
    Budget,
    Found,
    Problem,
    Reached,
    Run,
    SearchResult,
    StopReason,
    assemble,
)
from xrl_jax.search.descend import measure_state
from xrl_jax.search.states import Space, State

# One graph's search: (run, space, states reached so far, graph index, clock, key) -> states with
# their steps, best first.
GraphSearch = Callable[[Run, Space, list[Reached], int, Stopwatch, jax.Array], list[Reached]]


class Phase(NamedTuple):
    """A part of a search that goes through all graphs before the next part begins."""

    search: GraphSearch
    share: float = 1.0  # of the time left when it begins


def search_graphs(problem: Problem, budget: Budget, key: jax.Array, *phases: Phase) -> SearchResult:
    """Search every graph of the program, the costliest first, each with its share of the time left.

    Each phase starts from what the one before it reached. The results are combined: the i-th best
    program has the i-th best state of every graph. Ctrl-C ends the search and keeps what was noted
    by `Run.keep`.
    """
    run = Run(problem, budget)
    oracle = problem.oracle
    program = problem.program
    space = Space(problem.rules, jnp.asarray(program.digests()))
    counts = program.counts
    starts: list[State] = []
    found: dict[int, list[Reached]] = {}
    try:
        # One bucket for all graphs: everything is then compiled once.
        bucket = max(g.nodes.op.shape[0] for g in program.graphs)
        for graph in program.graphs:
            same = graph if graph.nodes.op.shape[0] == bucket else grow(graph, bucket)
            state = space.start(same, oracle.table())
            measure_state(oracle, state, run.clock, budget.measurements)
            starts.append(state)
        starts = [space.reprice(s, oracle.table()) for s in starts]
        run.start(counts, [s.seconds for s in starts])
        run.report("measured the original")
        weights = [c * s.seconds for c, s in zip(counts, starts, strict=True)]
        order = sorted(range(len(starts)), key=lambda i: -weights[i])
        for phase, phase_key in zip(phases, jax.random.split(key, len(phases)), strict=True):
            clock = run.clock.part(phase.share)
            for n, (i, k) in enumerate(
                zip(order, jax.random.split(phase_key, len(order)), strict=True)
            ):
                if run.out_of_budget():
                    break
                share = max(weights[i] / max(sum(weights[j] for j in order[n:]), 1e-12), 0.05)
                reached = found.get(i, [(starts[i], [])])
                reached = [(space.reprice(s, oracle.table()), steps) for s, steps in reached]
                found[i] = phase.search(run, space, reached, i, clock.part(min(share, 1.0)), k)
                run.keep(i, [(space.reprice(s, oracle.table()), steps) for s, steps in found[i]])
    except KeyboardInterrupt:
        run.stop = StopReason.INTERRUPTED
        found = {**run.reached, **found}
    return _combine(run, space, starts, found)


def _combine(
    run: Run, space: Space, starts: list[State], found: dict[int, list[Reached]]
) -> SearchResult:
    """The programs predicted to be faster than the original, best first, then the original."""
    program, costs = run.problem.program, run.problem.oracle.table()
    depth = max((len(f) for f in found.values()), default=0)
    results: list[Found] = []
    seen: set[tuple] = set()
    for rank in range(depth):
        graphs, seconds, steps, ids = {}, 0.0, [], []
        for i, (count, start) in enumerate(zip(program.counts, starts, strict=True)):
            state, taken = start, []
            if i in found:
                state, taken = found[i][min(rank, len(found[i]) - 1)]
                graphs[i] = state.graph
            seconds += count * space.reprice(state, costs).seconds
            steps += taken
            ids.append(space.identity(state))
        if tuple(ids) not in seen:
            seen.add(tuple(ids))
            results.append(Found(assemble(program, graphs), seconds, tuple(steps)))
    start_seconds = sum(
        c * space.reprice(s, costs).seconds for c, s in zip(program.counts, starts, strict=False)
    )
    faster = sorted((f for f in results if f.seconds < start_seconds), key=lambda f: f.seconds)
    return SearchResult(
        (*faster, Found(program, start_seconds)),
        start_seconds,
        run.candidates,
        run.stop,
        tuple(run.history),
    )
