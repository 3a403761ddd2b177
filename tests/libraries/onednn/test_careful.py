"""NaN and infinities appear where XLA has them, and ordinary values are computed only once."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests.libraries.onednn.partitions import a_partition, by_xla, called, numbers
from xrl_jax.libraries.onednn import kernels, native
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.careful import loses_nan
from xrl_jax.libraries.onednn.spec import (
    RELU,
    Binary,
    Clip,
    Conv,
    Dot,
    Epilogue,
    Instruction,
    Loop,
    Map,
    Op,
    Partition,
    Pool,
    Reduce,
    Shape,
)

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
NAN, INF = math.nan, math.inf
WINDOW = Pool("max", (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4)


def one(op: Op, *inputs: Shape, packed: int = -1, shape: Shape) -> Partition:
    """Return a partition of one operator."""
    taken = tuple(range(len(inputs)))
    code = (Instruction(op, taken, shape),)
    return Partition(inputs, tuple(i == packed for i in taken), code, (len(inputs),))


def pointwise(clip: Clip | None) -> Partition:
    op = Conv((1, 1), ((0, 0), (0, 0)), (1, 1), 1, Epilogue(clip=clip))
    return one(op, (1, 1, 6, 16), (1, 1, 16, 16), packed=1, shape=(1, 1, 6, 16))


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        (RELU, [NAN, INF, 0, 0, 0, 2]),
        (Clip(0.0, 6.0), [NAN, 6, 0, 0, 0, 2]),
        (Clip(high=1.0), [NAN, 1, -INF, -3, 0, 1]),
        (Clip(low=-1.0), [NAN, INF, -1, -1, 0, 2]),
    ],
)
def test_bounds_keep_nan_and_infinities(clip: Clip, expected: list[float]) -> None:
    row = np.asarray([NAN, INF, -INF, -3, 0, 2], np.float32)
    alone = one(clip, (1, 1, 6, 1), shape=(1, 1, 6, 1))
    (y,) = called(alone, row.reshape(1, 1, 6, 1))
    np.testing.assert_array_equal(y.ravel(), np.asarray(expected, np.float32))
    x = np.repeat(row.reshape(1, 1, 6, 1), 16, 3)
    (y,) = called(pointwise(clip), x, np.ones((1, 1, 16, 16), np.float32) / 16)
    np.testing.assert_allclose(y, np.repeat(np.reshape(expected, (1, 1, 6, 1)), 16, 3))


def test_nan_that_arises_inside_a_kernel_is_kept() -> None:
    """3e38 * 16 overflows to infinity; adding the addend, -infinity, gives NaN."""
    op = Dot(False, False, Epilogue(addend=True, clip=RELU))
    part = one(op, (20, 16), (16, 8), (20, 8), packed=1, shape=(20, 8))
    x, w = np.full((20, 16), 3e38, np.float32), np.ones((16, 8), np.float32)
    before = native.careful_runs()
    assert np.isnan(called(part, x, w, np.full((20, 8), -INF, np.float32))[0]).all()
    assert native.careful_runs() == before + 1


def test_windows_keep_nan_and_infinities() -> None:
    x = np.full((1, 4, 4, 32), -INF, np.float32)
    x[0, 0, 0, 3], x[0, 2, 1, 5], x[0, 3, 3, 7] = NAN, INF, 3e38
    expected = np.full((1, 2, 2, 32), -INF, np.float32)
    expected[0, 0, 0, 3], expected[0, 1, 0, 5], expected[0, 1, 1, 7] = NAN, INF, 3e38
    (y,) = called(one(WINDOW, x.shape, shape=(1, 2, 2, 32)), x)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("shape", [(2, 3, 3, 5), (1, 1, 1, 5)])
def test_max_and_min_are_nan_where_one_operand_is(kind: str, shape: Shape) -> None:
    part = one(Binary(kind), (2, 3, 3, 5), shape, shape=(2, 3, 3, 5))
    a, b = np.zeros((2, 3, 3, 5), np.float32), np.ones(shape, np.float32)
    a[1, 2, 2, 0], b[0, 0, 0, 1] = NAN, NAN
    (y,) = called(part, a, b)
    np.testing.assert_array_equal(y, getattr(jnp, f"{kind}imum")(a, b))


@pytest.mark.parametrize("features", [1, 3, 5, 8, 40])
def test_ordinary_numbers_are_not_recomputed(features: int) -> None:
    """This includes kernels that compute with elements beyond an array's end, which may be NaN."""
    op = Conv((1, 1), ((1, 1), (1, 1)), (1, 1), 1, Epilogue(bias=True, clip=RELU))
    image, kernel = (1, 9, 7, features), (3, 3, features, features)
    part = one(op, image, kernel, (features,), packed=1, shape=image)
    inputs = numbers(part, np.random.default_rng(0))
    called(part, *inputs)
    before = native.careful_runs()
    for arena in native._KEPT["the arenas"]:
        np.frombuffer(arena, np.float32)[:] = NAN
    called(part, *inputs)
    assert native.careful_runs() == before


