"""Exhaustive search of a small graph whose optimum, and least cost by gains alone, are known."""

from __future__ import annotations

import pytest

from experiments.exhaust import exhaust
from tests.search.fakes import FakeOracle
from tests.search.test_strategies import looped, program, rules
from xrl_jax.search.base import Problem


def test_number_of_states_optimum_and_end_of_greedy_search() -> None:
    """The graph has two contractions with four lowerings each, and two transposes, which may be
    merged.
    """
    found = exhaust(Problem(program(), rules(), FakeOracle()))
    assert found.states == 4 * 4 * 3  # transposes: two, one that does nothing, or none
    assert found.start == pytest.approx(2.4e-3, abs=1e-5)
    assert found.downhill == pytest.approx(1.6e-3, abs=1e-5)  # the end of greedy search
    assert found.optimum == pytest.approx(1.0e-3, abs=1e-5)


def test_the_path_to_the_optimum_contains_a_loss() -> None:
    found = exhaust(Problem(program(), rules(), FakeOracle()))
    assert found.start - sum(s.gain for s in found.steps) == pytest.approx(found.optimum)
    assert [s.gain < 0 for s in found.steps if s.rule == "trap-in"] == [True, True]
    assert all(s.place.startswith("%") for s in found.steps)


def test_a_program_with_bodies_and_one_with_too_many_states_are_refused() -> None:
    with pytest.raises(ValueError, match="loops or folded layers"):
        exhaust(Problem(looped(), rules(), FakeOracle()))
    with pytest.raises(ValueError, match="more than 10 states"):
        exhaust(Problem(program(), rules(), FakeOracle()), most_states=10)
