"""Bit masks: packing flags into words, and finding the positions of the few that are set."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def words_of(flags: jax.Array) -> jax.Array:
    """Pack flags [32 W] into words [W]."""
    bits = flags.reshape(-1, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)
    return jnp.sum(bits, axis=1, dtype=jnp.uint32)


def first_set(flags: jax.Array, size: int) -> jax.Array:
    """Return the positions of the first `size` set flags of [32 W], padded by 0.

    Does what `jnp.nonzero` does when given a size, but by sums over words and without scattering,
    in a twelfth of the time for 2,048 flags on a CPU.
    """
    words = words_of(flags)
    counts = jax.lax.population_count(words).astype(jnp.int32)
    total = jnp.cumsum(counts)
    before = jnp.arange(size, dtype=jnp.int32)
    word = jnp.sum(total <= before[:, None], axis=1)
    exists = word < len(words)
    word = jnp.minimum(word, len(words) - 1)
    bit = _nth_bit(words[word], before + 1 - (total - counts)[word])
    return jnp.where(exists, 32 * word + bit, 0).astype(jnp.int32)


def set_bits_from(
    words: jax.Array, first: jax.Array, capacity: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return row and bit of the set bits of `words` [N, W] with ranks first to first + capacity - 1
    (from 0), and which of them exist.

    Bit counts are accumulated per word, never per bit: a table of N x 32 W flags would take most
    of the time of a rewriting step.
    """
    return set_bits_at(words, first + jnp.arange(capacity, dtype=jnp.int32))


def set_bits_at(words: jax.Array, ranks: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return row and bit of the set bits of `words` [N, W] with these ranks, and which exist."""
    counts = jax.lax.population_count(words).astype(jnp.int32).reshape(-1)
    total = jnp.cumsum(counts)
    wanted = ranks + 1
    exists = (ranks >= 0) & (wanted <= total[-1])
    word = jnp.where(exists, jnp.searchsorted(total, wanted, side="left").astype(jnp.int32), 0)
    bit = _nth_bit(words.reshape(-1)[word], wanted - (total[word] - counts[word]))
    width = words.shape[1]
    return word // width, (word % width) * 32 + bit, exists


def _nth_bit(words: jax.Array, n: jax.Array) -> jax.Array:
    """Return the position of the n-th set bit (from 1) of each word, by bisection."""
    at = jnp.zeros(words.shape, jnp.int32)
    for width in (16, 8, 4, 2, 1):
        half = (words >> at.astype(jnp.uint32)) & jnp.uint32((1 << width) - 1)
        below = jax.lax.population_count(half).astype(jnp.int32)
        at += jnp.where(n > below, width, 0)
        n -= jnp.where(n > below, below, 0)
    return at
