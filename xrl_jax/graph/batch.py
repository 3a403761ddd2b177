"""Values shared by a whole batch, for code that `vmap` maps over its elements."""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.custom_batching.custom_vmap
def largest_of_batch(n: jax.Array) -> jax.Array:
    """Return the scalar `n`; under vmap, the maximum over the batch, shared by all elements.

    Meant for loop bounds. With a bound per element, each iteration under vmap has to preserve the
    elements that have finished, which copies the whole carry; a shared bound avoids this.
    """
    return n


@largest_of_batch.def_vmap
def _(size: int, batched: list[bool], n: jax.Array) -> tuple[jax.Array, bool]:
    return largest_of_batch(jnp.max(n)), False  # recursive, as the batch may be part of another
