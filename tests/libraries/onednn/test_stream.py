"""Products of few rows with a weight: generated code that reads the weight in strips."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.libraries.onednn import kernels
from xrl_jax.libraries.onednn.blocked import Blocked
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.kernels import kernel, single_op
from xrl_jax.libraries.onednn.plan import plan
from xrl_jax.libraries.onednn.spec import RELU, Dot, Epilogue
from xrl_jax.libraries.onednn.stream import MOST_ROWS, Streamed

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")


def arrays(rows: int, k: int, n: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((rows, k), (k, n)))
    return x, w


@pytest.mark.parametrize("rows", [1, 2, 5, MOST_ROWS])
@pytest.mark.parametrize(("k", "n"), [(1100, 16), (700, 100), (64, 515), (30, 2048)])
def test_it_equals_the_product_for_any_size(rows: int, k: int, n: int) -> None:
    x, w = arrays(rows, k, n)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    for op, weight in ((Dot(False, False), w), (Dot(False, True), w.T)):
        y = jax.jit(lambda x, w, op=op: kernel(op, x, w))(x, weight)
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_a_transposed_left_argument_is_supported() -> None:
    x, w = arrays(3, 200, 100)
    y = jax.jit(lambda x, w: kernel(Dot(True, False), x, w))(x.T, w)
    np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)


def test_the_epilogue_is_applied() -> None:
    x, w = arrays(2, 300, 75)
    bias, addend = jnp.linspace(-5.0, 5.0, 75), jnp.linspace(-9.0, 9.0, 150).reshape(2, 75)
    op = Dot(False, False, Epilogue(bias=True, addend=True, clip=RELU))
    y = jax.jit(lambda *a: kernel(op, *a))(x, w, bias[None], addend)
    np.testing.assert_allclose(y, jnp.maximum(x @ w + bias + addend, 0), rtol=1e-4, atol=1e-4)


def test_long_sums_are_accumulated_in_chunks() -> None:
    """A single accumulator over 2^17 terms of 0.1 would be off by 0.1 %."""
    x, w = jnp.full((1, 1 << 17), 0.1), jnp.ones((1 << 17, 1))
    y = jax.jit(lambda x, w: kernel(Dot(False, False), x, w))(x, w)
    assert float(y[0, 0]) == pytest.approx(0.1 * (1 << 17), rel=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("rows", [1, MOST_ROWS, 40])
@pytest.mark.parametrize(("k", "n"), [(700, 100), (64, 515), (8, 5)])
def test_a_weight_is_read_in_its_own_type(dtype: str, rows: int, k: int, n: int) -> None:
    """The factors are the same numbers, so only the order of the sums differs."""
    x, w = arrays(rows, k, n)
    w = (100 * w).astype(dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    for transposed, weight in ((False, w), (True, w.T)):
        op = Dot(False, transposed, right=dtype)
        y = jax.jit(lambda x, w, op=op: kernel(op, x, w))(x, weight)
        assert y.dtype == jnp.float32
        assert kernels.is_possible(single_op(op, [x.shape, weight.shape], y.shape))
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_special_values_of_a_narrow_weight_are_kept(dtype: str) -> None:
    w = np.zeros((1024, 16), np.float32)
    w[5, :4] = np.nan, np.inf, -np.inf, -0.0
    x, weight = jnp.ones((1, 1024)), jnp.asarray(w, dtype)
    y = jax.jit(lambda x, w: kernel(Dot(False, False, right=dtype), x, w))(x, weight)
    np.testing.assert_array_equal(y[0, :5], [np.nan, np.inf, -np.inf, 0, 0])


def test_the_smallest_numbers_of_float16_are_kept() -> None:
    x, w = jnp.ones((1, 1024)), jnp.full((1024, 16), 6e-8, jnp.float16)
    y = jax.jit(lambda x, w: kernel(Dot(False, False, right="float16"), x, w))(x, w)
    np.testing.assert_allclose(y, 1024 * 2.0**-24, rtol=1e-6)


def test_a_product_with_a_narrow_weight_has_derivatives_and_batches() -> None:
    x, w = arrays(2, 256, 64)
    narrow = w.astype(jnp.bfloat16)

    def total(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(kernel(Dot(False, False, right="bfloat16"), x, w) ** 2)

    by_x = jax.grad(total)(x, narrow)
    np.testing.assert_allclose(by_x, 2 * (x @ narrow) @ narrow.T.astype(jnp.float32), rtol=1e-3)
    many = jax.vmap(lambda x: total(x, narrow))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(many, [total(x, narrow), 4 * total(x, narrow)], rtol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_packed_weight_can_be_unpacked(transposed: bool) -> None:
    x, w = arrays(1, 300, 75)
    weight = w.T if transposed else w
    part = single_op(Dot(False, transposed), [x.shape, weight.shape], (1, 75))
    packed = jax.jit(lambda w: kernels.pack(part, 1, w))(weight)
    assert packed.shape == (5 * 300 * 16,)  # five strips of 16 columns
    again = jax.jit(lambda p: kernels.unpack_p.bind(p, part=part, index=1))(packed)
    np.testing.assert_array_equal(again, weight)


def test_a_packed_weight_is_as_narrow_as_before() -> None:
    part = single_op(Dot(False, False, right="bfloat16"), [(1, 300), (300, 75)], (1, 75))
    weight = arrays(1, 300, 75)[1].astype(jnp.bfloat16)
    packed = jax.jit(lambda w: kernels.pack(part, 1, w))(weight)
    assert packed.nbytes == 2 * 5 * 300 * 16
    again = jax.jit(lambda p: kernels.unpack_p.bind(p, part=part, index=1))(packed)
    np.testing.assert_array_equal(again, weight)


def test_only_products_with_few_rows_are_streamed() -> None:
    lib = library()
    assert lib is not None

    def steps(rows: int) -> list[type]:
        part = single_op(Dot(False, False), [(rows, 256), (256, 64)], (rows, 64))
        return [type(step.primitive) for step in plan(lib, part).steps]

    assert steps(1) == [Streamed]
    assert steps(MOST_ROWS + 1) == [Blocked]
