"""`largest_of_batch`: the largest value of a batch, for code written without a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xrl_jax.graph.batch import largest_of_batch


def doubled(n: jax.Array) -> jax.Array:
    """Return 2 to the power of the largest value of the batch."""
    return jax.lax.fori_loop(0, largest_of_batch(n), lambda _, x: 2 * x, jnp.int32(1))


def test_without_a_batch_the_value_itself_is_returned() -> None:
    assert doubled(jnp.int32(3)) == 8


def test_every_element_of_a_batch_gets_the_largest_value() -> None:
    assert jax.jit(jax.vmap(doubled))(jnp.array([3, 0, 5])).tolist() == [32, 32, 32]


def test_nested_batches_share_the_largest_of_all() -> None:
    assert jax.vmap(jax.vmap(doubled))(jnp.array([[1, 2], [4, 0]])).tolist() == [[16, 16]] * 2


def test_a_value_that_is_not_batched_is_unchanged() -> None:
    both = jax.vmap(lambda x, n: x + largest_of_batch(n), in_axes=(0, None))
    assert both(jnp.array([10, 20]), jnp.int32(3)).tolist() == [13, 23]
