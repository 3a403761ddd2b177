"""Extraction in a given time: greedily, then by local search, then by mixed-integer programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from xrl_jax.egraph.extraction.discounted import POWERS, by_tree_cost, readers_of
from xrl_jax.egraph.extraction.instance import Choice, Instance, valued
from xrl_jax.egraph.extraction.neighbourhoods import improved
from xrl_jax.egraph.extraction.programs import Program, solved
from xrl_jax.egraph.extraction.shared import shared
from xrl_jax.runtime.milp import MilpSolver

_EXACT_NODES = 3000  # up to so many e-nodes the whole is solved before its parts
_EXACT_SHARE = 0.5  # of the time left


class Extracted(NamedTuple):
    """The cheapest choice found.

    Attributes:
      full: [C], the same with an e-node for every class that has one; acyclic.
      greedy: cost of the best greedy choice.
      proven: whether it was proven that none is cheaper.
      interrupted: whether Ctrl-C ended the search.
    """

    choice: Choice
    full: np.ndarray
    greedy: float
    proven: bool
    interrupted: bool


def extract(
    instance: Instance,
    left: Callable[[], float],
    *,
    start: np.ndarray | None = None,
    programs: bool = True,
    seed: int = 0,
    tell: Callable[[Choice], None] = lambda _: None,
) -> Extracted:
    """Look for the cheapest choice. Ctrl-C returns the best so far.

    Args:
      left: seconds left; without any, the greedy choice is returned.
      start: an acyclic choice [C] to begin with if it is cheaper than the greedy ones; -1 for
        classes without one, which no e-node of it reads.
      programs: whether mixed-integer programs are solved after the local search.
      tell: called with each better choice.
    """
    full = first = _greedy(instance, start)
    best = valued(instance, full)
    greedy, proven, interrupted = best.cost, False, False

    def better(choice: Choice) -> None:
        nonlocal best
        best = choice
        tell(choice)

    better(best)
    try:
        full, _ = shared(instance, full, lambda: left() > 0, better)
        with MilpSolver() as solver:

            def as_a_whole(full: np.ndarray, left: Callable[[], float]) -> tuple[np.ndarray, bool]:
                everything = range(instance.n_classes)
                program = Program(instance, full, everything, numbered=True)
                found, proven = solved(program, best, solver, left)
                if found is not None:
                    better(valued(instance, found))
                return full if found is None else found, proven

            if programs and len(instance.cost) <= _EXACT_NODES and left() > 0:
                limit = left() * (1 - _EXACT_SHARE)
                full, proven = as_a_whole(full, lambda: left() - limit)
            if programs and not proven and left() > 0:
                full, _ = improved(instance, full, solver, left, seed=seed, tell=better)
            if programs and not proven and left() > 0:
                full, proven = as_a_whole(full, left)
    except KeyboardInterrupt:
        proven, interrupted = False, True
    # A program leaves open which e-nodes classes have that its solution does not need.
    full = np.where(best.node >= 0, best.node, first)
    return Extracted(best, full, greedy, proven, interrupted)


def _greedy(instance: Instance, start: np.ndarray | None) -> np.ndarray:
    """Return the best of the greedy choices and `start`, with an e-node for every class."""
    many = readers_of(instance).astype(np.float64)
    choices = [by_tree_cost(instance, instance.cost / many**power) for power in POWERS]
    choices += [] if start is None else [np.where(start >= 0, start, choices[0])]
    return min(choices, key=lambda full: valued(instance, full).cost)