def test_where_only_time_matters_nothing_is_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timing worker draws weights at random, and a deep network computes NaN from them."""
    monkeypatch.setattr(native, "_timed_only", True)
    part = one(Clip(0.0, 5.0), (1, 1, 7, 1), shape=(1, 1, 7, 1))
    row = np.asarray([NAN, INF, -INF, -3, 0, 2, 9], np.float32)
    np.testing.assert_array_equal(
        called(part, row.reshape(1, 1, 7, 1))[0].ravel()[3:], [0, 0, 2, 5]
    )
    name = kernels._register_target(library(), "run", part, 0)
    fast, careful = native._KEPT[name][1]
    assert (fast[0], careful[0]) == (1, 0)  # numbers of steps


def test_kernels_that_keep_nan_are_not_recomputed() -> None:
    part = pointwise(None)
    assert not loses_nan(part) and loses_nan(pointwise(RELU))
    before = native.careful_runs()
    x = np.full((1, 1, 6, 16), NAN, np.float32)
    assert np.isnan(called(part, x, np.ones((1, 1, 16, 16), np.float32))[0]).all()
    assert native.careful_runs() == before


def in_a_loop(op: Op, *arrays: np.ndarray) -> np.ndarray:
    """Apply an elementwise operator to vectors, by generated code."""
    shape = (1, len(arrays[0]))
    inside = Instruction(op, tuple(range(len(arrays))), shape)
    loop = Loop(*shape, (shape,) * len(arrays), (inside,))
    part = one(loop, *(shape,) * len(arrays), shape=shape)
    return called(part, *(np.reshape(a, shape) for a in arrays))[0][0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("exp", [NAN, INF, 0, 1, INF, 0, 1.000001]),
        ("tanh", [NAN, 1, -1, 0, 1, -1, 1e-6]),
        ("logistic", [NAN, 1, 0, 0.5, 1, 0, 0.50000025]),
        ("erf", [NAN, 1, -1, 0, 1, -1, 1.1283792e-6]),
        ("erfc", [NAN, 0, 2, 1, 0, 2, 0.99999887]),
        ("sqrt", [NAN, INF, NAN, 0, 1.8446743e19, NAN, 1e-3]),
        ("rsqrt", [NAN, 0, NAN, INF, 5.421011e-20, NAN, 1e3]),
        ("square", [NAN, INF, INF, 0, INF, INF, 1e-12]),
        ("floor", [NAN, INF, -INF, 0, 3.4e38, -3.4e38, 0]),
        ("ceil", [NAN, INF, -INF, 0, 3.4e38, -3.4e38, 1]),
        ("abs", [NAN, INF, INF, 0, 3.4e38, 3.4e38, 1e-6]),
    ],
)
def test_functions_at_extreme_values(kind: str, expected: list[float]) -> None:
    x = np.asarray([NAN, INF, -INF, 0, 3.4028235e38, -3.4028235e38, 1e-6], np.float32)
    np.testing.assert_allclose(in_a_loop(Map(kind, (None,)), x), expected, rtol=2e-3)


def test_small_results_are_accurate() -> None:
    x = np.asarray([1e-6, 9.0, -87.0], np.float32)
    tanh, erfc, exp = (in_a_loop(Map(k, (None,)), x) for k in ("tanh", "erfc", "exp"))
    np.testing.assert_allclose(tanh[0], 1e-6, rtol=1e-6)
    np.testing.assert_allclose(erfc[1], 4.1370317e-37, rtol=1e-5)
    np.testing.assert_allclose(exp[2], 1.6458115e-38, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("max", [NAN, NAN, INF, 0, INF]),
        ("min", [NAN, NAN, 1, -INF, INF]),
        ("div", [NAN, NAN, INF, 0, NAN]),
        ("mul", [NAN, NAN, INF, NAN, INF]),
        ("sub", [NAN, NAN, INF, INF, NAN]),
        ("eq", [0, 0, 0, 0, 1]),
        ("ne", [1, 1, 1, 1, 0]),
        ("lt", [0, 0, 0, 0, 0]),
    ],
)
def test_binary_operations_at_special_values(kind: str, expected: list[float]) -> None:
    a = np.asarray([NAN, 1, INF, 0, INF], np.float32)
    b = np.asarray([1, NAN, 1, -INF, INF], np.float32)
    np.testing.assert_array_equal(in_a_loop(Map(kind, (None, None)), a, b), expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sum", [NAN, INF, NAN, -INF, INF]),
        ("max", [NAN, INF, INF, -INF, 3e38]),
        ("min", [NAN, 1, -INF, -INF, 3e38]),
    ],
)
@pytest.mark.parametrize("columns", [5, 37])
def test_reductions_at_extreme_values(kind: str, columns: int, expected: list[float]) -> None:
    x = np.ones((5, columns), np.float32)
    x[0, -1], x[1, 1], x[2, 1], x[2, 3], x[3], x[4] = NAN, INF, INF, -INF, -INF, 3e38
    loop = Loop(5, columns, (x.shape,), (Instruction(Reduce(kind), (0,), (5,)),))
    (y,) = called(one(loop, x.shape, shape=(5,)), x)
    np.testing.assert_allclose(y, expected)


def assert_same_kinds(seed: int) -> None:
    """Compare a random partition with XLA on ordinary values, then with NaN, infinities or large
    values at random places.
    """
    rng = np.random.default_rng(seed)
    part = a_partition(rng)
    if not kernels.is_possible(part):
        return
    inputs = numbers(part, rng)
    arrays = [x for x, packed in zip(inputs, part.packed, strict=True) if not packed]
    for number in (None, NAN, INF, -INF, 1e30):
        x = arrays[int(rng.integers(len(arrays)))]
        places = rng.integers(x.size, size=int(rng.integers(1, 4)))
        before = x.flat[places]
        if number is not None:
            x.flat[places] = number
        got, expected = called(part, *inputs), by_xla(part, *inputs)
        x.flat[places] = before
        for y, e in zip(got, expected, strict=True):
            for kind in (np.isnan, np.isposinf, np.isneginf):
                np.testing.assert_array_equal(kind(y), kind(e), err_msg=f"seed {seed}")
            finite = np.isfinite(e)
            size = max(1.0, float(np.abs(e[finite]).max(initial=0)))
            np.testing.assert_allclose(y[finite], e[finite], rtol=1e-3, atol=1e-4 * size)


@pytest.mark.parametrize("seed", range(4))
def test_partitions_have_nan_and_infinities_where_xla_has_them(seed: int) -> None:
    assert_same_kinds(seed)


@pytest.mark.slow
def test_many_partitions_have_nan_and_infinities_where_xla_has_them() -> None:
    for seed in range(4, 64):
        assert_same_kinds(seed)
