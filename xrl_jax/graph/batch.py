"""What unbatched code may know of the batch that it is mapped over."""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.custom_batching.custom_vmap
def largest_of_batch(n: jax.Array) -> jax.Array:
    """A number; under vmap the largest of the batch, which all share.

    For bounds of loops: where these are not each one's own, no turn has to leave those as they are
    that need no more, which would copy all that the loop carries.
    """
    return n


@largest_of_batch.def_vmap
def _(size: int, batched: list[bool], n: jax.Array) -> tuple[jax.Array, bool]:
    return largest_of_batch(jnp.max(n)), False  # which may be part of another batch
