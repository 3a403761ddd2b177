"""Winograd convolution: its matrices, and that it equals the direct convolution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xrl_jax.libraries.onednn import winograd


def test_matrices_for_two_results_equal_the_papers_up_to_signs() -> None:
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
def test_m_results_take_m_plus_two_products(m: int) -> None:
    image, kernel, result = (np.array(x) for x in winograd.matrices(m))
    d, g = np.arange(1.0, m + 3), np.array([1.0, 0.0, -2.0])
    products = (kernel @ g) * (image @ d)
    assert products.shape == (m + 2,)
    np.testing.assert_allclose(result @ products, d[:m] - 2 * d[2:], rtol=1e-12)


@pytest.mark.parametrize("m", winograd.TILES)
@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((1, 1), (1, 1)), ((2, 0), (0, 3))])
def test_it_equals_the_convolution_for_any_tile_and_padding(m: int, padding: tuple) -> None:
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(0), (2, 7, 8, 3), jnp.float64)
        w = jax.random.normal(jax.random.key(1), (5, 3, 3, 3), jnp.float64)
        layouts = ("NHWC", "OIHW", "NHWC")
        plain = lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=layouts)
        found = winograd.convolved(x, winograd.transformed(w, m), m, padding)
        np.testing.assert_allclose(found, plain, rtol=1e-9, atol=1e-9)


def test_the_number_of_tiles_is_rounded_up() -> None:
    assert [winograd.n_tiles(8, (1, 1), m) for m in (2, 3, 4)] == [4, 3, 2]
    assert winograd.n_tiles(7, (0, 0), 4) == 2  # five results
