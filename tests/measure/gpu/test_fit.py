"""Predicted seconds are corrected by measured ones, kind by kind."""

from __future__ import annotations

import pytest

from xrl_jax.measure.gpu.fit import Pair, fitted


def test_each_kind_has_the_median_of_its_ratios() -> None:
    products = [Pair({"product": 1}, 1.0, m) for m in (2.0, 2.2, 10.0)]
    loops = [Pair({"loop": 1}, 1.0, m) for m in (0.5, 0.5, 0.5)]
    fit = fitted([*products, *loops])
    assert (fit.factors["product"], fit.factors["loop"]) == (2.2, 0.5)
    assert fit.errors["product"] == pytest.approx(0.1) and fit.errors["loop"] == 0.0
    assert fit.counts == {"product": 3, "loop": 3}


def test_a_program_belongs_to_its_heaviest_kind() -> None:
    assert Pair({"loop": 2, "conv": 1}, 1.0, 1.0).kind == "conv"


def test_a_kind_with_few_pairs_has_the_median_of_all() -> None:
    fit = fitted([Pair({"loop": 1}, 1.0, 3.0)] * 3 + [Pair({"conv": 1}, 1.0, 9.0)])
    assert fit.factors["conv"] == fit.factors["copy"] == 3.0


def test_without_pairs_predictions_stay_as_they_are() -> None:
    assert set(fitted([]).factors.values()) == {1.0}
