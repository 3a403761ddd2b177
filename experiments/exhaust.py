"""Exhaustive search: all states that rewrites of a small graph can reach, to judge searches by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from xrl_jax.cost.roofline import CostTable
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.search.base import Problem, Step
from xrl_jax.search.descend import measure_graph
from xrl_jax.search.states import Space, State

MOST_STATES = 5_000
# Costs are sums of float32, so relative differences below this count as none: a step that loses no
# more than this counts as one that gains.
_TOLERANCE = 1e-6


class Exhausted(NamedTuple):
    """Predicted seconds of a program's states, all under one cost table.

    Attributes:
      start: seconds of the program itself.
      downhill: the least that can be reached by steps that each gain. Greedy search ends there at
        best, whatever the order of its steps, and so does backtracking with an alpha of 1: a state
        that it accepts costs less than the best so far, and so less than the state's parent.
      optimum: the least of all states.
      steps: a shortest path to the optimum, with the gain of each step.
      states: number of states.
    """

    start: float
    downhill: float
    optimum: float
    steps: tuple[Step, ...]
    states: int


class _Reached(NamedTuple):
    """A state, the index of the one it was first reached from, and the rewrite applied there."""

    state: State
    parent: int
    rule: str
    place: str


@dataclass(frozen=True)
class Visited:
    """All states of a program, its own first, and the indices of the states that each leads to."""

    space: Space
    reached: list[_Reached]
    successors: list[list[int]]

    def under(self, costs: CostTable) -> Exhausted:
        """Return the costs of the states under a cost table."""
        seconds = [self.space.reprice(r.state, costs).seconds for r in self.reached]
        below, todo = {0}, [0]
        while todo:
            at = todo.pop()
            most = seconds[at] * (1 + _TOLERANCE)
            gaining = {n for n in self.successors[at] if seconds[n] <= most} - below
            below |= gaining
            todo += gaining
        best = min(range(len(seconds)), key=seconds.__getitem__)
        downhill = min(seconds[n] for n in below)
        return Exhausted(
            seconds[0], downhill, seconds[best], self._path(best, seconds), len(seconds)
        )

    def _path(self, to: int, seconds: list[float]) -> tuple[Step, ...]:
        steps: list[Step] = []
        while to:
            _, parent, rule, place = self.reached[to]
            steps.append(Step(0, rule, place, seconds[parent] - seconds[to]))
            to = parent
        return tuple(reversed(steps))


def visit(problem: Problem, *, most_states: int = MOST_STATES) -> Visited:
    """Visit every state of a program with a single graph, timing the regions that lack a timing.

    Raises:
      ValueError: the program has bodies, or more states than `most_states`.
    """
    program, oracle = problem.program, problem.oracle
    if len(program.graphs) != 1:
        raise ValueError(
            "a program with loops or folded layers cannot be searched exhaustively: the states of "
            "its bodies would multiply"
        )
    space = Space(problem.rules, jnp.asarray(program.digests()))
    start = space.start(program.graph, oracle.costs)
    reached = [_Reached(start, -1, "", "")]
    index = {space.identity(start): 0}
    successors: list[list[int]] = []
    while len(successors) < len(reached):
        at = len(successors)
        state = space.matched(reached[at].state)
        measure_graph(oracle, state.graph, Stopwatch(float("inf")), None)
        costs = oracle.costs
        candidates = space.candidates(state, costs)
        there: list[int] = []
        for i in range(len(candidates.variant)):
            variant, root, partner = candidates.at(i)
            after = space.step(state, costs, variant, root, partner)
            if after is None:
                continue
            identity = space.identity(after)
            if identity not in index:
                if len(reached) == most_states:
                    raise ValueError(
                        f"the program has more than {most_states} states: use a smaller one"
                    )
                index[identity] = len(reached)
                name, place = space.rule_name(variant), space.place(state, root)
                reached.append(_Reached(after, at, name, place))
            there.append(index[identity])
        successors.append(there)
    return Visited(space, reached, successors)


def exhaust(problem: Problem, *, most_states: int = MOST_STATES) -> Exhausted:
    """Visit every state, then price all under a table with timings of all regions; see `visit`."""
    return visit(problem, most_states=most_states).under(problem.oracle.costs)
