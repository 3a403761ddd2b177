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
      greedy: cost of the best greedy choice.
      proven: whether it was proven that none is cheaper.
      interrupted: whether Ctrl-C ended the search.
    """

    choice: Choice
    greedy: float
    proven: bool
    interrupted: bool


def extract(
    instance: Instance,
    left: Callable[[], float],
    *,
    seed: int = 0,
    tell: Callable[[Choice], None] = lambda _: None,
) -> Extracted:
    """Look for the cheapest choice. Ctrl-C returns the best so far.

    Args:
      left: seconds left; without any, the greedy choice is returned.
      tell: called with each better choice.
    """
    full = _greedy(instance)
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
            everything = range(instance.n_classes)
            small = len(instance.cost) <= _EXACT_NODES
            if small and left() > 0:
                limit = left() * (1 - _EXACT_SHARE)
                program = Program(instance, full, everything, numbered=True)
                found, proven = solved(program, best, solver, lambda: left() - limit)
                if found is not None:
                    full = found
                    better(valued(instance, full))
            if not proven and left() > 0:
                full, _ = improved(instance, full, solver, left, seed=seed, tell=better)
            if not proven and left() > 0:
                program = Program(instance, full, everything, numbered=True)
                found, proven = solved(program, best, solver, left)
                if found is not None:
                    better(valued(instance, found))
    except KeyboardInterrupt:
        proven, interrupted = False, True
    return Extracted(best, greedy, proven, interrupted)


def _greedy(instance: Instance) -> np.ndarray:
    """Return the best of the greedy choices, with an e-node for every class."""
    many = readers_of(instance).astype(np.float64)
    choices = [by_tree_cost(instance, instance.cost / many**power) for power in POWERS]
    return min(choices, key=lambda full: valued(instance, full).cost)
