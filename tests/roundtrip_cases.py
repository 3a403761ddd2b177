"""The table of small JAX functions whose results `from_jax` and `to_jax` must keep bit-identical.

It covers every primitive of `jax.lax` that takes arrays (`test_roundtrip.py` checks that against
JAX itself), the transformations whose jaxprs differ from those of hand-written code, every dtype,
and the odd shapes and outputs that front ends forget. It is one table, hence one file: a new
primitive or a bug adds a row. Rows are formatted by hand.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.scipy.sparse.linalg import cg
from jax.sharding import PartitionSpec, SingleDeviceSharding


class Point(NamedTuple):
    """A custom pytree node."""

    x: Any
    y: Any


@dataclass(frozen=True, eq=False)
class Case:
    """A function and example arguments (NumPy arrays, Python scalars, keys, or pytrees of them)."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    x64: bool = False  # run under jax.enable_x64(True)
    slow: bool = False  # XLA takes a second to compile it


def real(*shape: int, dtype: Any = np.float32, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    """Return reproducible random values from `low` to `high`; other bounds give other values."""
    seed = [*shape, int(abs(low) * 97), int(abs(high) * 89)]
    return np.random.default_rng(seed).uniform(low, high, shape).astype(dtype)


def ints(*shape: int, dtype: Any = np.int32, low: int = 0, high: int = 7) -> np.ndarray:
    return np.random.default_rng([*shape, high]).integers(low, high, shape).astype(dtype)


def i32(values: list[Any]) -> np.ndarray:
    return np.array(values, np.int32)


def complexes(*shape: int, dtype: Any = np.complex64) -> np.ndarray:
    return (real(*shape) + 1j * real(*shape, high=1.5)).astype(dtype)


def spd(n: int) -> np.ndarray:
    """Return a symmetric positive definite matrix, far from singular."""
    a = real(n, n)
    return a @ a.T + n * np.eye(n, dtype=np.float32)


BOOLS = np.array([True, False, True, True])
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.5, -2.5], np.float32)
KEY = jax.random.key(7)

