"""What lower precisions save, and the choice among them within a budget of error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from xrl_jax.cost.view import view_graph
from xrl_jax.libraries.base import Library
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.precision.choose import Chooser, Option, knapsack
from xrl_jax.precision.errors import Errors, error_bound
from xrl_jax.precision.units import Unit, best_options
from xrl_jax.program.program import Program
from xrl_jax.search.base import Oracle, predicted
from xrl_jax.transform.narrow import PRECISIONS, Site, narrowed

_FEW = 4  # inputs on which a choice is measured before it is on all
_ADJUSTMENTS = 6  # times that a choice is made again because its error is not the predicted one


def seconds_saved(
    oracle: Oracle,
    program: Program,
    places: Mapping[Site, Sequence[str]],
    library: Library,
    clock: Stopwatch,
) -> dict[Site, dict[str, float]]:
    """Return the seconds of a run of the program that each precision saves, where it does, after
    timing what is not timed yet.
    """
    wanted = {}
    choices = [{s: p for s, own in places.items() if p in own} for p in PRECISIONS]
    for chosen in ({}, *choices):
        for graph in narrowed(program, chosen, library).graphs:
            wanted |= oracle.untimed_regions(view_graph(oracle.costs.sharing, graph))
    oracle.measure(wanted, clock=clock)
    before = predicted(program, oracle.costs)
    gains: dict[Site, dict[str, float]] = {}
    for site, own in places.items():
        for precision in own:
            after = predicted(narrowed(program, {site: precision}, library), oracle.costs)
            if after < before:
                gains.setdefault(site, {})[precision] = before - after
    return gains


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
    """Return the choice with the largest gain whose error is at most `most` on nearly all inputs.
    Where the error of a choice is not as predicted, the next one is made for the budget that would
    have been right.

    Args:
      choose: how options are chosen for a budget of error.
    """
    budget = most
    for _ in range(_ADJUSTMENTS):
        choice = Choice(best_options(units, budget, choose), 0.0)
        each = errors.of(choice.types, inputs=_FEW)
        if error_bound(each) <= most:  # else it need not be measured on all
            each = errors.of(choice.types)
        bound = error_bound(each)
        if bound <= most:
            return choice._replace(error=float(each.max()))
        budget *= 0.95 * most / bound
    return Choice({}, 0.0)
