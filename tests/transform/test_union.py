"""Room for rewrites in the union of a program's graphs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.program.program import Program
from xrl_jax.transform.union import united, united_bucket, united_size


def convolutions(n: int) -> Program:
    """Return a chain of n convolutions of images of one pixel, with one kernel."""
    x, w = jnp.ones((1, 2, 1, 1)), jnp.ones((2, 2, 1, 1))

    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(n):
            x = lax.conv(x, w, (1, 1), "VALID")
        return x

    return from_jax(chain, x, w, weights=(1,), fold=False)


@pytest.mark.parametrize(("n", "bucket"), [(9, 64), (20, 128), (31, 128), (32, 256)])
def test_the_bucket_has_room_for_transposes_of_every_convolution(n: int, bucket: int) -> None:
    """Slots are needed for n + 2 nodes, 3 n transposes, and slot 0, which is never used."""
    program = convolutions(n)
    assert united_size(program) == n + 2
    assert united_bucket(program) == bucket
    assert len(united(program)[0].nodes.op) == bucket


def batch_norms(n: int) -> Program:
    """Return a chain of convolutions, each with a shift and a scale that can be folded into its
    kernel.
    """
    x, w, v = jnp.ones((1, 2, 1, 1)), jnp.ones((2, 2, 1, 1)), jnp.ones((1, 2, 1, 1))

    def chain(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(n):
            x = (lax.conv(x, w, (1, 1), "VALID") - v) * v
        return x

    return from_jax(chain, x, w, v, weights=(1, 2), fold=False)


@pytest.mark.parametrize(("n", "bucket"), [(13, 128), (14, 256)])
def test_the_bucket_has_room_for_the_remains_of_folded_batch_norms(n: int, bucket: int) -> None:
    """Slots are needed for 3 n + 3 nodes, 3 n transposes, 2 n nodes for shifts and n for scales."""
    program = batch_norms(n)
    assert united_size(program) == 3 * n + 3
    assert united_bucket(program) == bucket


def test_a_given_bucket_grows_if_it_is_too_small() -> None:
    program = convolutions(41)
    assert len(united(program, bucket=64)[0].nodes.op) == 128
    assert len(united(program, bucket=512)[0].nodes.op) == 512