# fmt: off
# --- elementwise: one row per primitive, (name in jax.lax, arguments)
UNIT = real(2, 3, low=-0.9, high=0.9)
POSITIVE = real(2, 3, low=0.5, high=3.0)
ANY = real(2, 3)
ELEMENTWISE: list[tuple[str, tuple[Any, ...]]] = [
    *((name, (SPECIAL,)) for name in ("abs", "neg", "sign", "floor", "ceil", "is_finite")),
    ("square", (SPECIAL,)),
    *((name, (ANY,)) for name in ("exp", "exp2", "expm1", "tanh", "logistic", "sin", "cos", "tan")),
    *((name, (ANY,)) for name in ("atan", "sinh", "cosh", "asinh", "cbrt", "erf", "erfc")),
    *((name, (ANY,)) for name in ("bessel_i0e", "bessel_i1e")),
    *((name, (UNIT,)) for name in ("asin", "acos", "atanh", "erf_inv", "log1p")),
    *((name, (POSITIVE,)) for name in ("log", "sqrt", "rsqrt", "reciprocal", "lgamma", "digamma")),
    ("acosh", (POSITIVE + 1,)),
    ("bitwise_not", (ints(5),)),
    ("population_count", (ints(5, high=200, dtype=np.uint8),)),
    ("clz", (ints(5, high=99),)),
    ("conj", (complexes(3),)),
    ("real", (complexes(3),)),
    ("imag", (complexes(3),)),
    ("complex", (ANY, UNIT)),
    *((name, (ANY, POSITIVE)) for name in ("add", "sub", "mul", "div", "rem", "max", "min")),
    ("atan2", (ANY, POSITIVE)),
    ("pow", (POSITIVE, ANY)),
    ("nextafter", (ANY, POSITIVE)),
    *((f"bitwise_{name}", (ints(6, high=99), ints(6, high=50))) for name in ("and", "or", "xor")),
    ("shift_left", (ints(6, high=99), ints(6, high=5))),
    ("shift_right_logical", (-ints(6, high=99), ints(6, high=5))),
    ("shift_right_arithmetic", (-ints(6, high=99), ints(6, high=5))),
    ("mulhi", (ints(6, high=2**31 - 1), ints(6, high=2**30))),
    *((name, (SPECIAL, SPECIAL[::-1].copy())) for name in ("eq", "ne", "lt", "le", "gt", "ge")),
    *((name, (POSITIVE, POSITIVE + 1)) for name in ("igamma", "igammac", "igamma_grad_a")),
    ("random_gamma_grad", (POSITIVE, POSITIVE + 1)),
    ("zeta", (POSITIVE + 2, POSITIVE)),
    ("polygamma", (np.array([1, 2, 3], np.float32), real(3, low=0.5, high=3.0))),
    ("betainc", (POSITIVE, POSITIVE + 1, np.abs(UNIT))),
    # New in later versions of JAX.
    *((name, (POSITIVE,)) for name in ("log2", "one_minus_square") if hasattr(lax, name)),
]
SLOW = ("igammac", "igamma_grad_a", "random_gamma_grad", "betainc")
CASES = [Case(f"lax.{n}", getattr(lax, n), args, slow=n in SLOW) for n, args in ELEMENTWISE]
CASES += [
    Case("round_away_from_zero", lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
         (SPECIAL,)),
    Case("round_to_even", lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), (SPECIAL,)),
    Case("integer_pow", lambda x: (x**3, x**-2, lax.integer_pow(x, 7)), (ANY,)),
    Case("reduce_precision", lambda x: lax.reduce_precision(x, 5, 10), (ANY,)),
    Case("logical_ops", lambda p: (p & ~p[::-1], p | p[::-1], p ^ p[::-1]), (BOOLS,)),
    Case("exp_with_tolerance", lambda x: lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST), (ANY,)),
    Case("numpy_broadcasting", lambda x, y: x * y + x[:1] - y[0, 0], (ANY, real(2, 1))),
    Case("division_by_zero_and_overflow", lambda x: (x / 0, x * 1e38, 0 / x), (SPECIAL,)),
    Case("integer_division_by_zero", lambda x: (x // 0, x % 0), (ints(4),)),
    Case("integer_overflow", lambda x: x * 2**30 + (2**31 - 1), (ints(4),)),
    Case("total_order", lambda x, y: [p.bind(x, y) for p in (lax.eq_to_p, lax.le_to_p,
         lax.lt_to_p)], (SPECIAL, SPECIAL[::-1].copy())),
    Case("clamp_scalars", lambda x: lax.clamp(-1.0, x, 1.0), (ANY,)),
    Case("clamp_arrays", lax.clamp, (UNIT, ANY, UNIT + 1)),
    Case("select_bool", lambda p, x, y: lax.select(p, x, y), (ANY > 0, ANY, UNIT)),
    Case("select_n_of_three", lambda i, x: lax.select_n(i, x, -x, x + 1),
         (ints(2, 3, high=3), ANY)),
    Case("select_scalar_predicate", lambda p, x: lax.select(p, x, -x), (np.bool_(True), ANY)),
    Case("where_with_nan", lambda x: jnp.where(jnp.isnan(x), 0.0, x), (SPECIAL,)),
    Case("polynomial", lambda x: jnp.polyval(jnp.array([1.0, -2.0, 3.0]), x), (ANY,)),
]

# --- casts and dtypes
CASES += [
    Case("cast_float_to_int8", lambda x: x.astype(jnp.int8), (ANY,)),
    Case("cast_int_to_float16", lambda x: x.astype(jnp.float16), (ints(4),)),
    Case("cast_bool_to_float", lambda x: x.astype(jnp.float32), (BOOLS,)),
    Case("cast_through_bfloat16", lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (ANY,)),
    Case("cast_float_to_complex", lambda x: x.astype(jnp.complex64), (ANY,)),
    Case("cast_through_float8", lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), (ANY,)),
    Case("cast_through_int4", lambda x: x.astype(jnp.int4).astype(jnp.int32) * 2, (ints(4),)),
    Case("bitcast_same_width", lambda x: lax.bitcast_convert_type(x, jnp.int32), (SPECIAL,)),
    Case("bitcast_narrower", lambda x: lax.bitcast_convert_type(x, jnp.uint8), (ANY,)),
    Case("bitcast_wider", lambda x: lax.bitcast_convert_type(x, jnp.uint32),
         (ints(3, 2, dtype=np.uint16),)),
    Case("weak_types", lambda x, s: (x * 2, s + 1, s * 0.5, x + s), (real(2, dtype=np.float16), 3)),
    *(Case(f"arithmetic_{np.dtype(t).name}", lambda x: (x * x + x, -x, jnp.sum(x)),
        (real(4).astype(t),)) for t in (np.float16, jnp.bfloat16)),
    *(Case(f"arithmetic_{np.dtype(t).name}",
        lambda x: (x * x + x, x // 3, x % 3, x << 1, jnp.max(x)),
        (ints(4, dtype=t),)) for t in (np.int8, np.int16, np.int32, np.uint8, np.uint16,
        np.uint32)),
    Case("arithmetic_complex", lambda z: (z * z.conj(), jnp.exp(z), abs(z), z / (z + 1)),
         (complexes(4),)),
    Case("matmul_bfloat16", lambda x, y: x @ y,
         (real(3, 4, dtype=jnp.bfloat16), real(4, 2, dtype=jnp.bfloat16))),
    Case("softmax_float16", lambda x: jax.nn.softmax(x), (real(2, 5, dtype=np.float16),)),
    Case("x64_float64", lambda x: (jnp.sin(x) @ x.T, x.sum()), (real(2, 3, dtype=np.float64),),
         x64=True),
    Case("x64_int64", lambda x: (x * 2**40, jnp.cumsum(x), jnp.argmax(x)),
         (ints(4, dtype=np.int64),), x64=True),
    Case("x64_uint64_bitcast", lambda x: lax.bitcast_convert_type(x, jnp.uint64) >> 3,
         (real(3, dtype=np.float64),), x64=True),
    Case("x64_complex128", lambda z: jnp.linalg.norm(z * 1j), (complexes(3, dtype=np.complex128),),
         x64=True),
    Case("x64_mixed_with_float32", lambda x, y: x + y.astype(jnp.float32) * 2.5,
         (ANY, real(3, dtype=np.float64)), x64=True),
]

# --- reductions, cumulative operations, windows, sorting
IMAGE = real(1, 6, 6, 2)
CASES += [
    Case("reduce_sum_axes", lambda x: (x.sum(0), x.sum((0, 2)), x.sum(), x.sum(())),
         (real(2, 3, 4),)),
    Case("reduce_prod_max_min", lambda x: (x.prod(1), x.max(0), x.min((0, 1))), (real(2, 3),)),
    Case("reduce_max_with_nan", lambda x: (x.max(), x.min(), jnp.nanmax(x)), (SPECIAL,)),
    Case("reduce_integers", lambda x: (x.sum(0), x.prod(1), x.max()),
         (ints(2, 3, dtype=np.int16),)),
    Case("reduce_and_or", lambda p: (p.all(0), p.any(1)), (real(3, 2) > 0,)),
    Case("reduce_xor", lambda x: lax.reduce_xor(x, axes=(0,)), (ints(3, 2, high=99),)),
    Case("reduce_bitwise", lambda x: (lax.reduce_and(x, axes=(0,)), lax.reduce_or(x, axes=(1,))),
         (ints(3, 2, high=99),)),
    Case("reduce_custom", lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b + 1, (1,)),
         (ANY,)),
    Case("reduce_two_operands", lambda x, i: lax.reduce((x, i), (np.float32(-np.inf), np.int32(0)),
         lambda a, b: (jnp.maximum(a[0], b[0]), jnp.where(a[0] > b[0], a[1], b[1])), (0,)),
         (real(5), np.arange(5, dtype=np.int32))),
    Case("argmax_argmin", lambda x: (jnp.argmax(x), x.argmin(1), lax.argmax(x, 0, jnp.uint8)),
         (ANY,)),
    Case("mean_variance_norm", lambda x: (x.mean(0), x.var(1), jnp.linalg.norm(x)), (ANY,)),
    Case("logsumexp", lambda x: jax.nn.logsumexp(x, axis=-1, keepdims=True), (ANY,)),
    Case("cumsum_cumprod", lambda x: (lax.cumsum(x, 1), lax.cumprod(x, 0, reverse=True)), (ANY,)),
    Case("cummax_cummin", lambda x: (lax.cummax(x, 1, reverse=True), lax.cummin(x, 0)), (ANY,)),
    Case("cumlogsumexp", lambda x: lax.cumlogsumexp(x, axis=1), (ANY,)),
    Case("max_pool", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1),
         "SAME"), (IMAGE,)),
    Case("avg_pool", lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1),
         "VALID") / 4, (IMAGE,)),
    Case("min_pool", lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2, 2), (1, 1), "SAME"),
         (real(4, 4),)),
    Case("min_pool_integers_bounded",
         lambda x: lax.reduce_window(x, np.int32(3), lax.min, (2, 2), (1, 1), "VALID"),
         (ints(4, 4),)),
    Case("reduce_window_dilated", lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1),
         ((1, 0), (0, 1)), base_dilation=(2, 1), window_dilation=(1, 2)), (real(4, 5),)),
    Case("reduce_window_custom", lambda x: lax.reduce_window(x, np.float32(1), lambda a, b: a * b,
         (2,), (1,), "VALID"), (real(5),)),
    Case("reduce_window_two_operands",
         lambda x, y: lax.reduce_window((x, y), (np.float32(0), np.float32(0)),
         lambda a, b: (a[0] + b[0], a[1] - b[1]), (3,), (2,), "SAME"),
         (real(6), real(6, high=1.0))),
    Case("max_pool_gradient", jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2),
         (2, 2), "VALID").sum()), (real(4, 4),)),
    Case("max_pool_tangent", lambda x, t: jax.jvp(lambda x: lax.reduce_window(x, -jnp.inf, lax.max,
         (2,), (1,), "VALID"), (x,), (t,)), (real(6), real(6, high=1.0))),
    Case("sort", lambda x: (lax.sort(x), lax.sort(x, dimension=0, is_stable=False)), (real(3, 4),)),
    Case("sort_with_nan", lambda x: lax.sort(x), (SPECIAL,)),
    Case("sort_two_keys", lambda a, b, c: lax.sort((a, b, c), num_keys=2),
         (ints(6, high=3), ints(6), real(6))),
    Case("sort_key_value", lax.sort_key_val, (real(5), np.arange(5, dtype=np.int32))),
    Case("argsort", lambda x: (jnp.argsort(x, descending=True), jnp.median(x)), (real(6),)),
    Case("unique_and_searchsorted", lambda x: (jnp.unique(x, size=4),
         jnp.searchsorted(jnp.sort(x), 3)), (ints(6),)),
    Case("top_k", lambda x: lax.top_k(x, 2), (real(2, 5),)),
    Case("approx_max_k", lambda x: (lax.approx_max_k(x, 2), lax.approx_min_k(x, 3)), (real(2, 8),)),
]

