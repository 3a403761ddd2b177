"""Going through the graphs of a program one by one: the frame all strategies share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
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
    Reached,
    Run,
    SearchResult,
    StopReason,
    assemble,
    predicted,
)
from xrl_jax.search.descend import measure_graph
from xrl_jax.search.openings import Opening, openings
from xrl_jax.search.states import Space, State, in_one_bucket

_START = 0.15  # of the time, at most, for the regions of a program before it is rewritten
_OPENING = 0.8  # of the time, at most, for making the openings
# So many programs of an opening are timed whole even where they are predicted to be slower than the
# original: predictions err alike within an opening, by a tenth and more.
_ANYWAY = 2
_BEHIND = 1.1  # an opening this many times slower than the best is not searched further

# One graph's search: (run, space, states reached so far, graph index, clock, key) -> states with
# their steps, best first.
GraphSearch = Callable[[Run, Space, list[Reached], int, Stopwatch, jax.Array], list[Reached]]


class Phase(NamedTuple):
    """A part of a search that goes through all graphs before the next part begins."""

    search: GraphSearch
    share: float = 1.0  # of the time left when it begins


def search_graphs(
    problem: Problem, budget: Budget, key: jax.Array, *phases: Phase, opened: bool = False
) -> SearchResult:
    """Search every graph of the program, the costliest first, each with its share of the time left.

    Each phase starts from what the one before it reached. The results are combined: the i-th best
    program has the i-th best state of every graph. Ctrl-C ends the search and keeps what was noted
    by `Run.keep`.

    Args:
      opened: search from each of `openings`, in turn, instead of from the program itself.
    """
    run = Run(problem, budget)
    program, oracle = problem.program, problem.oracle
    found: list[tuple[Opening, list[Found]]] = []
    try:
        with plain_ctrl_c():
            starts = _starts(run, program)
            run.start(program.counts, [s.seconds for _, s in starts])
            run.report("measured the original")
            begin = [Opening(program)]
            if opened:
                begin = openings(program, problem.rules, oracle.table(), run.clock.part(_OPENING))
            for n, opening in enumerate(begin):
                clock = run.clock.part(1.0 / (len(begin) - n))
                rivals = [each[0].program for _, each in found]
                # Even where no time is left: as it is, an opening may be the best there is.
                found.append((opening, _search_one(run, opening, rivals, clock, key, phases)))
                if run.stop is StopReason.INTERRUPTED:
                    break
    except KeyboardInterrupt:
        run.stop = StopReason.INTERRUPTED
    costs = oracle.table()
    start_seconds = predicted(program, costs)
    kept = [
        [f for n, f in enumerate(each) if f.seconds < start_seconds or (o.steps and n < _ANYWAY)]
        for o, each in found
    ]
    return SearchResult(
        (*_in_turn(kept), Found(program, start_seconds)),
        start_seconds,
        run.candidates,
        run.stop,
        tuple(run.history),
        run.note,
    )


def _in_turn(found: Sequence[Sequence[Found]]) -> list[Found]:
    """The best of each opening, then the second of each, and so on; in each turn the best
    prediction first.

    Predictions for one opening err alike, so programs of different openings are timed first.
    """
    turns = itertools.zip_longest(*found)
    return [f for turn in turns for f in sorted(filter(None, turn), key=lambda f: f.seconds)]


def _starts(run: Run, program: Program) -> list[tuple[Space, State]]:
    """The first state of every graph, its regions measured as far as `_START` goes."""
    oracle, clock = run.problem.oracle, run.clock.part(_START)
    space = Space(run.problem.rules, jnp.asarray(program.digests()))
    starts = []
    for graph in in_one_bucket(program):
        state = space.start(graph, oracle.table())
        measure_graph(oracle, state.graph, clock, run.budget.measurements)
        starts.append(state)
    return [(space, space.reprice(s, oracle.table())) for s in starts]


def _search_one(
    run: Run,
    opening: Opening,
    rivals: Sequence[Program],
    clock: Stopwatch,
    key: jax.Array,
    phases: Sequence[Phase],
) -> list[Found]:
    """What the phases find from one opening, in the order of `_combine`.

    Args:
      rivals: the best programs of earlier openings.
    """
    program, oracle = opening.program, run.problem.oracle
    starts: list[tuple[Space, State]] = []
    found: dict[int, list[Reached]] = {}
    try:
        with plain_ctrl_c():
            starts = _starts(run, program)
            run.go_on(program.counts, [s.seconds for _, s in starts])
            weights = [c * s.seconds for c, (_, s) in zip(program.counts, starts, strict=True)]
            order = sorted(range(len(starts)), key=lambda i: -weights[i])
            for phase, phase_key in zip(phases, jax.random.split(key, len(phases)), strict=True):
                if found and rivals:  # all under one table: earlier predictions knew less
                    least = min(predicted(rival, oracle.table()) for rival in rivals)
                    if _combine(run, opening, starts, found)[0].seconds > _BEHIND * least:
                        break
                part = clock.part(phase.share)
                for n, (i, k) in enumerate(
                    zip(order, jax.random.split(phase_key, len(order)), strict=True)
                ):
                    if run.out_of_budget(clock):
                        break
                    space, start = starts[i]
                    share = max(weights[i] / max(sum(weights[j] for j in order[n:]), 1e-12), 0.05)
                    reached = found.get(i, [(start, [])])
                    reached = [(space.reprice(s, oracle.table()), steps) for s, steps in reached]
                    found[i] = phase.search(run, space, reached, i, part.part(min(share, 1.0)), k)
                    run.keep(
                        i, [(space.reprice(s, oracle.table()), steps) for s, steps in found[i]]
                    )
    except KeyboardInterrupt:
        run.stop = StopReason.INTERRUPTED
        found = {**run.reached, **found}
    return _combine(run, opening, starts, found)


def _combine(
    run: Run,
    opening: Opening,
    starts: Sequence[tuple[Space, State]],
    found: Mapping[int, Sequence[Reached]],
) -> list[Found]:
    """The i-th best program has the i-th best state of every graph. The opening itself comes second
    at the latest: a gain is predicted region by region, and may be a loss in the whole.
    """
    program, costs = opening.program, run.problem.oracle.table()
    results: list[Found] = []
    seen: set[tuple] = set()
    for rank in range(max((len(f) for f in found.values()), default=0)):
        graphs, seconds, steps, ids = {}, 0.0, list(opening.steps), []
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
    itself = Found(program, predicted(program, costs), opening.steps)
    best, *rest = sorted([*results, itself], key=lambda f: f.seconds)
    return [best, *sorted(rest, key=lambda f: f is not itself)]
