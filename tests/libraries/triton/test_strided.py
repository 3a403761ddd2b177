"""Views of arrays: which elements of a flat array they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xrl_jax.libraries.triton.strided import Piece, View, moved, offset, row_major


def view_of(fn: Callable[[Any], Any], shape: tuple[int, ...]) -> View | None:
    closed = jax.make_jaxpr(fn)(jnp.zeros(shape))
    return moved(row_major(shape), closed.jaxpr.eqns)


def positions(view: View) -> np.ndarray:
    indices = np.indices(view.shape)
    return view.start + offset(view.axes, list(indices)) + np.zeros(view.shape, int)


def test_the_axes_of_a_matrix() -> None:
    assert row_major((2, 3)) == View(((Piece(2, 3),), (Piece(3, 1),)))


def test_an_axis_that_is_split_and_moved_has_two_pieces() -> None:
    def fn(x: Any) -> Any:
        return x.reshape(2, 3, 4).swapaxes(0, 1).reshape(6, 4)

    assert view_of(fn, (6, 4)) == View(((Piece(3, 4), Piece(2, 12)), (Piece(4, 1),)))


def test_a_slice_of_heads_starts_at_the_first() -> None:
    assert view_of(lambda x: x[:, 8:16], (2, 24)) == View(((Piece(2, 24),), (Piece(8, 1),)), 8)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.T,
        lambda x: x.reshape(4, 3, 4),
        lambda x: x.reshape(4, 3, 2, 2).transpose(2, 0, 3, 1)[:, 1:3],
        lambda x: lax.slice(x, (0, 1), (6, 8), (2, 3)),
        lambda x: lax.broadcast_in_dim(x, (6, 5, 8), (0, 2)).reshape(30, 8),
        lambda x: x.reshape(2, 3, 8).swapaxes(0, 1).reshape(6, 8)[2:4],
        lambda x: x[2:3].reshape(8)[None, :, None],
    ],
)
def test_positions_are_those_of_the_elements(fn: Callable[[Any], Any]) -> None:
    view = view_of(fn, (6, 8))
    assert view is not None
    np.testing.assert_array_equal(positions(view), fn(jnp.arange(48).reshape(6, 8)))


def test_what_cannot_be_split_evenly_is_no_view() -> None:
    assert view_of(lambda x: x.T.reshape(8, 3), (4, 6)) is None
