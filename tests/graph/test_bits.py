"""Boolean flags, packed into words, and the indices of the first that are set."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.graph.bits import first_set, words_of


def flags(*at: int, size: int = 96) -> jax.Array:
    return jnp.zeros(size, bool).at[jnp.array(at, int)].set(True)


def test_the_first_flag_is_the_lowest_bit_of_its_word() -> None:
    assert words_of(flags(0, 1, 33, 63, size=64)).tolist() == [3, 0x80000002]


@pytest.mark.parametrize(
    ("at", "found"),
    [
        ((), [0, 0, 0]),
        ((5,), [5, 0, 0]),
        ((0, 31, 32, 95), [0, 31, 32]),
        ((64, 70, 95), [64, 70, 95]),
    ],
)
def test_first_set_is_padded_with_0(at: tuple[int, ...], found: list[int]):
    assert first_set(flags(*at), 3).tolist() == found


def test_first_set_equals_nonzero() -> None:
    some = np.random.default_rng(0).random((8, 256)) < [[0.5]] * 4 + [[0.02]] * 4
    expected = [np.flatnonzero(row)[:7] for row in some]
    found = jax.vmap(lambda row: first_set(row, 7))(jnp.asarray(some))
    for ours, theirs in zip(found.tolist(), expected, strict=True):
        assert ours == [*theirs, *[0] * (7 - len(theirs))]
