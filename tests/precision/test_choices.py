"""A choice whose measured error exceeds the tolerance is made again, for a smaller budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from xrl_jax.precision.choices import choice_within
from xrl_jax.precision.choose import Option
from xrl_jax.precision.units import Unit
from xrl_jax.transform.narrow import Site

FLOAT16, INT8 = Option("weight-in-float16", 1.0, 1e-3), Option("weight-in-int8", 1.5, 5e-3)
SITE = Site(0, 3)
UNITS = [Unit([FLOAT16, INT8], [{SITE: FLOAT16}, {SITE: INT8}])]


class MadeUp:
    """Errors of the options on two usual inputs, and of int8 on an unusual one."""

    def __init__(self, usual: tuple[float, float], unusual: float = 0.0) -> None:
        self.usual, self.unusual = usual, unusual

    def of(self, chosen: Mapping[Site, str], *, inputs: int | None = None) -> np.ndarray:
        del inputs
        return np.asarray(self.usual) if INT8.name in chosen.values() else np.full(2, FLOAT16.error)

    def excess(self, chosen: Mapping[Site, str], most: float) -> float:
        return self.unusual / most if INT8.name in chosen.values() else 0.0


def chosen(errors: Any) -> dict[Site, str]:
    return choice_within(1e-2, UNITS, errors).types


def test_the_largest_gain_is_chosen() -> None:
    assert chosen(MadeUp((5e-3, 5e-3))) == {SITE: INT8.name}


def test_an_error_on_one_usual_input_is_too_much() -> None:
    assert chosen(MadeUp((5e-3, 3e-2))) == {SITE: FLOAT16.name}


def test_errors_that_vary_too_much_are_too_much() -> None:
    assert chosen(MadeUp((2e-3, 9e-3))) == {SITE: FLOAT16.name}


def test_an_error_on_an_unusual_input_is_too_much() -> None:
    assert chosen(MadeUp((5e-3, 5e-3), unusual=3e-2)) == {SITE: FLOAT16.name}
