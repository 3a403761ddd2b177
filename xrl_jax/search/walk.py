"""Going through the graphs of a program one by one: the frame all strategies share."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from xrl_jax.cost.timing import Stopwatch
from xrl_jax.search.base import (
    Budget,
    Found,
    Problem,
    Run,
    SearchResult,
    Step,
    StopReason,
    assemble,
)
from xrl_jax.search.descend import measure_state
from xrl_jax.search.states import Space, State

# One graph's search: (run, space, start, graph index, clock, key) -> states with their steps, best first.
GraphSearch = Callable[
    [Run, Space, State, int, Stopwatch, jax.Array], list[tuple[State, list[Step]]]
]


def search_graphs(
    problem: Problem, budget: Budget, key: jax.Array, search: GraphSearch
) -> SearchResult:
    """Search every graph of the program, the costliest first, each with its share of the time left.

    The results are combined: the i-th best program has the i-th best state of every graph. Ctrl-C ends the search and keeps what
    was found.
    """
    run = Run(problem, budget)
    oracle = problem.oracle
    program = problem.program
    space = Space(problem.rules, jnp.asarray(program.digests()))
    counts = program.counts
    starts: list[State] = []
    found: dict[int, list[tuple[State, list[Step]]]] = {}
    try:
        for graph in program.graphs:
            state = space.start(graph, oracle.table())
            measure_state(oracle, state, run.clock, budget.measurements)
            starts.append(state)
        starts = [space.reprice(s, oracle.table()) for s in starts]
        run.start_seconds = sum(c * s.seconds for c, s in zip(counts, starts, strict=True))
        run.report("measured the original", run.start_seconds)
        order = sorted(range(len(starts)), key=lambda i: -counts[i] * starts[i].seconds)
        for i, k in zip(order, jax.random.split(key, len(order)), strict=True):
            if run.out_of_budget():
                break
            waiting = [counts[j] * starts[j].seconds for j in order if j not in found]
            share = max(counts[i] * starts[i].seconds / max(sum(waiting), 1e-12), 0.05)
            found[i] = search(run, space, starts[i], i, run.clock.part(min(share, 1.0)), k)
            best = sum(
                c
                * (
                    space.reprice(found[j][0][0], oracle.table()).seconds
                    if j in found
                    else s.seconds
                )
                for j, (c, s) in enumerate(zip(counts, starts, strict=True))
            )
            run.report(f"graph {i} done", best)
    except KeyboardInterrupt:
        run.stop = StopReason.INTERRUPTED
    return _combine(run, space, starts, found)


def _combine(
    run: Run, space: Space, starts: list[State], found: dict[int, list[tuple[State, list[Step]]]]
) -> SearchResult:
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
    results.append(Found(program, start_seconds))
    return SearchResult(
        tuple(sorted(results, key=lambda f: f.seconds)),
        start_seconds,
        run.candidates,
        run.stop,
        tuple(run.history),
    )
