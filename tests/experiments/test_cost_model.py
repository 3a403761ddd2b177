"""How well predictions fit timings, on made-up figures."""

from __future__ import annotations

import pytest

from experiments.cost_model import Fit, Point


def test_rank_correlation_with_one_pair_swapped() -> None:
    points = (Point(0.5, 0.5, 1), Point(1.0, 0.8, 2), Point(1.2, 1.5, 3), Point(1.6, 1.4, 4))
    assert Fit("net", points).rank_correlation == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)


def test_the_error_is_the_median_of_the_ratios() -> None:
    points = (Point(0.9, 1.0, 1), Point(1.0, 1.0, 1), Point(3.0, 2.0, 1))
    assert Fit("net", points).median_error == pytest.approx(0.1)
