"""Arguments on which a result is checked: the example's, and some with other values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.backends.domain import bounds_of
from xrl_jax.measure.inputs import random_input
from xrl_jax.program.program import Program, weakened

_ZEROS, _NEGATIVE, _OUTLIERS = 0.1, 0.5, 0.01  # shares of the elements of a sample
_SPECIAL = (np.nan, np.inf, -np.inf)
N_USUAL = 2  # the first of the samples, whose values are like the example's


def concrete(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """Return flat arguments as device arrays, random where only a shape is known."""
    leaves = []
    for given, aval in zip(arguments, program.in_avals, strict=True):
        known = not isinstance(given, jax.ShapeDtypeStruct) and hasattr(given, "shape")
        if known or isinstance(given, (bool, int, float, complex)):
            leaf = jax.device_put(given) if known else jnp.asarray(given, aval.dtype)
        else:
            leaf = random_input(aval)
        # A program made for a Python scalar accepts only weakly typed arrays for it.
        leaves.append(weakened(leaf) if getattr(aval, "weak_type", False) else leaf)
    return leaves


def samples(program: Program, leaves: Sequence[Any]) -> list[list[Any]]:
    """Return the argument lists to check on: the example, and the example with its real inputs
    drawn again, four times: at their own scale; with zeros, negative values and a few that are
    several times as large; as large as the domain allows; with NaN and infinities. Only the example
    where no input is real, e.g. where all are tokens.
    """
    bounds = bounds_of(program, leaves)
    drawn: list[list[Any]] = []
    for i, (x, w) in enumerate(zip(leaves, program.weights, strict=True)):
        if w or not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
            continue
        drawn = drawn or [list(leaves) for _ in range(4)]
        host = np.asarray(x, np.float64)
        finite = host[np.isfinite(host)]
        middle, scale = (finite.mean(), finite.std()) if finite.size > 1 else (0.0, 0.0)
        redrawn = middle + (scale or 1.0) * np.asarray(
            random_input(jax.ShapeDtypeStruct(x.shape, np.float32), seed=i + 1)
        )
        for sample, values in zip(drawn, _kinds(redrawn, bounds[i] or 1.0, i), strict=True):
            leaf = jnp.asarray(values, x.dtype)
            # With a type that is not weak, the original would run on it.
            sample[i] = weakened(leaf) if getattr(x, "weak_type", False) else leaf
    return [list(leaves), *drawn]


def _kinds(drawn: np.ndarray, bound: float, seed: int) -> list[np.ndarray]:
    """Return four variants of the values: as drawn; mixed with zeros, other signs and large values;
    scaled to the bound; with special values in a few places.
    """
    rng = np.random.default_rng(seed)
    mixed = np.where(rng.random(drawn.shape) < _ZEROS, 0.0, drawn)
    mixed = np.where(rng.random(drawn.shape) < _NEGATIVE, -mixed, mixed)
    mixed = np.where(rng.random(drawn.shape) < _OUTLIERS, bound / 2 * np.sign(mixed), mixed)
    largest = np.max(np.abs(drawn))
    special = drawn.copy()
    places = rng.permutation(drawn.size)[: len(_SPECIAL)]
    special.reshape(-1)[places] = _SPECIAL[: len(places)]
    return [drawn, mixed, drawn * (bound / largest if largest > 0 else 1.0), special]
