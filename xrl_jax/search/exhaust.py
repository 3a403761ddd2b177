"""Every state that rewrites can reach, visited: what a search of a small graph is judged by."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from xrl_jax.cost.timing import Stopwatch
from xrl_jax.search.base import Problem, Step
from xrl_jax.search.descend import measure_state
from xrl_jax.search.states import Space, State

MOST_STATES = 5_000
# Costs are sums of float32: what differs by less than this is equal, and a step that loses no more
# counts as one that gains.
_ALIKE = 1e-6


class Exhausted(NamedTuple):
    """Predicted seconds of a program's states, all under one table that knows all of them.

    Attributes:
      start: of the program.
      downhill: the least that is met where every step gains. Greedy search ends there at best, in
        whatever order it takes its steps, and so does backtracking with an alpha of 1: what it
        takes up costs less than the best so far, and so less than what it was made from.
      optimum: the least of all.
      steps: a shortest way to the optimum, with what each step gains.
      states: how many there are.
    """

    start: float
    downhill: float
    optimum: float
    steps: tuple[Step, ...]
    states: int


class _Reached(NamedTuple):
    """A state, the one it was first reached from, and by what."""

    state: State
    parent: int
    rule: str
    place: str


def exhaust(problem: Problem, *, most_states: int = MOST_STATES) -> Exhausted:
    """Visit every state of a program of one graph; regions without a timing are timed.

    Raises:
      ValueError: the program has bodies, or more states than `most_states`.
    """
    program, oracle = problem.program, problem.oracle
    if len(program.graphs) != 1:
        raise ValueError("the program has loops or folded layers: their states would multiply")
    space = Space(problem.rules, jnp.asarray(program.digests()))
    start = space.start(program.graph, oracle.table())
    found = [_Reached(start, -1, "", "")]
    index = {space.identity(start): 0}
    leads_to: list[list[int]] = []
    while len(leads_to) < len(found):
        at = len(leads_to)
        state = space.matched(found[at].state)
        measure_state(oracle, state, Stopwatch(float("inf")), None)
        moves = space.moves(state, oracle.table())
        there: list[int] = []
        for entry, root, partner in zip(moves.entry, moves.root, moves.partner, strict=True):
            after = space.step(state, oracle.table(), int(entry), int(root), int(partner))
            if after is None:
                continue
            identity = space.identity(after)
            if identity not in index:
                if len(found) == most_states:
                    raise ValueError(f"more than {most_states} states: use a smaller program")
                index[identity] = len(found)
                name = space.rule_name(int(entry))
                found.append(_Reached(after, at, name, space.place(state, int(root))))
            there.append(index[identity])
        leads_to.append(there)
    costs = oracle.table()
    seconds = [space.reprice(reached.state, costs).seconds for reached in found]
    below, todo = {0}, [0]
    while todo:
        at = todo.pop()
        gaining = {n for n in leads_to[at] if seconds[n] <= seconds[at] * (1 + _ALIKE)} - below
        below |= gaining
        todo += gaining
    best = min(range(len(found)), key=seconds.__getitem__)
    steps: list[Step] = []
    at = best
    while at:
        _, parent, rule, place = found[at]
        steps.insert(0, Step(0, rule, place, seconds[parent] - seconds[at]))
        at = parent
    return Exhausted(
        seconds[0], min(seconds[n] for n in below), seconds[best], tuple(steps), len(found)
    )
