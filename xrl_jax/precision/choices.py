"""The choice among lower precisions within a budget of error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xrl_jax.precision.choose import Chooser, Option, knapsack
from xrl_jax.precision.errors import Errors, error_bound
from xrl_jax.precision.units import Unit, best_options
from xrl_jax.transform.narrow import Site

_FEW = 4  # inputs on which a choice is measured before it is on all
_ADJUSTMENTS = 6  # times that a choice is made again because its error is not the predicted one
_LEAST_SHARE = 0.3  # of the budget that is left then: another choice may err far less


def worthwhile(
    gains: Mapping[Site, Mapping[str, float]], negligible: float
) -> dict[Site, Mapping[str, float]]:
    """Return the sites by gain, the largest first, without the last that gain little together."""
    order = sorted(gains, key=lambda site: -max(gains[site].values()))
    largest = [max(gains[site].values()) for site in order]
    so_far = np.cumsum([0.0, *largest[:-1]])
    return {
        site: gains[site]
        for site, before in zip(order, so_far, strict=True)
        if before < (1.0 - negligible) * sum(largest)
    }


class Choice(NamedTuple):
    """The precisions of some products, and the error that they cause together."""

    options: dict[Site, Option]
    error: float

    @property
    def types(self) -> dict[Site, str]:
        return {site: option.name for site, option in self.options.items()}


def choice_within(
    most: float, units: Sequence[Unit], errors: Errors, choose: Chooser = knapsack
) -> Choice:
    """Return the choice with the largest gain whose error is at most `most` on nearly all inputs,
    and on unusual ones at most that of bfloat16. Where the error of a choice is not as predicted,
    the next one is made for the budget that would have been right, or for 0.3 of the last one.

    Args:
      choose: how options are chosen for a budget of error.
    """
    budget = most
    for _ in range(_ADJUSTMENTS):
        choice = Choice(best_options(units, budget, choose), 0.0)
        each = errors.of(choice.types, inputs=_FEW)
        if error_bound(each) <= most:  # else it need not be measured on all
            each = errors.of(choice.types)
        excess = error_bound(each) / most
        if excess <= 1.0:
            excess = errors.excess(choice.types, most)
        if excess <= 1.0:
            return choice._replace(error=float(each.max()))
        budget *= max(0.95 / excess, _LEAST_SHARE)
    return Choice({}, 0.0)
