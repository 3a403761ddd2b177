"""The choice of precisions: the largest gain within a budget of error.

Rounding errors of different operators are independent, so their variances add up: choosing is a
knapsack problem in the squares of the errors. It is solved exactly, up to the resolution of the
squares, by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_STEPS = 1000  # into which the budget of squared error is divided


class Option(NamedTuple):
    """A precision that one operator may have."""

    name: str
    gain: float  # seconds saved
    error: float  # relative error that it causes on its own


# Returns for each operator one of its options, or None, such that the square root of the sum of
# squared errors is at most the budget.
Chooser = Callable[[Sequence[Sequence[Option]], float], list[Option | None]]


def knapsack(options: Sequence[Sequence[Option]], budget: float) -> list[Option | None]:
    """Return for each operator one of its options, or None, with the largest total gain such that
    the square root of the sum of squared errors is at most `budget`.

    >>> fine, coarse = Option("fine", 1.0, 3e-3), Option("coarse", 1.5, 8e-3)
    >>> [o and o.name for o in knapsack([[fine, coarse], [fine, coarse]], 5e-3)]
    ['fine', 'fine']
    >>> [o and o.name for o in knapsack([[fine, coarse], [coarse]], 9e-3)]
    ['fine', 'coarse']
    """
    best = np.zeros(_STEPS + 1)  # largest gain for each number of steps of squared error
    taken = np.full((len(options), _STEPS + 1), -1)
    used = np.zeros((len(options), _STEPS + 1), int)
    for n, own in enumerate(options):
        before = best.copy()
        for k, option in enumerate(own):
            steps = _steps(option.error, budget)
            if steps > _STEPS or option.gain <= 0:
                continue
            with_it = np.full_like(best, -np.inf)
            with_it[steps:] = before[: _STEPS + 1 - steps] + option.gain
            better = with_it > best
            best[better], taken[n, better], used[n, better] = with_it[better], k, steps
    chosen: list[Option | None] = []
    left = _STEPS
    for n in reversed(range(len(options))):
        k = int(taken[n, left])
        chosen.append(options[n][k] if k >= 0 else None)
        left -= int(used[n, left])
    return chosen[::-1]


def _steps(error: float, budget: float) -> int:
    """Return the steps of squared error that an error takes, rounded up."""
    return int(np.ceil(min((error / budget) ** 2, 2.0) * _STEPS)) if budget > 0 else _STEPS + 1