# --- products
CASES += [
    Case("dot_vectors", lambda x, y: (jnp.dot(x, y), jnp.outer(x, y)),
         (real(4), real(4, high=1.0))),
    Case("dot_matrix_vector", lambda x, y: x @ y, (real(3, 4), real(4))),
    Case("dot_batched", lambda x, y: x @ y, (real(2, 3, 4), real(2, 4, 5))),
    Case("dot_transposed_operands", lambda x, y: lax.dot_general(x, y, (((0,), (1,)), ((), ()))),
         (real(4, 3), real(5, 4))),
    Case("dot_two_contractions", lambda x, y: lax.dot_general(x, y, (((1, 2), (2, 0)), ((), ()))),
         (real(2, 3, 4), real(4, 5, 3))),
    Case("dot_middle_batch", lambda x, y: lax.dot_general(x, y, (((2,), (0,)), ((1,), (2,)))),
         (real(2, 3, 4), real(4, 5, 3))),
    Case("dot_two_batches", lambda x, y: lax.dot_general(x, y, (((3,), (2,)), ((0, 1), (0, 1)))),
         (real(2, 2, 3, 4), real(2, 2, 4, 3))),
    Case("dot_batch_only", lambda x, y: lax.dot_general(x, y, (((), ()), ((0,), (0,)))),
         (real(3, 2), real(3, 4))),
    Case("dot_highest_precision", lambda x, y: jnp.dot(x, y, precision="highest"),
         (real(3, 4), real(4, 2))),
    Case("dot_int8_to_int32", lambda x, y: lax.dot(x, y, preferred_element_type=jnp.int32),
         (ints(2, 3, dtype=np.int8), ints(3, 4, dtype=np.int8))),
    Case("dot_bfloat16_to_float32", lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32),
         (real(2, 3, dtype=jnp.bfloat16), real(3, 4, dtype=jnp.bfloat16))),
    Case("dot_algorithm", lambda x, y: lax.dot(x, y, precision=lax.DotAlgorithmPreset.F32_F32_F32),
         (real(2, 3), real(3, 2))),
    Case("dot_complex", lambda x, y: x @ y, (complexes(2, 3), complexes(3, 2))),
    Case("dot_empty_contraction", lambda x, y: x @ y, (real(2, 0), real(0, 3))),
    Case("einsum_attention", lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
         (real(1, 3, 2, 4), real(1, 5, 2, 4))),
    Case("einsum_diagonal", lambda x: jnp.einsum("ii->i", x), (real(3, 3),)),
    Case("tensordot_kron", lambda x, y: (jnp.tensordot(x, y, 1), jnp.kron(x, y)),
         (real(2, 3), real(3, 2))),
    Case("ragged_dot", lax.ragged_dot, (real(6, 3), real(2, 3, 4), i32([2, 4]))),
]

