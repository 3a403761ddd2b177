"""Convolutions and products in int8: the integers are exact, and special values are float32's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.libraries.base import Epilogue
from xrl_jax.libraries.onednn import calls, kernels
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.int16 import Products16, RowLevels
from xrl_jax.libraries.onednn.levels import Largest, Levels
from xrl_jax.libraries.onednn.operand_types import (
    LARGEST,
    kernel_levels,
    levels,
    levels_along,
    pairs,
)
from xrl_jax.libraries.onednn.plan import plan
from xrl_jax.libraries.onednn.spec import Conv, Instruction, Partition
from xrl_jax.libraries.onednn.spec import Epilogue as After
from xrl_jax.lower.table import CHOICES, LOWERINGS

LIBRARY = library()
needs_int8 = pytest.mark.skipif(
    LIBRARY is None or "int8" not in LIBRARY.operand_types, reason="oneDNN has no int8 here"
)
NAN, INF = np.nan, np.inf
NO_AFTER = After()
RNG = np.random.default_rng(0)


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return [jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in shapes]


def convolution(right: str, stride: int = 1, groups: int = 1) -> Callable[..., Any]:
    """Return a jitted convolution that keeps the size of images, with a bias and a rectifier."""

    @jax.jit
    def fn(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        edge = w.shape[0] // 2
        return calls.convolution(
            x,
            w,
            stride=(stride, stride),
            padding=((edge, edge),) * 2,
            dilation=(1, 1),
            groups=groups,
            epilogue=Epilogue(bias=b, relu=True),
            right=right,
        )

    return fn


def test_an_image_has_one_factor() -> None:
    found, scale = levels(jnp.asarray([0.0, 1.0, -2.0, 0.01]))
    np.testing.assert_allclose(scale, 2 / 127)
    assert found.tolist() == [0.0, 64.0, -127.0, 1.0]  # 63.5 to even


def test_an_image_that_is_not_finite_has_no_levels() -> None:
    found, scale = levels(jnp.asarray([NAN, INF, 3.0]))
    np.testing.assert_array_equal(found, [NAN, INF, 3.0])
    assert scale == 1


def test_a_kernel_has_a_factor_for_each_feature() -> None:
    w = jnp.asarray([[1.0, 0.0, -10.0], [0.4, 0.0, 5.1]])
    found, scales = kernel_levels(w, 127)
    assert found.tolist() == [[127, 0, -127], [51, 0, 65]]  # 50.8 and 64.8
    np.testing.assert_allclose(scales[::2], [1 / 127, 10 / 127], rtol=1e-6)


def test_a_processor_that_adds_pairs_in_16_bits_has_even_levels() -> None:
    found, scales = kernel_levels(jnp.asarray([[1.0], [0.4]]), 63)
    assert found.tolist() == [[126], [50]]
    np.testing.assert_allclose(scales, [1 / 126], rtol=1e-6)


@needs_int8
@pytest.mark.parametrize(
    ("size", "features", "window", "groups", "stride"),
    [
        (14, (32, 64), 3, 1, 1),
        (15, (8, 24), 1, 1, 1),
        (14, (32, 32), 3, 32, 1),
        (14, (64, 64), 3, 4, 2),
        (9, (3, 16), 3, 1, 2),
        (5, (17, 5), 3, 1, 1),
    ],
)
def test_a_convolution_is_that_of_the_levels(
    size: int, features: tuple[int, int], window: int, groups: int, stride: int
) -> None:
    c, o = features
    x, w, b = arrays((2, size, size, c), (window, window, c // groups, o), (o,))
    rounded, factors = calls.kernel_levels(w, unsigned=False)
    (found, scale) = levels(x)
    expected = convolution("float32", stride, groups)(found * scale, rounded * factors, b)
    y = convolution("int8", stride, groups)(x, w, b)
    np.testing.assert_allclose(y, expected, atol=1e-5 * float(jnp.abs(expected).max()))


@needs_int8
@pytest.mark.parametrize(
    ("shape", "features", "stride", "edges"),
    [
        ((2, 9, 9, 32), 24, 1, (0, 0)),
        ((1, 7, 8, 17), 5, 1, (0, 0)),  # an odd number of terms, and less than a strip
        ((1, 9, 9, 33), 40, 2, (1, 0)),
        ((1, 1, 100, 700), 48, 1, (0, 0)),  # several runs of terms
        ((1, 1, 13, 1001), 33, 1, (0, 0)),  # and several depths
        ((1, 20, 20, 16), 16, 1, (0, 0)),
    ],
)
def test_a_product_in_int16_is_that_of_the_levels(
    shape: tuple[int, ...], features: int, stride: int, edges: tuple[int, int]
) -> None:
    x, w, b = arrays(shape, (1, 1, shape[-1], features), (features,))

    def fn(x: jax.Array, w: jax.Array, right: str) -> jax.Array:
        return calls.convolution(
            x,
            w,
            stride=(stride,) * 2,
            padding=(edges,) * 2,
            dilation=(1, 1),
            groups=1,
            epilogue=Epilogue(bias=b, relu=True),
            right=right,
        )

    rounded = (np.multiply(*levels_along(a, axes)) for a, axes in ((x, (3,)), (w, (0, 1, 2))))
    expected = jax.jit(fn, static_argnums=2)(*rounded, "float32")
    y = jax.jit(fn, static_argnums=2)(x, w, "int16")
    exact = fn(x, w, "float32")
    largest = float(jnp.abs(exact).max())
    # A level that is halfway between two integers may be rounded to either.
    assert float(jnp.abs(y - expected).mean()) < 1e-6 * largest
    assert float(jnp.abs(y - exact).max()) < 1e-3 * largest


def test_rows_and_columns_have_factors_of_their_own() -> None:
    found, factors = levels_along(jnp.asarray([[1.0, -4.0], [0.0, 0.0], [INF, 3.0]]), (1,))
    np.testing.assert_allclose(factors[:2, 0] * LARGEST, [4.0, 0.0], atol=1e-30)
    np.testing.assert_array_equal(found, [[1024, -4095], [0, 0], [INF, 3.0]])
    assert factors[2] == 1


def test_sums_of_a_run_fit_into_32_bits() -> None:
    assert 128 * LARGEST**2 < 2**31 <= 128 * (LARGEST + 1) ** 2


def test_the_levels_of_two_terms_share_an_integer() -> None:
    found = np.asarray(pairs(jnp.asarray([[1.0, -2.0], [3.0, 4.0], [-5.0, 6.0]])))
    assert found.view(np.int16).reshape(2, 2, 2).tolist() == [[[1, 3], [-2, 4]], [[-5, 0], [6, 0]]]


@needs_int8
def test_the_largest_levels_do_not_overflow() -> None:
    x, w = jnp.full((1, 1, 20, 4096), -3.0), jnp.full((1, 1, 4096, 16), -2.0)
    y = convolution("int16")(x, w, jnp.zeros(16))
    np.testing.assert_allclose(y, 6.0 * 4096, rtol=1e-5)


@needs_int8
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_special_value_gives_what_float32_gives(value: float) -> None:
    for right, window in (("int8", 3), ("int16", 1)):
        x, w, b = arrays((2, 9, 9, 16), (window, window, 16, 24), (24,))
        x = x.at[1, 4, 5, 6].set(value)
        y, exact = (convolution(t)(x, w, b) for t in (right, "float32"))
        # Float32 weights are not packed for such a call, and summed in another order.
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


@needs_int8
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e30, 1e34])
def test_the_error_does_not_depend_on_the_scale(scale: float) -> None:
    for right, window, error in (("int8", 3, 0.03), ("int16", 1, 1e-3)):
        x, w, b = arrays((1, 9, 9, 16), (window, window, 16, 24), (24,))
        y, exact = (convolution(t)(x * scale, w, 0 * b) for t in (right, "float32"))
        np.testing.assert_allclose(y, exact, atol=error * float(jnp.abs(exact).max()))


def test_the_errors_of_a_feature_add_up_to_nothing() -> None:
    w = jnp.asarray([127.0, 1.4, 2.4, 3.4, 4.4, 5.4])  # 2 of the five are rounded up
    (found, _) = kernel_levels(w[:, None], 127)
    assert float(jnp.abs(found[:, 0] - w).max()) < 1
    w = jnp.asarray(RNG.uniform(-1, 1, (1000, 3)), jnp.float32)
    found, scales = kernel_levels(w, 127)
    errors = w - found * scales
    assert float(jnp.abs(errors.sum(axis=0) / scales).max()) < 3
    assert float(jnp.abs(errors / scales).max()) < 0.6


@needs_int8
def test_an_image_without_negative_elements_is_unsigned() -> None:
    x, w, b = arrays((1, 9, 9, 16), (3, 3, 16, 24), (24,))
    x = jnp.abs(x)
    exact = convolution("float32")(x, w, b)
    errors = {t: float(jnp.std(convolution(t)(x, w, b) - exact)) for t in ("int8", "uint8")}
    # With instructions that add in 32 bits, both have the same levels.
    halved = LIBRARY is not None and LIBRARY.most_level < 127
    assert errors["uint8"] < errors["int8"] if halved else errors["uint8"] == errors["int8"]
    rounded, factors = kernel_levels(w, 127)
    found, scale = levels(x)
    expected = convolution("float32")(found * scale, rounded * factors, b)
    size = float(jnp.abs(expected).max())
    np.testing.assert_allclose(convolution("uint8")(x, w, b), expected, atol=1e-5 * size)


@needs_int8
def test_an_outlier_is_not_clipped() -> None:
    x, w, b = arrays((1, 9, 9, 16), (1, 1, 16, 24), (24,))
    x = x.at[0, 0, 0, 0].set(1e4)
    y, exact = (convolution(t)(x, w, b)[0, 0, 0] for t in ("int8", "float32"))
    np.testing.assert_allclose(y, exact, atol=0.02 * float(jnp.abs(exact).max()))


@needs_int8
def test_readers_of_a_value_share_its_levels() -> None:
    op, n = Conv((1, 1), ((0, 0), (0, 0)), (1, 1), 1, right="int8"), (1, 1, 16, 16)
    x = (1, 4, 4, 16)
    code = tuple(Instruction(op, (0, at, at + 1, at + 2), x) for at in (1, 4))
    inputs, packed = (x, n, (16,), n, n, (16,), n), (False, True, False, False) * 2
    part = Partition(inputs, packed[:7], code, (7, 8))
    assert LIBRARY is not None
    steps = [s.primitive for s in plan(LIBRARY, part).steps]
    assert [s for s in steps if not isinstance(s, int)] == [Largest(256), Levels(256)]


@needs_int8
def test_readers_of_a_value_share_its_levels_in_int16() -> None:
    op, n = Conv((1, 1), ((0, 0), (0, 0)), (1, 1), 1, right="int16"), (1, 1, 8, 16)
    x = (1, 4, 4, 16)
    code = tuple(Instruction(op, (0, at, at + 1, at + 2), x) for at in (1, 4))
    kernel, is_packed = (n, (16,), (1, 1, 16, 16)), (True, False, False)
    part = Partition((x, *kernel, *kernel), (False, *is_packed, *is_packed), code, (7, 8))
    assert LIBRARY is not None
    steps = [s.primitive for s in plan(LIBRARY, part).steps]
    product = Products16(16, 16, 16, NO_AFTER, LIBRARY.lanes)
    assert steps == [RowLevels(16, 16), product, product]


@needs_int8
@pytest.mark.parametrize(
    # A mapped call is computed by XLA, where a level halfway may be rounded to the other integer.
    ("right", "window", "error"),
    [("int8", 3, 1e-5), ("int16", 1, 5e-3)],
)
def test_a_call_may_be_mapped_and_differentiated(right: str, window: int, error: float) -> None:
    x, w, b = arrays((3, 1, 6, 6, 16), (window, window, 16, 8), (8,))
    fn, exact = convolution(right), convolution("float32")
    each = jnp.stack([fn(one, w, b) for one in x])
    np.testing.assert_allclose(jax.vmap(lambda one: fn(one, w, b))(x), each, atol=error)
    slope, expected = (jax.grad(lambda b, f=f: f(x[0], w, b).sum())(b) for f in (fn, exact))
    np.testing.assert_allclose(slope, expected, atol=4)  # a rectifier may open or close


@pytest.mark.parametrize(("right", "window"), [("int8", 3), ("bfloat16", 3), ("int16", 1)])
def test_the_same_is_computed_without_the_library(
    right: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "is_possible", lambda _: False)
    x, w, b = arrays((1, 9, 9, 16), (window, window, 16, 24), (24,))
    y, exact = convolution(right)(x, w, b), convolution("float32")(x, w, b)
    np.testing.assert_allclose(y, exact, atol=0.03 * float(jnp.abs(exact).max()))


def test_no_rule_chooses_a_lowering_that_rounds() -> None:
    rounding = {(op, i): r.rounds for op, rows in LOWERINGS.items() for i, r in enumerate(rows)}
    rounding = {choice: rounds for choice, rounds in rounding.items() if rounds is not None}
    assert {rounds.dtype for rounds in rounding.values()} == {"int16", "bfloat16", "int8", "uint8"}
    assert not set(rounding) & set(CHOICES)


MASKED = """
from xrl_jax.libraries.onednn.c_api import library
print(library().operand_types)
"""


@needs_int8
def test_the_library_says_which_types_the_processor_multiplies() -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "SSE41"}
    found = subprocess.run(
        [sys.executable, "-c", MASKED], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout == "()\n"
