"""Types narrower than float32 in which the library multiplies, and the rounding to them.

In bfloat16 both operands are rounded. In int8 an array is a factor times integers, its levels: one
factor for an image, one for each feature of a kernel. In int16 there is one factor for each row
that is multiplied, and one for each column. Factors of images are chosen anew in each call, so no
value is clipped.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.libraries.base import LEAST_SCALE, LEVELS

LARGEST = 4095  # of levels in int16: sums of 128 products of two fit into 32 bits
_HALVINGS = 12  # of the interval in which the point is where levels are rounded up


def levels(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the levels of an array of float32, as float32, and their factor. An array that is not
    finite has none: it is returned as it is, with the factor 1.
    """
    largest = jnp.max(jnp.abs(x))
    is_finite = jnp.isfinite(largest)
    scale = jnp.where(is_finite, jnp.maximum(largest / LEVELS, LEAST_SCALE), 1.0)
    return jnp.where(is_finite, jnp.round(x / scale), x), scale


def rounded(x: jax.Array) -> jax.Array:
    """Return an array rounded to its levels."""
    found, scale = levels(x)
    return found * scale


def levels_along(x: Any, axes: Sequence[int]) -> tuple[Any, Any]:
    """Return the levels in int16, as float32, of an array of JAX or NumPy, and their factors, which
    differ along the other axes. Where these are not finite the array has none: it is returned as it
    is, with the factor 1.
    """
    xp = np if isinstance(x, np.ndarray) else jnp
    largest = xp.max(xp.abs(x), axis=tuple(axes), keepdims=True, initial=0)
    is_finite = xp.isfinite(largest)
    factors = xp.where(is_finite, xp.maximum(largest / LARGEST, LEAST_SCALE), 1)
    return xp.where(is_finite, xp.round(x * (1 / factors)), x), factors


def pairs(found: jax.Array) -> jax.Array:
    """Return levels [.., K, O] as pairs of int16 in int32 [.., ceil(K / 2), O], the first of two
    adjacent levels in the lower half.
    """
    *batch, k, n = found.shape
    found = jnp.pad(found.astype(jnp.int16), [*[(0, 0)] * len(batch), (0, k % 2), (0, 0)])
    split = found.reshape(*batch, -1, 2, n)
    return jax.lax.bitcast_convert_type(jnp.moveaxis(split, -2, -1), jnp.int32)


def kernel_levels(w: Any, most: int) -> tuple[Any, Any]:
    """Return the levels of a kernel [.., O] in int8, and the factors of its features [O].

    Each level is next to the exact one, above or below it, such that the errors of a feature add up
    to 0: after a rectifier all elements of an image are positive, and a mean error would add up.

    Args:
      w: of JAX or NumPy, as the results then are.
      most: the largest level; with less than 64 all levels are even, because the library halves
        them where a processor adds pairs of products in 16 bits.
    """
    doubled = 2 if most < 64 else 1
    xp = np if isinstance(w, np.ndarray) else jnp
    axes = tuple(range(w.ndim - 1))
    scale = xp.max(xp.abs(w), axis=axes) / most
    scale = xp.maximum(scale, LEAST_SCALE)
    exact = w / scale

    def halved(_: Any, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = bounds
        middle = (low + high) / 2
        too_small = xp.sum(exact - xp.round(exact + middle), axis=axes) > 0
        return xp.where(too_small, middle, low), xp.where(too_small, high, middle)

    bounds: Any = tuple(xp.full(scale.shape, x, xp.float32) for x in (-0.5, 0.5))
    if xp is np:
        bounds = functools.reduce(lambda b, n: halved(n, b), range(_HALVINGS), bounds)
    else:
        bounds = jax.lax.fori_loop(0, _HALVINGS, halved, bounds)
    found = xp.clip(xp.round(exact + sum(bounds) / 2), -most, most)
    return (doubled * found).astype(xp.int8), scale / doubled