# --- convolutions: (name, input, kernel, strides, padding, keyword arguments)
NCHW, NHWC = ("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")
Sizes = tuple[int, ...]
CONVOLUTIONS: list[tuple[str, Sizes, Sizes, Sizes, Any, dict[str, Any]]] = [
    ("nchw", (1, 3, 5, 5), (4, 3, 3, 3), (1, 1), "SAME", {"dimension_numbers": NCHW}),
    ("nhwc", (1, 5, 5, 3), (3, 3, 3, 4), (1, 1), "VALID", {"dimension_numbers": NHWC}),
    ("mixed_layouts", (5, 5, 1, 3), (4, 3, 3, 3), (1, 1), "SAME",
        {"dimension_numbers": ("HWNC", "OIHW", "NHWC")}),
    ("pointwise", (2, 3, 4, 4), (5, 3, 1, 1), (1, 1), "VALID", {"dimension_numbers": NCHW}),
    ("strided", (1, 3, 6, 6), (4, 3, 3, 3), (2, 2), "SAME", {"dimension_numbers": NCHW}),
    ("uneven_padding", (1, 2, 4, 5), (3, 2, 2, 3), (1, 2), ((0, 1), (2, 0)), {}),
    ("negative_padding", (1, 2, 5, 5), (3, 2, 2, 2), (1, 1), ((-1, 0), (0, -1)), {}),
    ("kernel_dilation", (1, 2, 7, 7), (3, 2, 3, 3), (1, 1), "VALID", {"rhs_dilation": (2, 2)}),
    ("input_dilation", (1, 2, 3, 3), (3, 2, 3, 3), (1, 1), ((2, 2), (2, 2)),
        {"lhs_dilation": (2, 2)}),
    ("groups", (1, 4, 4, 4), (6, 2, 3, 3), (1, 1), "SAME", {"feature_group_count": 2}),
    ("one_channel", (1, 4, 4, 1), (3, 3, 1, 1), (1, 1), "SAME", {"dimension_numbers": NHWC}),
    ("depthwise", (1, 4, 4, 3), (3, 3, 1, 3), (1, 1), "SAME",
        {"dimension_numbers": NHWC, "feature_group_count": 3}),
    ("batch_groups", (4, 2, 3, 3), (4, 2, 2, 2), (1, 1), "VALID", {"batch_group_count": 2}),
    ("1d", (2, 3, 6), (4, 3, 3), (1,), "SAME", {}),
    ("3d", (1, 2, 3, 3, 3), (2, 2, 2, 2, 2), (1, 1, 1), "VALID", {}),
    ("no_spatial_axes", (2, 3), (4, 3), (), (), {}),
    ("precision", (1, 2, 3, 3), (2, 2, 2, 2), (1, 1), "VALID",
        {"precision": lax.Precision.HIGHEST}),
]

CASES += [
    Case(f"conv_{name}",
         functools.partial(lax.conv_general_dilated, window_strides=strides, padding=pads, **more),
         (real(*x), real(*w, high=1.0)))
    for name, x, w, strides, pads, more in CONVOLUTIONS
]
CASES += [
    Case("conv_transpose", lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"),
         (real(1, 3, 3, 2), real(3, 3, 2, 2))),
    Case("conv_gradients", lambda x, w: jax.grad(lambda x, w: lax.conv(x, w, (2, 2), "SAME").sum(),
         (0, 1))(x, w), (real(1, 2, 5, 5), real(3, 2, 3, 3))),
    Case("conv_grouped_gradients", lambda x, w: jax.grad(lambda x, w: lax.conv_general_dilated(x, w,
         (1, 1), "SAME", feature_group_count=2).sum(), (0, 1))(x, w),
         (real(1, 4, 3, 3), real(4, 2, 3, 3))),
    Case("conv_under_vmap", jax.vmap(lambda x, w: lax.conv(x, w, (1, 1), "SAME")),
         (real(2, 1, 2, 3, 3), real(2, 2, 2, 2, 2))),
    Case("conv_int8_to_int32", lambda x, w: lax.conv(x, w, (1, 1), "VALID",
         preferred_element_type=jnp.int32),
         (ints(1, 2, 3, 3, dtype=np.int8), ints(2, 2, 2, 2, dtype=np.int8))),
    Case("conv_complex", lambda x, w: lax.conv(x, w, (1,), "SAME"),
         (complexes(1, 2, 4), complexes(2, 2, 3))),
    Case("conv_patches", lambda x: lax.conv_general_dilated_patches(x, (2, 2), (1, 1), "VALID"),
         (real(1, 2, 3, 3),)),
    Case("conv_local", lambda x, w: lax.conv_general_dilated_local(x, w, (1,), "VALID", (2,)),
         (real(1, 2, 4), real(3, 4, 3))),
    Case("convolve_1d", lambda x, y: jnp.convolve(x, y, mode="full"), (real(5), real(3))),
]

