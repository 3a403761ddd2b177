"""Fusion within a call: operations that its kernels compute, and copies that it avoids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.libraries.onednn.calls import (
    IMAGE,
    KERNEL,
    POINTWISE,
    RNG,
    assert_computes,
    conv,
    equations,
    hoisted,
)
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.kernels import kernel_p
from xrl_jax.libraries.onednn.spec import RELU, Clip, Conv, Dot, Epilogue

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")


def test_epilogues_with_features_first_are_merged_into_the_kernel() -> None:
    """With features first, a bias and a rectifier are merged into one kernel, and a residual,
    itself the result of such a kernel, and a rectifier into the next.
    """

    def first(y):
        return jnp.transpose(y, (0, 3, 1, 2))

    def last(y):
        return jnp.transpose(y, (0, 2, 3, 1))

    def fn(w, b, x):
        y = lax.max(first(conv(x, w)) + b[:, None, None], 0.0)
        z = lax.max(first(conv(last(y), w)) + y, 0.0)
        return conv(last(z), w)

    args = (POINTWISE, jnp.arange(16.0, dtype=jnp.float32) - 8, IMAGE)
    *_, found = equations(hoisted(fn, *args, weights=2), IMAGE)
    assert found == "Reshape+Conv+Transpose+Transpose+Conv+Transpose+Transpose+Conv"
    assert_computes(fn, *args, weights=2)


def test_a_bias_is_merged_across_a_reshape_and_a_transpose() -> None:
    """The result is reshaped to two images of 2 x 16 pixels, then transposed to features first."""

    def fn(w, b, x):
        y = jnp.transpose(conv(x, w).reshape(2, 2, 16, 16), (0, 3, 1, 2)) + b[:, None, None]
        return conv(jnp.transpose(y, (0, 2, 3, 1)).reshape(1, 8, 8, 16), w)

    args = (POINTWISE, jnp.arange(16.0, dtype=jnp.float32), IMAGE)
    *_, found = equations(hoisted(fn, *args, weights=2), IMAGE)
    assert found == "Reshape+Conv+Reshape+Transpose+Transpose+Reshape+Conv"
    assert_computes(fn, *args, weights=2)


def test_one_element_per_row_is_not_merged_as_a_bias() -> None:
    """With features first, an array that is broadcast along the last axis has one element per row
    of pixels, not per feature.
    """

    def fn(w, b, x):
        y = jnp.transpose(conv(x, w), (0, 3, 1, 2)) + b[:, None]
        return conv(jnp.transpose(y, (0, 2, 3, 1)), w)

    args = (POINTWISE, jnp.arange(8.0, dtype=jnp.float32), IMAGE)
    *_, found = equations(hoisted(fn, *args, weights=2), IMAGE)
    assert found == "Conv+Transpose+Reshape+Binary+Transpose+Conv"
    assert_computes(fn, *args, weights=2)


def test_a_bias_is_merged_into_the_kernel() -> None:
    fn = lambda w, b, x: conv(conv(x, w) + b, w)  # noqa: E731
    b = jnp.linspace(-1, 1, 16)
    parts = hoisted(fn, POINTWISE, b, IMAGE, weights=2)
    assert equations(parts, IMAGE) == ["Conv+Conv"]
    assert_computes(fn, POINTWISE, b, IMAGE, weights=2)


def test_two_biases_are_merged_into_one() -> None:
    """Rewriting a folded mean and shift leaves two biases, here with a residual between them and a
    rectifier after them. All become part of the kernel. The biases are weights, so that their sum
    is computed before the call.
    """
    fn = lambda w, b, c, x: conv(lax.max(conv(x, w) + b + x + c, 0.0), w)  # noqa: E731
    args = (POINTWISE, jnp.linspace(-1, 1, 16), jnp.linspace(0, 3, 16), IMAGE)
    parts = hoisted(fn, *args, weights=3)
    assert equations(parts, IMAGE) == ["Conv+Conv"]
    assert_computes(fn, *args, weights=3)


@pytest.mark.parametrize("addend", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("clip", [None, RELU, Clip(0.0, 1.5), Clip(None, 0.5)])
def test_epilogues(bias: bool, addend: bool, clip: Clip | None) -> None:
    after = Epilogue(bias, addend, clip)
    more = [jnp.linspace(-3, 3, 16)] * bias + [-IMAGE] * addend
    for op, w in (
        (Conv((1, 1), ((1, 1), (1, 1)), (1, 1), 1, after), KERNEL),
        (Conv((1, 1), ((1, 1), (1, 1)), (1, 1), 4, after), KERNEL[:, :, :4]),
    ):
        fn = lambda w, *a, op=op: kernel_p.bind(a[0], w, *a[1:], op=op)  # noqa: E731
        assert_computes(fn, w, IMAGE, *more, weights=1)
    rows = [m.reshape(1, 16) if m.ndim == 1 else m.reshape(64, 16) for m in more]
    fn = lambda w, *a: kernel_p.bind(a[0], w, *a[1:], op=Dot(False, True, after))  # noqa: E731
    assert_computes(fn, POINTWISE[0, 0], IMAGE.reshape(64, 16), *rows, weights=1)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_column_of_pixels_is_convolved_as_a_row(groups: int) -> None:
    after = Epilogue(bias=True, addend=True, clip=RELU)
    op = Conv((2, 1), ((1, 2), (0, 0)), (2, 1), groups, after)
    x = jnp.asarray(RNG.standard_normal((2, 20, 1, 16)), jnp.float32)
    w = jnp.asarray(RNG.standard_normal((3, 1, 16 // groups, 24)), jnp.float32)
    bias, addend = jnp.linspace(-3, 3, 24), jnp.linspace(-2, 2, 2 * 10 * 24).reshape(2, 10, 1, 24)
    fn = lambda w, *a: kernel_p.bind(a[0], w, *a[1:], op=op)  # noqa: E731
    assert_computes(fn, w, x, bias, addend, weights=1)


def test_slices_of_a_product_stay_in_one_call() -> None:
    """Queries, keys and values are slices of one product; the first two rows of the attention's
    result are dropped.
    """

    def fn(w, x):
        y = kernel_p.bind(x, w, op=Dot(False, False))
        q, k, v = (lax.slice_in_dim(y, i, i + 8, axis=1) for i in (0, 8, 16))
        scores = kernel_p.bind(q, k, op=Dot(False, True))
        mixed = kernel_p.bind(jax.nn.softmax(scores, axis=-1), v, op=Dot(False, False))
        return kernel_p.bind(lax.slice_in_dim(mixed, 2, 18), w, op=Dot(False, False))

    w = jnp.asarray(RNG.standard_normal((8, 24)) / 3, jnp.float32)
    x = jnp.asarray(RNG.standard_normal((18, 8)), jnp.float32)
    (found,) = equations(hoisted(fn, w, x, weights=1), x)
    assert found == "Dot+Slice+Slice+Slice+Attention+Slice+Dot"
    assert_computes(fn, w, x, weights=1)


def test_a_softmax_at_the_end_handles_large_numbers() -> None:
    """XLA subtracts the maximum, which is rounded, from unrounded values, so that their
    exponentials are infinite.
    """
    fn = lambda w, x: jax.nn.softmax(kernel_p.bind(x, w, op=Dot(False, False)) / 169)  # noqa: E731
    w, x = jnp.eye(8), jnp.full((1, 8), 8.2617663e11)
    parts = hoisted(fn, w, x, weights=1)
    assert equations(parts, x) == ["Dot+Loop"]
    (found,) = jax.jit(parts.call)(parts.prepare([w]), [x])
    np.testing.assert_array_equal(found, np.full((1, 8), 0.125))


def test_a_rewritten_attention_becomes_products_and_a_softmax_loop() -> None:
    """Attention with two heads of size 4 over six tokens, as rewriting leaves it: two weights are
    added to the first product, the scores are transposed, and the bias of the last product is added
    to the residual.
    """

    def dot(x, w):
        return kernel_p.bind(x, w, op=Dot(False, False))

    def fn(w, a, b, out, bias, x):
        y = dot(x, w) + a + b
        q, k, v = (
            lax.slice_in_dim(y, i, i + 8, axis=1).reshape(6, 2, 4).transpose(1, 0, 2)
            for i in (0, 8, 16)
        )
        scores = kernel_p.bind(k, q, op=Dot(False, True)).transpose(0, 2, 1)
        mixed = dot(jax.nn.softmax(scores, axis=-1), v)
        return dot(dot(mixed.transpose(1, 0, 2).reshape(6, 8), out) + (x + bias), out)

    shapes = (8, 24), (6, 24), (6, 24), (8, 8), (8,), (6, 8)
    args = [jnp.asarray(RNG.standard_normal(s) / 3, jnp.float32) for s in shapes]
    *_, found = equations(hoisted(fn, *args, weights=5), args[-1])
    kinds = [op for op in found.split("+") if op not in ("Slice", "Reshape", "Transpose")]
    assert kinds == ["Dot", "Dot", "Loop", "Dot", "Dot", "Dot"]
    assert_computes(fn, *args, weights=5)


def test_biases_of_all_slices_are_merged_into_the_product() -> None:
    """The first 8 columns of a product have one bias, the other 16 are cut again and have two."""

    def fn(w, a, b, c, out, x):
        y = kernel_p.bind(x, w, op=Dot(False, False)).reshape(1, 18, 24)
        q, both = y[..., :8] + a, y[..., 8:]
        k, v = both[..., :8] + b, both[..., 8:] + c
        return kernel_p.bind((q * k + v)[0], out, op=Dot(False, False))

    shapes = (8, 24), (8,), (8,), (8,), (8, 8), (18, 8)
    args = [jnp.asarray(RNG.standard_normal(s) / 3, jnp.float32) for s in shapes]
    *_, found = equations(hoisted(fn, *args, weights=5), args[-1])
    assert found == "Dot+Reshape+Slice+Slice+Binary+Slice+Binary+Reshape+Dot"  # mul, add
    assert_computes(fn, *args, weights=5)


def test_a_bias_of_one_slice_only_is_not_merged() -> None:
    def fn(w, a, out, x):
        y = kernel_p.bind(x, w, op=Dot(False, False))
        return kernel_p.bind((y[:, :8] + a) * y[:, 8:], out, op=Dot(False, False))

    args = [jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in ((8, 16), 8, (8, 8), (18, 8))]
    *_, found = equations(hoisted(fn, *args, weights=3), args[-1])
    assert found == "Dot+Slice+Reshape+Binary+Slice+Binary+Dot"
    assert_computes(fn, *args, weights=3)


def test_a_slice_of_a_slice_becomes_one_slice() -> None:
    """Columns 1 to 12, and of these every second from the third on, are one slice: 3, 5, .., 11.
    Nothing is copied.
    """

    def fn(w, v, x):
        y = kernel_p.bind(x, w, op=Dot(False, False))[:, 1:13][:, 2:12:2]
        return kernel_p.bind(y, v, op=Dot(False, False))

    w = jnp.asarray(RNG.standard_normal((8, 24)) / 3, jnp.float32)
    x = jnp.asarray(RNG.standard_normal((18, 8)), jnp.float32)
    (found,) = equations(hoisted(fn, w, w[:5], x, weights=2), x)
    assert found == "Dot+Slice+Dot"
    assert_computes(fn, w, w[:5], x, weights=2)
