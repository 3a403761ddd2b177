"""Hyperparameters of the cost model."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CostConfig:
    """Hyperparameters of the cost model; the defaults were measured on x86 CPUs.

    Attributes:
      optimistic: factor on the estimated time of an untimed lowering: a quarter of a lowering's
        timings are below this share of their median. Pessimistic estimates are divided by it
        instead.
      fewest_samples: a class of operators with fewer timings keeps its previous rates.
      peak: the flop rate of a class of operators is this quantile of the rates it reached.
      ridge: weight of the pull of corrections by whole programs towards one common factor.
      most_change: a correction differs from the common one by at most this factor, either way.
      weight_only: share of its roofline that work done once, on weights, costs: next to nothing,
        but enough that a search prefers less of it, and small prepared arrays to large ones.
      least_share: least share of a node's time that is left when reads that other nodes pay for are
        subtracted.
      error_weight: seconds that a relative error of 1 costs.
      region_timeout: seconds that timing a region may take. A region that took longer than the
        default is stored as too slow and not tried again.

    Raises:
      ValueError: a value is out of its range; the message names it.
    """

    optimistic: float = 0.75
    fewest_samples: int = 4
    peak: float = 0.75
    ridge: float = 0.1
    most_change: float = 5.0
    weight_only: float = 1e-3
    least_share: float = 0.2
    error_weight: float = 0.0
    region_timeout: float = 30.0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("optimistic", 1e-3, 1.0),
            ("fewest_samples", 1, math.inf),
            ("peak", 0.0, 1.0),
            ("ridge", 0.0, math.inf),
            ("most_change", 1.0, math.inf),
            ("weight_only", 0.0, 1.0),
            ("least_share", 0.0, 1.0),
            ("error_weight", 0.0, math.inf),
            ("region_timeout", 0.1, math.inf),
        ):
            if not low <= getattr(self, name) <= high:
                value = getattr(self, name)
                raise ValueError(f"CostConfig.{name} is {value}, but must be from {low} to {high}")


DEFAULT = CostConfig()