# --- shapes and indexing
SCATTER_ROWS = lax.ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)
CASES += [
    Case("pad", lambda x: lax.pad(x, 1.5, ((1, 2, 0), (0, 1, 0))), (ANY,)),
    Case("pad_negative", lambda x: lax.pad(x, 0.0, ((-1, 0, 0), (1, -1, 0))), (ANY,)),
    Case("pad_interior", lambda x: lax.pad(x, 0.0, ((0, 0, 2), (-1, 1, 1))), (ANY,)),
    Case("pad_with_traced_value", lambda x: lax.pad(x, x[0, 0], ((0, 0, 1), (1, 1, 0))), (ANY,)),
    Case("pad_reflect", lambda x: jnp.pad(x, ((0, 0), (2, 1)), mode="reflect"), (real(2, 4),)),
    Case("slice", lambda x: (x[1:, ::2], x[-1], lax.slice(x, (0, 1), (3, 4), (2, 1))),
         (real(3, 5),)),
    Case("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 1), (2, 3)), (real(4, 5), 1)),
    Case("dynamic_slice_out_of_bounds", lambda x, i: lax.dynamic_slice(x, (i, i), (2, 3)),
         (real(4, 5), 9)),
    Case("dynamic_index", lambda x, i: (x[i], lax.dynamic_index_in_dim(x, i, 1)), (real(4, 5), 2)),
    Case("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
         (real(4, 5), real(2, 2), 1)),
    Case("gather_rows", lambda x, i: (x[i], x[:, i], jnp.take(x, i, axis=1)),
         (real(4, 5), i32([0, 3, 3]))),
    Case("gather_points", lambda x, i, j: x[i, j], (real(4, 5), i32([0, 3, 1]), i32([4, 0, 2]))),
    Case("gather_modes", lambda x, i: tuple(x.at[i].get(mode=m) for m in ("clip", "fill")),
         (real(4), i32([-9, 2, 9]))),
    Case("gather_negative_and_slices", lambda x, i: x[1:, i, ::2], (real(3, 4, 5), i32([-1, 0]))),
    Case("gather_boolean_mask", lambda x: x[np.array([True, False, True])], (real(3, 2),)),
    Case("gather_under_vmap", jax.vmap(lambda x, i: x[i]),
         (real(3, 4), i32([[0, 1], [3, 3], [2, 0]]))),
    Case("take_along_axis", lambda x, i: jnp.take_along_axis(x, i, axis=1),
         (real(2, 4), ints(2, 3, high=4))),
    Case("embedding_lookup", lambda table, ids: table[ids] * 2.0, (real(7, 3), ints(2, 4))),
    Case("scatter_set", lambda x, i, u: x.at[i].set(u), (real(4, 3), i32([0, 2]), real(2, 3))),
    Case("scatter_add_repeated", lambda x, i: x.at[i].add(1.5), (real(4), i32([1, 1, 3]))),
    Case("scatter_sub", lambda x, i, u: lax.scatter_sub(x, i, u, SCATTER_ROWS),
         (real(4, 2), i32([[0], [2]]), real(2, 2))),
    Case("scatter_multiply", lambda x, i: x.at[i].multiply(2.0), (real(4), i32([0, 3]))),
    Case("scatter_min_max", lambda x, i: (x.at[i].min(0.0), x.at[i].max(0.0)),
         (real(4), i32([0, 1, 2]))),
    Case("scatter_apply", lambda x, i: x.at[i].apply(jnp.sin), (real(4), i32([0, 2]))),
    Case("scatter_drop", lambda x, i: x.at[i].set(7.0, mode="drop"), (real(4), i32([1, 44]))),
    Case("scatter_window", lambda x, i: x.at[i, 1:3].set(0.0), (real(4, 5), np.int32(2))),
    Case("scatter_under_vmap", jax.vmap(lambda x, i, u: x.at[i].add(u)),
         (real(3, 4), ints(3, high=4), real(3))),
    Case("segment_sum", lambda x, i: jax.ops.segment_sum(x, i, num_segments=4),
         (real(6, 2), ints(6, high=4))),
    Case("gather_gradient", jax.grad(lambda x, i: (x[i] ** 2).sum()), (real(4), i32([0, 3, 3]))),
    Case("concatenate", lambda x, y: (lax.concatenate([x, y, x], 0), jnp.hstack([x, x])),
         (ANY, real(1, 3))),
    Case("stack_unstack", lambda x, y: (jnp.stack([x, y], 1), jnp.unstack(x)), (ANY, UNIT)),
    Case("split", lambda x: (lax.split(x, (1, 3, 2), 1), jnp.split(x, 2)), (real(2, 6),)),
    Case("tile_repeat_roll", lambda x: (jnp.tile(x, (2, 1)), jnp.repeat(x, 2, 1),
         jnp.roll(x, 1, 0)), (ANY,)),
    Case("reshape_ravel", lambda x: (x.reshape(3, 2), x.ravel(), lax.reshape(x, (6,), (1, 0))),
         (ANY,)),
    Case("transpose", lambda x: (x.T, jnp.transpose(x, (2, 0, 1)), jnp.swapaxes(x, 0, 1)),
         (real(2, 3, 4),)),
    Case("rev_squeeze_expand", lambda x: (lax.rev(x, (0, 2)), x.squeeze(1), x[None, ..., None]),
         (real(2, 1, 3),)),
    Case("broadcast", lambda x: (lax.broadcast(x, (2, 3)), jnp.broadcast_to(x, (4, 3))),
         (real(3),)),
    Case("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (0, 2)), (real(2, 1),)),
    Case("iota", lambda x: x + lax.iota(jnp.float32, 3) + lax.broadcasted_iota(jnp.float32, (2, 3),
         0), (ANY,)),
    Case("eye_tri_diag", lambda x: (jnp.eye(3) @ x, jnp.tril(x), jnp.diag(x)), (real(3, 3),)),
    Case("meshgrid_linspace", lambda x: jnp.meshgrid(x, jnp.linspace(0.0, 1.0, 4)), (real(3),)),
]

# --- linear algebra and Fourier transforms
CASES += [
    Case("cholesky", lambda a: (lax.linalg.cholesky(a), lax.linalg.cholesky(a[None])[0]),
         (spd(3),)),
    Case("cholesky_update", lax.linalg.cholesky_update,
         (np.linalg.cholesky(spd(3)).T.copy(), real(3))),
    Case("qr", lambda a: (jnp.linalg.qr(a), jnp.linalg.qr(a, mode="r")), (real(4, 3),)),
    Case("householder", lax.linalg.householder_product, (real(4, 3), real(3))),
    Case("multiply_by_q", lax.linalg.ormqr, (real(4, 3), real(3), real(4, 2))),
    Case("svd", lambda a: (jnp.linalg.svd(a, full_matrices=False),
         lax.linalg.svd(a, compute_uv=False)),
         (real(3, 2),)),
    Case("eigh", lax.linalg.eigh, (spd(3),)),
    Case("eig", lambda a: jnp.linalg.eigvals(a), (real(3, 3),)),
    Case("hessenberg_tridiagonal", lambda a: (lax.linalg.hessenberg(a),
         lax.linalg.tridiagonal(a + a.T)),
         (real(3, 3),)),
    Case("schur", lax.linalg.schur, (real(3, 3),)),
    Case("lu", lax.linalg.lu, (real(2, 3, 3),)),
    Case("lu_pivots", lambda p: lax.linalg.lu_pivots_to_permutation(p, 4), (i32([2, 1, 3]),)),
    Case("triangular_solve", lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True,
         lower=True),
         (spd(3), real(3, 2))),
    Case("triangular_solve_right_transposed",
         lambda a, b: lax.linalg.triangular_solve(a, b, transpose_a=True, unit_diagonal=True),
         (spd(3), real(2, 3))),
    Case("tridiagonal_solve", lax.linalg.tridiagonal_solve,
         (real(3), real(3) + 5, real(3, high=1.0), real(3, 1))),
    Case("symmetric_product", lax.linalg.symmetric_product, (real(3, 2), spd(3))),
    Case("solve_inverse_det", lambda a, b: (jnp.linalg.solve(a, b), jnp.linalg.inv(a),
         jnp.linalg.slogdet(a)), (spd(3), real(3))),
    Case("cholesky_gradient", jax.grad(lambda a: jnp.linalg.cholesky(a).sum()), (spd(2),)),
    Case("matrix_power_expm", lambda a: (jnp.linalg.matrix_power(a, 3), jax.scipy.linalg.expm(a)),
         (real(2, 2),), slow=True),
    Case("fft_complex", lambda z: (jnp.fft.fft(z), jnp.fft.ifft2(z)), (complexes(2, 4),)),
    Case("fft_real", lambda x: (jnp.fft.rfft(x), jnp.fft.irfft(jnp.fft.rfft(x), 6)), (real(2, 6),)),
]

# --- control flow
CASES += [
    Case("scan", lambda c, xs: lax.scan(lambda c, x: (c + x, c * x), c, xs), (real(3), real(4, 3))),
    Case("scan_reverse_unrolled", lambda xs: lax.scan(lambda c, x: (c * 0.5 + x, c), 0.0, xs,
         reverse=True, unroll=2), (real(5),)),
    Case("scan_over_length", lambda c: lax.scan(lambda c, _: (jnp.sin(c), None), c, length=3),
         (real(2),)),
    Case("scan_pytrees", lambda xs: lax.scan(lambda c, x: ({"n": c["n"] + 1}, (x["a"], c["n"])),
         {"n": 0}, xs), ({"a": real(3, 2)},)),
    Case("scan_nested", lambda m: lax.scan(lambda c, r: lax.scan(lambda d, e: (d * e, d), c, r),
         1.0, m), (real(2, 3),)),
    Case("scan_closes_over_weight", lambda w, xs: lax.scan(lambda h, x: (jnp.tanh(h @ w + x),
         h.sum()), xs[0], xs), (real(3, 3), real(4, 3))),
    Case("scan_of_no_steps", lambda c, xs: lax.scan(lambda c, x: (c + x.sum(), x), c, xs),
         (np.float32(1), real(0, 3))),
    Case("scan_gradient", jax.grad(lambda w: lax.scan(lambda h, _: (jnp.sin(h * w), None), w,
         length=3)[0]), (np.float32(0.7),)),
    Case("while", lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2),
         (0, x)), (real(2),)),
    Case("while_with_constants", lambda x, n: lax.while_loop(lambda v: v.sum() < n, lambda v: v * n,
         x), (real(2, low=1.0), 9.0)),
    Case("while_under_vmap", jax.vmap(lambda n: lax.while_loop(lambda c: c < n, lambda c: c * 2 + 1,
         0)), (i32([3, 9, 0]),)),
    Case("fori_static", lambda x: lax.fori_loop(0, 3, lambda i, c: c * x + i, x), (real(2),)),
    Case("fori_dynamic", lambda x, n: lax.fori_loop(0, n, lambda i, c: c.at[i].add(1.0), x),
         (real(4), 3)),
    Case("cond", lambda p, x: lax.cond(p, jnp.sin, lambda v: v * 2, x), (np.bool_(False), ANY)),
    Case("cond_closes_over", lambda x, y: lax.cond(x.sum() > 0, lambda: (x, y), lambda: (y, x)),
         (ANY, UNIT)),
    Case("cond_under_vmap", jax.vmap(lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x)),
         (np.array([True, False]), real(2))),
    Case("cond_gradient", jax.grad(lambda x: lax.cond(x > 0, jnp.sin, lambda v: v**2, x)),
         (np.float32(-0.4),)),
    Case("cond_inside_scan", lambda xs: lax.scan(lambda c, x: (lax.cond(x > 0, jnp.add,
         jnp.subtract, c, x), c), 0.0, xs), (real(4),)),
    Case("switch", lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda v: v + 1], x), (2, ANY)),
    Case("switch_out_of_bounds", lambda i, x: lax.switch(i, [jnp.sin, jnp.cos], x), (9, ANY)),
    Case("map", lambda xs: lax.map(lambda x: (x.sum(), x + 1), xs), (real(3, 2),)),
    Case("map_batched", lambda xs: lax.map(jnp.sin, xs, batch_size=2), (real(5, 2),)),
    Case("associative_scan", lambda xs: lax.associative_scan(operator.mul, xs, reverse=True),
         (real(5),)),
    Case("custom_linear_solve", lambda a, b: cg(lambda v: a @ v, b,
         maxiter=4)[0], (spd(3), real(3))),
    Case("custom_root", lambda a: lax.custom_root(lambda x: x * x - a, a,
         lambda f, x: lax.fori_loop(0, 5, lambda _, y: y - f(y) / (2 * y), x),
         lambda g, y: y / g(1.0)), (np.float32(3.0),)),
    Case("platform_dependent", lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
         (ANY,)),
    Case("optimization_barrier", lambda x: lax.optimization_barrier((x + 1, {"y": x * 2})), (ANY,)),
]


