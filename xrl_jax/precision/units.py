"""What is chosen together: a site, or a group of sites for whose errors there is no time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.precision.choose import Chooser, Option, knapsack
from xrl_jax.precision.errors import Errors
from xrl_jax.transform.narrow import PRECISIONS, STORAGE, Site

_PROBES = 2  # inputs on which the error of a unit is measured
_LEAST_GROUPS = 8  # however little time is left: of a single one, all or nothing would be chosen


class Unit(NamedTuple):
    """Precisions of one or several sites, of which one may be chosen.

    Attributes:
      options: for each, the gain and the error of all its sites.
      sites: the same of every site.
    """

    options: list[Option]
    sites: list[dict[Site, Option]]


def measured_units(
    gains: Mapping[Site, Mapping[str, float]], errors: Errors, clock: Stopwatch
) -> list[Unit]:
    """Return the units of all sites, with their errors.

    Each site is a unit as long as there is time for that, in half of the time at least; the others
    are divided into as many groups as there is time left for, into eight at least.
    """
    left, units, half = list(gains), list[Unit](), clock.left / 2

    def needed() -> float:
        """Return the seconds for one more unit."""
        return (2 * half - clock.left) / len(units) if units else 0.0

    while left and (clock.left > half or needed() * len(left) <= clock.left):
        units.append(_unit_of(left.pop(0), gains, errors))
    there_is_time_for = int(clock.left / needed()) if units else 0
    n_groups = min(max(there_is_time_for, _LEAST_GROUPS), len(left))
    for n in range(n_groups):
        units.append(_group_of(left[n::n_groups], gains, errors))
    return units


def _unit_of(site: Site, gains: Mapping[Site, Mapping[str, float]], errors: Errors) -> Unit:
    """Return a site on its own.

    The error of a weight in bfloat16 is eight times float16's, which has three bits more, except
    where float16 overflows.
    """
    fine, coarse = STORAGE[:2]
    found = {p: _error({site: p}, errors) for p in gains[site] if p != coarse}
    if coarse in gains[site]:
        finer = found.get(fine, math.inf)
        found[coarse] = 8 * finer if math.isfinite(finer) else _error({site: coarse}, errors)
    options = [Option(p, gain, found[p]) for p, gain in gains[site].items()]
    return Unit(options, [{site: o} for o in options])


def _group_of(
    sites: Sequence[Site], gains: Mapping[Site, Mapping[str, float]], errors: Errors
) -> Unit:
    """Return sites that are chosen together, with an option for each precision of any: the sites
    that cannot have it have their most exact one.
    """
    options, own = list[Option](), list[dict[Site, Option]]()
    for precision in (p for p in PRECISIONS if any(p in gains[site] for site in sites)):
        chosen = {s: precision if precision in gains[s] else _most_exact(gains[s]) for s in sites}
        error = _error(chosen, errors)
        each = {s: Option(p, gains[s][p], error / math.sqrt(len(sites))) for s, p in chosen.items()}
        options.append(Option("group", math.fsum(o.gain for o in each.values()), error))
        own.append(each)
    return Unit(options, own)


def _most_exact(precisions: Mapping[str, float]) -> str:
    return next(p for p in PRECISIONS if p in precisions)


def _error(chosen: Mapping[Site, str], errors: Errors) -> float:
    return float(errors.of(chosen, inputs=_PROBES).max())


def best_options(
    units: Sequence[Unit], budget: float, choose: Chooser = knapsack
) -> dict[Site, Option]:
    """Return the option of each site that is chosen, such that the gain is largest and the square
    root of the sum of squared errors at most `budget`.
    """
    found: dict[Site, Option] = {}
    for unit, picked in zip(units, choose([u.options for u in units], budget), strict=True):
        if picked is not None:
            found |= unit.sites[unit.options.index(picked)]
    return found
