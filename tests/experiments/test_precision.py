"""Ways to choose precisions: greedy, beside the knapsack of xrl_jax."""

from __future__ import annotations

import subprocess
import sys

import pytest

from experiments.precision import greedy
from xrl_jax.precision.choose import Option, knapsack


def names(found: list[Option | None]) -> list[str | None]:
    return [o and o.name for o in found]


def test_greedy_takes_the_largest_gain_per_squared_error_first() -> None:
    options = [
        [Option("best ratio", 1.1, 0.75)],
        [Option("other", 0.9, 0.7)],
        [Option("other", 0.9, 0.7)],
    ]
    assert names(greedy(options, 0.75)) == ["best ratio", None, None]
    assert names(greedy(options, 1.0)) == ["best ratio", None, None]
    assert names(knapsack(options, 1.0)) == [None, "other", "other"]


def test_greedy_goes_on_with_what_fits() -> None:
    options = [[Option("large", 5.0, 2.0)], [Option("fits", 1.0, 1.0), Option("worse", 1.0, 1.1)]]
    assert names(greedy(options, 1.0)) == [None, "fits"]


def test_greedy_takes_nothing_that_saves_no_time() -> None:
    assert names(greedy([[Option("slower", -1.0, 0.0)]], 1.0)) == [None]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--networks=nothing", "nothing"),
        ("--tolerances=1e-2,-1", "--tolerances: '-1' is no positive number"),
        ("word", "unexpected argument 'word'"),
    ],
)
def test_a_bad_flag_is_named(flag: str, message: str) -> None:
    command = [sys.executable, "-m", "experiments.precision", flag]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and message in ended.stderr
