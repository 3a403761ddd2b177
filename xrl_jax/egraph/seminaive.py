"""Semi-naive evaluation: matches that were applied before are not evaluated again.

A match whose e-nodes, and whatever conditions see of them, are as they were when its rule was last
applied would add nothing: its new e-nodes are there, and equal to its root. Databases evaluate
recursive queries like this; egglog does so with e-graphs (Zhang et al., PLDI 2023).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.egraph.arrays import EGraph


class Stamps(NamedTuple):
    """When e-nodes changed and variants were applied: numbers of iterations."""

    changed: jax.Array  # [N] int32, the iteration before which each e-node was last changed
    applied: jax.Array  # [V] int32, in which each variant was applied at all its matches; or -1
    now: jax.Array  # int32, the next iteration


def no_stamps(bucket: int, n_variants: int) -> Stamps:
    """Return the stamps of an e-graph to which nothing was applied yet."""
    never = jnp.full(n_variants, -1, jnp.int32)
    return Stamps(jnp.zeros(bucket, jnp.int32), never, jnp.int32(0))


def grown(stamps: Stamps, bucket: int) -> Stamps:
    """Return the stamps of the same e-graph in a larger bucket."""
    more = bucket - stamps.changed.shape[0]
    return stamps._replace(changed=jnp.pad(stamps.changed, (0, more)))


def is_new(stamps: Stamps, variant: jax.Array, slots: jax.Array) -> jax.Array:
    """Return whether matches [C] have not been applied yet.

    Args:
      variant: [C].
      slots: [C, B], e-nodes that are matched, and classes of variables.
    """
    return jnp.max(stamps.changed[slots], axis=1) > stamps.applied[variant]


def after(stamps: Stamps, changed: jax.Array, applied: jax.Array) -> Stamps:
    """Return the stamps after an iteration.

    Args:
      changed: [N] bool, e-nodes that are new or that conditions see differently.
      applied: [V] bool, variants that were applied at all their matches.
    """
    return Stamps(
        jnp.where(changed, stamps.now + 1, stamps.changed),
        jnp.where(applied, stamps.now, stamps.applied),
        stamps.now + 1,
    )


def differing(old: EGraph, new: EGraph) -> jax.Array:
    """Return which e-nodes of an e-graph differ from those in the same slots of another one [N]."""
    same = (old.op == new.op) & (old.parent == new.parent)
    return ~(same & jnp.all(old.args == new.args, axis=1) & jnp.all(old.data == new.data, axis=1))
