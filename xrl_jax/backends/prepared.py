"""Prepared weights: those that a user holds, and those of the last call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PreparedWeights:
    """Weights and the values computed from them; a pytree.

    Attributes:
      values: what the optimised call takes in place of the weights.
      weights: the flat weights themselves, for derivatives.
    """

    values: tuple[Any, ...]
    weights: tuple[Any, ...]


@dataclass(frozen=True)
class LastWeights:
    """The weights of the last call, referenced so that no other array takes their id, with their
    prepared values and the function that runs on these.
    """

    weights: tuple[Any, ...]
    values: tuple[Any, ...]
    run: Callable[..., list[Any]]  # run(inputs)
