"""The choice of precisions within a budget of error."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from xrl_jax.precision.choose import Option, knapsack


def names(options: list[list[Option]], budget: float) -> list[str | None]:
    return [o and o.name for o in knapsack(options, budget)]


def test_errors_add_up_as_squares() -> None:
    """3 and 4 make 5."""
    options = [[Option("a", 1.0, 3e-3)], [Option("b", 1.0, 4e-3)]]
    assert names(options, 5.05e-3) == ["a", "b"]
    assert names(options, 4.9e-3) in (["a", None], [None, "b"])


def test_greedy_by_gain_per_error_is_not_good_enough() -> None:
    """The best ratio leaves no room for the two others, which gain more together."""
    options = [
        [Option("best ratio", 1.1, 0.75)],
        [Option("other", 0.9, 0.7)],
        [Option("other", 0.9, 0.7)],
    ]
    assert names(options, 1.0) == [None, "other", "other"]


def test_without_a_gain_nothing_is_chosen() -> None:
    assert names([[Option("slower", -1.0, 0.0), Option("same", 0.0, 0.0)]], 1.0) == [None]


def test_what_overflows_is_not_chosen() -> None:
    assert names([[Option("overflows", 1.0, math.inf), Option("nan", 1.0, 2.0)]], 1.0) == [None]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_as_good_as_trying_everything(seed: int) -> None:
    rng = np.random.default_rng(seed)
    options = [
        [Option(str(k), rng.uniform(0, 1), rng.uniform(0, 1)) for k in range(2)] for _ in range(5)
    ]
    found = [o for o in knapsack(options, 1.0) if o is not None]
    assert math.sqrt(sum(o.error**2 for o in found)) <= 1.0
    choices = [
        [o for o in every if o] for every in itertools.product(*([None, *own] for own in options))
    ]
    fitting = [taken for taken in choices if sum(o.error**2 for o in taken) <= 0.99]
    best = max(sum(o.gain for o in taken) for taken in fitting)
    assert sum(o.gain for o in found) >= best - 1e-9
