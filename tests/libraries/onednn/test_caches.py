"""Attention of one new token to a cache of keys and values: the cache is read where it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.libraries.onednn.calls import RNG, assert_computes, equations, hoisted
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.kernels import kernel_p
from xrl_jax.libraries.onednn.spec import Dot

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")

PAST, HEADS, SIZE = 70, 2, 32
W = jnp.asarray(RNG.standard_normal((HEADS * SIZE, 3 * HEADS * SIZE)) / 8, jnp.float32)
X = jnp.asarray(RNG.standard_normal((1, HEADS * SIZE)), jnp.float32)
CACHE = jnp.asarray(RNG.standard_normal((3, 2, HEADS, PAST, SIZE)), jnp.float32)


def attention(w, x, cache):
    """Attend to the keys and values of layer 1 of the cache [layers, 2, heads, past, size]."""
    y = kernel_p.bind(x, w, op=Dot(False, False)).reshape(3, HEADS, 1, SIZE)
    past_keys, past_values = cache[1, 0], cache[1, 1]
    keys = jnp.concatenate([past_keys, y[1]], axis=1)
    values = jnp.concatenate([past_values, y[2]], axis=1)
    scores = kernel_p.bind(y[0], keys, op=Dot(False, True))
    return kernel_p.bind(jax.nn.softmax(scores, axis=-1), values, op=Dot(False, False))


def test_the_cache_is_sliced_inside_the_call() -> None:
    found = equations(hoisted(attention, W, X, CACHE, weights=1), X, CACHE)
    assert [f for f in found if f in ("slice", "concatenate", "dynamic_slice")] == []


def test_keys_and_values_are_not_joined() -> None:
    """The scores of both parts are joined instead, and their products with the values are added."""
    (call,) = [
        f for f in equations(hoisted(attention, W, X, CACHE, weights=1), X, CACHE) if "Dot" in f
    ]
    assert call.count("Concat") == 1 and call.count("Dot") == 5


def test_it_computes_attention() -> None:
    assert_computes(attention, W, X, CACHE, weights=1)


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("axis", [1, 2])
def test_a_product_with_a_concatenation(rows: int, transposed: bool, axis: int) -> None:
    """Along the contracted axis and along the other one, with few rows and with many."""

    def fn(w, x, a, b):
        x = kernel_p.bind(x, w, op=Dot(False, False)).reshape(2, rows, -1)
        made = kernel_p.bind(b.reshape(-1, b.shape[-1]), jnp.eye(b.shape[-1]), op=Dot(False, False))
        joined = lax.concatenate([a, made.reshape(b.shape)], axis)
        return kernel_p.bind(x, joined, op=Dot(False, transposed))

    shape, more = [2, 64, 48], [2, 64, 48]
    shape[axis], more[axis] = shape[axis] - 3, 3
    k = 48 if transposed else 64
    a, b = (jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in (shape, more))
    w = jnp.asarray(RNG.standard_normal((k, k)) / 8, jnp.float32)
    x = jnp.asarray(RNG.standard_normal((2 * rows, k)), jnp.float32)
    found = "+".join(equations(hoisted(fn, w, x, a, b, weights=1), x, a, b))
    assert found.count("Dot") == (4 if rows <= 16 else 3)
    assert_computes(fn, w, x, a, b, weights=1)


def test_a_slice_that_others_read_too_is_left_to_xla() -> None:
    def fn(w, x, cache):
        keys = cache[1, 0]
        y = kernel_p.bind(x, w, op=Dot(False, False)).reshape(3, HEADS, 1, SIZE)
        return kernel_p.bind(y[0], keys, op=Dot(False, True)), keys + 1.0

    assert "slice" in equations(hoisted(fn, W, X, CACHE, weights=1), X, CACHE)
    assert_computes(fn, W, X, CACHE, weights=1)


def test_strided_slices_are_read_in_place_as_well() -> None:
    def fn(w, x, cache):
        y = kernel_p.bind(x, w, op=Dot(False, False)).reshape(3, HEADS, 1, SIZE)
        return kernel_p.bind(y[0], cache[2, 1, :, 3::2], op=Dot(False, True))

    assert_computes(fn, W, X, CACHE, weights=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_cache_is_converted_inside_the_call(dtype: str) -> None:
    def fn(w, x, cache):
        return attention(w, x, cache.astype(jnp.float32))

    def layer_by_layer(w, x, cache):
        return attention(w, x, jnp.stack([each.astype(jnp.float32) for each in cache]))

    narrow = CACHE.astype(dtype)
    names = equations(hoisted(fn, W, X, narrow, weights=1), X, narrow)
    assert any("Widen" in name for name in names) and "convert_element_type" not in names
    assert_computes(fn, W, X, narrow, weights=1)
    assert_computes(layer_by_layer, W, X, narrow, weights=1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("n", [16, 17, 4096 * 16 + 5])
def test_conversion_keeps_every_value(dtype: str, n: int) -> None:
    """NaN, infinities, zeros of both signs, and numbers below the smallest normal one of float16;
    those of bfloat16 are flushed, as XLA does.
    """

    def fn(w, x, y):
        return kernel_p.bind(x, w, op=Dot(False, False)) + y[2:].astype(jnp.float32)

    special = [np.nan, np.inf, -np.inf, -0.0, 0.0, 6e-8 if dtype == "float16" else 1e-3, 3.0]
    y = jnp.asarray(np.resize(special, (3, n)), dtype)
    w, x = jnp.zeros((4, n)), jnp.ones((1, 4))
    parts = hoisted(fn, w, x, y, weights=1)
    assert any("Widen" in name for name in equations(parts, x, y))
    (found,) = jax.jit(parts.call)(parts.prepare([w]), [x, y])
    np.testing.assert_array_equal(found, y[2:].astype(jnp.float32))


def test_columns_of_a_narrow_array_are_left_to_xla() -> None:
    """They are not adjacent in memory."""

    def fn(w, x, y):
        return kernel_p.bind(x, w, op=Dot(False, False)) + y[:, 1:].astype(jnp.float32)

    y = jnp.asarray(RNG.standard_normal((3, 33)), jnp.bfloat16)
    w, x = jnp.ones((4, 32)), jnp.ones((3, 4))
    assert "convert_element_type" in equations(hoisted(fn, w, x, y, weights=1), x, y)
    assert_computes(fn, w, x, y, weights=1)
