"""Winograd convolution: its matrices, and that it equals the direct convolution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xrl_jax.libraries.onednn import winograd


def test_the_matrices_of_two_results_are_those_of_the_paper_but_for_signs() -> None:
    """The reference is Lavin and Gray, equation 5."""
    image, kernel, result = (np.array(m) for m in winograd.matrices(2))
    np.testing.assert_array_equal(
        np.abs(image), [[1, 0, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 0, 1]]
    )
    np.testing.assert_array_equal(
        np.abs(kernel), [[1, 0, 0], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0, 0, 1]]
    )
    np.testing.assert_array_equal(np.abs(result), [[1, 1, 1, 0], [0, 1, 1, 1]])


@pytest.mark.parametrize("m", winograd.TILES)
def test_a_row_of_results_takes_one_product_for_each_point(m: int) -> None:
    image, kernel, result = (np.array(x) for x in winograd.matrices(m))
    d, g = np.arange(1.0, m + 3), np.array([1.0, 0.0, -2.0])
    products = (kernel @ g) * (image @ d)
    assert products.shape == (m + 2,)
    np.testing.assert_allclose(result @ products, d[:m] - 2 * d[2:], rtol=1e-12)


@pytest.mark.parametrize("m", winograd.TILES)
@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((1, 1), (1, 1)), ((2, 0), (0, 3))])
def test_it_is_the_convolution_whatever_hangs_over(m: int, padding: tuple) -> None:
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (2, 7, 8, 3), jnp.float64)
        w = jax.random.normal(jax.random.key(1), (5, 3, 3, 3), jnp.float64)
        layouts = ("NHWC", "OIHW", "NHWC")
        plain = lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=layouts)
        found = winograd.convolved(x, winograd.transformed(w, m), m, padding)
        np.testing.assert_allclose(found, plain, rtol=1e-9, atol=1e-9)


def test_a_tile_hangs_over_where_they_do_not_fit() -> None:
    assert [winograd.n_tiles(8, (1, 1), m) for m in (2, 3, 4)] == [4, 3, 2]
    assert winograd.n_tiles(7, (0, 0), 4) == 2  # five results