# fmt: on
# --- calls, custom derivatives and transformations
@jax.custom_jvp
def double_sine(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


double_sine.defjvp(lambda primals, tangents: (double_sine(primals[0]), 2.0 * tangents[0]))


@jax.custom_vjp
def straight_through(x: jax.Array) -> jax.Array:
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


@jax.custom_gradient
def clipped_gradient(x: jax.Array) -> Any:
    return x**2, lambda g: jnp.clip(g, -0.1, 0.1)


@jax.custom_batching.custom_vmap
def affine(x: jax.Array) -> jax.Array:
    return 2 * x + 1


@affine.def_vmap
def affine_batched(_size: int, batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return 2 * x + 1, batched[0]


@jax.jit
def dense(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


@functools.partial(jax.jit, static_argnames=("power",))
def raised(x: jax.Array, power: int) -> jax.Array:
    return x**power


def mapped_over_devices(x: jax.Array) -> tuple[jax.Array, ...]:
    """Apply the collectives, over a mesh of one device."""
    mesh = jax.make_mesh(
        (1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
    )

    def body(v: jax.Array) -> tuple[jax.Array, ...]:
        return (
            lax.psum(v, "d"),
            lax.pmax(v, "d"),
            lax.pmin(v, "d"),
            lax.ppermute(v, "d", [(0, 0)]),
            lax.all_gather(v, "d", tiled=True),
            lax.all_to_all(v, "d", 0, 0, tiled=True),
            lax.psum_scatter(v, "d", tiled=True),
            v + lax.axis_index("d"),
        )

    spec = PartitionSpec("d")
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


def printing(x: jax.Array) -> jax.Array:
    jax.debug.print("sum {s}", s=x.sum())
    return x * 2


def host_sine(x: jax.Array) -> jax.Array:
    return jax.pure_callback(
        np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
    )


def ordered_host_doubling(x: jax.Array) -> jax.Array:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    double = functools.partial(io_callback, lambda v: np.asarray(v) * 2, shape, ordered=True)
    return double(double(x))


def mlp(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for layer in params:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


def lstm(w: jax.Array, xs: jax.Array) -> jax.Array:
    def cell(
        state: tuple[jax.Array, jax.Array], x: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        h, c = state
        i, f, g, o = jnp.split(jnp.concatenate([x, h]) @ w, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros(w.shape[1] // 4)
    return lax.scan(cell, (zero, zero), xs)[1]


PARAMS = [{"w": real(3, 4), "b": real(4)}, {"w": real(4, 2), "b": real(2)}]
# fmt: off
CASES += [
    Case("jit_nested_once", lambda x, w: dense(x, w) + 1, (ANY, real(3, 3))),
    Case("jit_shared_twice", lambda x, w: dense(dense(x, w), w), (ANY, real(3, 3))),
    Case("jit_inside_jit", jax.jit(lambda x, w: dense(x, w) * jax.jit(jnp.sum)(x)),
         (ANY, real(3, 3))),
    Case("jit_inline", lambda x: jax.jit(jnp.sin, inline=True)(x) + 1, (ANY,)),
    Case("jit_static_argument", lambda x: (raised(x, power=3), raised(x, power=2)), (ANY,)),
    Case("jit_of_identity", lambda x, y: jax.jit(lambda a, b: (b, a))(x, y), (ANY, UNIT)),
    Case("custom_jvp", lambda x: double_sine(x) + 1, (ANY,)),
    Case("custom_jvp_gradient", jax.grad(lambda x: double_sine(x).sum()), (ANY,)),
    Case("custom_vjp", lambda x: straight_through(x) * 2, (ANY,)),
    Case("custom_vjp_gradient", jax.grad(lambda x: straight_through(x).sum()), (ANY,)),
    Case("custom_gradient", jax.value_and_grad(lambda x: clipped_gradient(x).sum()), (ANY,)),
    Case("custom_vmap", lambda x: (affine(x), jax.vmap(affine)(x)), (ANY,)),
    Case("linear_call", lambda x, s: jax.custom_derivatives.linear_call(lambda r, v: v * r,
         lambda r, v: v * r, s, x), (ANY, np.float32(3))),
    Case("activations", lambda x: (jax.nn.relu(x), jax.nn.softplus(x), jax.nn.silu(x),
         jax.nn.elu(x)), (ANY,)),
    Case("remat", jax.grad(lambda x: jax.checkpoint(lambda v: jnp.sin(jnp.cos(v)))(x).sum()),
         (ANY,)),
    Case("checkpoint_name", lambda x: checkpoint_name(jnp.sin(x), "sine") + 1, (ANY,)),
    Case("named_call_and_scope", lambda x: jax.named_call(jax.named_scope("s")(jnp.sin),
         name="c")(x), (ANY,)),
    Case("composite", lambda x: lax.composite(jnp.sin, name="project.sine")(x), (ANY,)),
    Case("stop_gradient", jax.grad(lambda x: (lax.stop_gradient(x) * x).sum()), (ANY,)),
    Case("value_and_grad", jax.value_and_grad(lambda x: (jnp.tanh(x) ** 2).sum()), (ANY,)),
    Case("forward_and_hessian", lambda x: (jax.jacfwd(jnp.sin)(x),
         jax.hessian(lambda v: (v**3).sum())(x)), (real(2),)),
    Case("vjp", lambda x, g: jax.vjp(lambda v: v @ v.T, x)[1](g), (ANY, real(2, 2))),
    Case("gradient_of_unused_input", jax.grad(lambda x, y: x.sum(), argnums=(0, 1)), (ANY, UNIT)),
    Case("vmap_axes", jax.vmap(lambda x, y: x @ y, in_axes=(1, None), out_axes=1),
         (real(3, 2), real(3, 4))),
    Case("vmap_nested", jax.vmap(jax.vmap(lambda x, y: x * y + 1, (0, None)), (None, 0)),
         (real(2), real(3))),
    Case("vmap_collective", jax.vmap(lambda x: x / lax.psum(x, "i"), axis_name="i"),
         (real(4, low=1.0),)),
    Case("shard_map", mapped_over_devices, (real(4),)),
    Case("sharding_constraint", lambda x: lax.with_sharding_constraint(x,
         SingleDeviceSharding(jax.devices()[0])), (ANY,)),
    Case("dead_code_sink", lambda x: (lax.dce_sink(x * 2), x + 1)[1], (ANY,)),
    Case("debug_print", printing, (ANY,)),
    Case("debug_callback", lambda x: (jax.debug.callback(lambda _: None, x), x + 1)[1], (ANY,)),
    Case("pure_callback", host_sine, (ANY,)),
    Case("ordered_io_callback", ordered_host_doubling, (ANY,)),
    Case("mlp", mlp, (PARAMS, real(2, 3))),
    Case("mlp_gradient", jax.grad(lambda p, x: mlp(p, x).sum()), (PARAMS, real(2, 3))),
    Case("attention", attention, (real(1, 4, 2, 3), real(1, 4, 2, 3, high=1.0),
         real(1, 4, 2, 3, high=1.5))),
    Case("layer_norm", layer_norm, (real(2, 4), real(4), real(4, high=1.0))),
    Case("cross_entropy_gradient", jax.grad(cross_entropy), (real(3, 4), ints(3, high=4))),
    Case("lstm", lstm, (real(5, 12), real(4, 2))),
    Case("residual_one_hot", lambda x, i: x + jax.nn.one_hot(i, 3) @ x,
         (real(3, 3), ints(3, high=3))),
]

# --- random numbers: typed keys, raw keys, keys as input and output
CASES += [
    Case("random_uniform_normal", lambda k: (jax.random.uniform(k, (3,)),
         jax.random.normal(k, (2,))), (KEY,)),
    Case("random_bits_split", lambda k: tuple(jax.random.bits(s,
         (2,)) for s in jax.random.split(k)), (KEY,)),
    Case("random_keys_out", lambda k: (jax.random.split(k, 3), jax.random.fold_in(k, 5), k),
         (KEY,)),
    Case("random_seed_inside", lambda x: (jax.random.key(x),
         jax.random.normal(jax.random.key(3), (2,))), (np.int32(9),)),
    Case("random_key_data", lambda k: jax.random.wrap_key_data(jax.random.key_data(k) + 1), (KEY,)),
    Case("random_key_array", lambda ks: jax.vmap(lambda k: jax.random.normal(k, (2,)))(ks[::-1]),
         (jax.random.split(KEY, 3),)),
    Case("random_key_in_scan", lambda k: lax.scan(lambda c, _: tuple(jax.random.split(c)), k,
         length=2), (KEY,)),
    Case("random_key_select", lambda p, k: jnp.where(p, k, jax.random.fold_in(k, 1)),
         (np.bool_(False), KEY)),
    Case("random_raw_key", lambda k: (jax.random.split(k), jax.random.uniform(k, (2,))),
         (jax.random.PRNGKey(3),)),
    Case("random_rbg_key", lambda k: jax.random.bits(k, (3,)), (jax.random.key(1, impl="rbg"),)),
    Case("random_permutation_choice",
         lambda k, x: (jax.random.permutation(k, x), jax.random.choice(k, x)), (KEY, real(5))),
    Case("random_categorical_gumbel", lambda k, x: jax.random.categorical(k, x), (KEY, ANY)),
    Case("random_gamma", lambda k, a: jax.random.gamma(k, a), (KEY, POSITIVE[0]), slow=True),
    Case("random_clone", lambda k: jax.random.bits(jax.random.clone(k)), (KEY,)),
    Case("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (3,)),
         (np.array([1, 2, 3, 4], np.uint32),)),
]

# --- edge cases of signatures: structure, constants, scalars, sizes of zero
CONSTANT = real(3, 3)
CASES += [
    Case("staged_constant", lambda x: lax.stage(CONSTANT[0]) + x, (ANY,)),
    Case("identity", lambda x: x, (ANY,)),
    Case("inputs_swapped", lambda x, y: (y, x), (ANY, UNIT)),
    Case("output_repeated", lambda x: (jnp.sin(x),) * 2 + (x, x), (ANY,)),
    Case("equal_subexpressions", lambda x: jnp.sin(x) + jnp.sin(x), (ANY,)),
    Case("unused_input_and_dead_code", lambda x, y: (jnp.cos(y), x + 1)[1], (ANY, UNIT)),
    Case("no_outputs", lambda x: (), (ANY,)),
    Case("no_inputs", lambda: (jnp.ones((2, 2)), jnp.arange(3)), ()),
    Case("constant_outputs", lambda x: (1.0, 3, True, np.float32(2), CONSTANT, x), (ANY,)),
    Case("literals", lambda x: (x + 1.5) * -2 + jnp.float32(0.1), (ANY,)),
    Case("closed_over_array", lambda x: x @ CONSTANT + CONSTANT[0], (ANY,)),
    Case("closed_over_inside_jit", lambda x: jax.jit(lambda v: v @ CONSTANT)(x), (ANY,)),
    Case("scalar_arguments", lambda x, n, flag: (x * n, n + 1, flag), (2.5, 3, True)),
    Case("rank_zero_array", lambda x: jnp.sqrt(x)[None] + x, (np.float32(4.0),)),
    Case("high_rank", lambda x: x.transpose(6, 5, 4, 3, 2, 1, 0).sum((1, 3)),
         (real(1, 2, 1, 2, 1, 2, 3),)),
    Case("many_operands", lambda *xs: (jnp.concatenate(xs), sum(xs)),
         tuple(np.array([i, i + 1], np.float32) for i in range(12))),
    Case("pytree_arguments", lambda t: {"out": (t["a"][0] + t["b"].x, [t["b"].y])},
         ({"a": [ANY], "b": Point(UNIT, 2.0)},)),
    Case("pytree_with_none", lambda t: (None, t["x"] * 2, [None]), ({"x": ANY, "none": None},)),
    Case("namedtuple_output", lambda x: Point(x=x + 1, y={"z": x}), (ANY,)),
    Case("keyword_by_partial", functools.partial(lambda x, *, axis: x.sum(axis), axis=1), (ANY,)),
    Case("default_argument", lambda x, scale=3.0: x * scale, (ANY,)),
    Case("static_closure", lambda x: sum(x[i] * n for i, n in enumerate((1, 2))), (ANY,)),
    Case("empty_elementwise", lambda x: (jnp.sin(x), x.T, x.sum(0), x.sum()), (real(0, 3),)),
    Case("empty_concatenate_pad", lambda x, y: (jnp.concatenate([x, y]), jnp.pad(x, 1)),
         (real(0, 2), real(3, 2))),
    Case("empty_slice_and_gather", lambda x, i: (x[2:2], x[i]), (real(4), np.zeros(0, np.int32))),
]
