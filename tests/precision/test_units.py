"""Sites are measured one by one, or in groups where there is no time for that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xrl_jax.precision.choose import Option
from xrl_jax.precision.units import Unit, best_options, measured_units
from xrl_jax.transform.narrow import Site

INT8 = "operands-in-int8"
SITES = [Site(0, n) for n in range(20)]
GAINS = {site: {INT8: 1.0} for site in SITES}


class MadeUp:
    """A clock, and errors that take a time to measure: that of n sites is 1e-3 times root n."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.left = seconds, 1.0

    def of(self, chosen: Any, *, inputs: int) -> np.ndarray:
        del inputs
        self.left -= self.seconds
        return np.asarray([1e-3 * np.sqrt(len(chosen))])


def units(seconds: float) -> list[Unit]:
    """Return the units where a measurement takes this share of the time."""
    made_up: Any = MadeUp(seconds)
    return measured_units(GAINS, made_up, made_up)


def test_with_time_every_site_is_a_unit() -> None:
    found = units(0.01)
    assert [list(u.sites[0]) for u in found] == [[site] for site in SITES]
    assert found[0].options == [Option(INT8, 1.0, 1e-3)]


def test_without_time_the_last_sites_are_grouped() -> None:
    found = units(0.24)
    assert [len(u.sites[0]) for u in found] == [1, 1, 1, 3, 2, 2, 2, 2, 2, 2, 2]
    (group,) = found[3].options
    assert group.gain == 3.0 and group.error == pytest.approx(1e-3 * np.sqrt(3))
    assert all(o.error == pytest.approx(1e-3) for o in found[3].sites[0].values())


def test_without_any_time_there_are_still_eight_groups() -> None:
    made_up: Any = MadeUp(0.1)
    made_up.left = -1.0
    found = measured_units(GAINS, made_up, made_up)
    assert [len(u.sites[0]) for u in found] == [3, 3, 3, 3, 2, 2, 2, 2]


def test_a_group_is_chosen_as_a_whole() -> None:
    one, two = ({s: Option(INT8, 1.0, 1e-3)} for s in SITES[:2])
    group = Unit([Option("group", 5.0, 3e-3)], [{s: Option(INT8, 2.5, 2e-3) for s in SITES[2:4]}])
    alone = [Unit(list(own.values()), [own]) for own in (one, two)]
    assert list(best_options([*alone, group], 2e-3)) == SITES[:2]
    assert list(best_options([*alone, group], 3.2e-3)) == [SITES[0], *SITES[2:4]]
