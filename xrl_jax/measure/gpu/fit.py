"""Corrects predicted seconds by seconds measured on a GPU: a factor for each kind of kernel."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# A program of several kernels is of the first of these kinds that it has.
KINDS = ("attention", "conv", "product", "call", "reduce", "loop", "copy")
_FEWEST = 3  # pairs from which a factor is fitted


class Pair(NamedTuple):
    """A program whose seconds were predicted and measured.

    Attributes:
      kernels: their number by kind, as in `Timing.kernels`.
    """

    kernels: Mapping[str, int]
    predicted: float
    measured: float

    @property
    def kind(self) -> str:
        """The kind that most of its time belongs to; "" if none is known."""
        return next((k for k in KINDS if self.kernels.get(k)), "")


class Fit(NamedTuple):
    """Factors by kind, and how far predictions are off with them.

    Attributes:
      factors: measured / predicted seconds, the median of each kind.
      errors: median of |predicted - measured| / measured with these factors, by kind.
      counts: number of pairs by kind.
    """

    factors: dict[str, float]
    errors: dict[str, float]
    counts: dict[str, int]


def fitted(pairs: Sequence[Pair]) -> Fit:
    """Return the factors that make the median of each kind right; kinds with few pairs get that of
    all.
    """
    by_kind = {k: [p for p in pairs if p.kind == k] for k in KINDS}
    common = statistics.median([p.measured / p.predicted for p in pairs]) if pairs else 1.0
    factors, errors = {}, {}
    for kind, of_kind in by_kind.items():
        ratios = [p.measured / p.predicted for p in of_kind]
        factors[kind] = statistics.median(ratios) if len(ratios) >= _FEWEST else common
        if ratios:
            errors[kind] = statistics.median(abs(factors[kind] / r - 1) for r in ratios)
    return Fit(factors, errors, {k: len(v) for k, v in by_kind.items() if v})
