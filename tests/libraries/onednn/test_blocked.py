"""Products of many rows with a weight: generated code that works in blocks that fit the caches."""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.libraries.onednn.blocked import Blocked, kernel_of
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.flow import STRIP
from xrl_jax.libraries.onednn.kernels import kernel
from xrl_jax.libraries.onednn.machine_code import addresses, module
from xrl_jax.libraries.onednn.spec import RELU, Dot, Epilogue

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")

# Full tiles and a partial one, one group of tiles and several; one depth and several, with a
# remainder that is not unrolled; whole strips and a partial one; work divided by rows and by
# strips.
ROWS = [9, 12, 200, 1000]
SIZES = [(256, 64), (700, 96), (515, 75), (1030, 40)]


def arrays(rows: int, k: int, n: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((rows, k), (k, n)))
    return x, w


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_it_equals_the_product_for_any_size(rows: int, k: int, n: int) -> None:
    x, w = arrays(rows, k, n)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    for op, args in (
        (Dot(False, False), (x, w)),
        (Dot(True, False), (x.T, w)),
        (Dot(False, True), (x, w.T)),
    ):
        y = jax.jit(lambda x, w, op=op: kernel(op, x, w))(*args)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_the_epilogue_is_applied_after_the_last_terms() -> None:
    x, w = arrays(20, 600, 75)
    bias, addend = jnp.linspace(-5.0, 5.0, 75), jnp.linspace(-9.0, 9.0, 1500).reshape(20, 75)
    op = Dot(False, False, Epilogue(bias=True, addend=True, clip=RELU))
    y = jax.jit(lambda *a: kernel(op, *a))(x, w, bias[None], addend)
    np.testing.assert_allclose(y, jnp.maximum(x @ w + bias + addend, 0), rtol=1e-4, atol=1e-4)


def test_nan_and_infinities_stay_in_their_rows() -> None:
    x, w = arrays(20, 600, 75)
    x = x.at[3, 5].set(jnp.nan).at[7, 599].set(jnp.inf)
    op = Dot(False, False, Epilogue(clip=RELU))
    y = np.asarray(jax.jit(lambda *a: kernel(op, *a))(x, w))
    assert np.isnan(y[3]).all()
    np.testing.assert_array_equal(y[7], np.where(np.asarray(w[599]) > 0, np.inf, 0.0))
    assert np.isfinite(np.delete(y, [3, 7], axis=0)).all()


def test_tiles_of_wide_registers_compute_the_same() -> None:
    """Registers of 16 elements, which this processor may lack; the compiler then uses two registers
    for each.
    """
    x, w = (np.asarray(a) for a in arrays(31, 300, 48))
    y = np.full((31, 48), np.nan, np.float32)
    strips = np.ascontiguousarray(w.reshape(300, 3, STRIP).transpose(1, 0, 2))
    what = Blocked(31, 300, 48, False, Epilogue(), lanes=16)
    (address,) = addresses(module(kernel_of, what, "wide", None), "wide")
    table = (ctypes.c_void_p * 3)(x.ctypes.data, strips.ctypes.data, y.ctypes.data)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(table)
    np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)
