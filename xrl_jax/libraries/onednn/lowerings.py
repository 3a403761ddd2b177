"""The lowerings that oneDNN adds to the table: its convolution, its products, and Winograd's
convolution. Where the library is missing, they compute the same through XLA's own calls, or as lax
code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.graph.graph import Node
from xrl_jax.libraries.base import NO_EPILOGUE, Epilogue, Lowering, Rounding, all_of
from xrl_jax.libraries.onednn import calls, operand_types, winograd
from xrl_jax.libraries.onednn.operand_types import LARGEST
from xrl_jax.libraries.xla.conv import conv_lowering, matmul
from xrl_jax.libraries.xla.conv_facts import ConvFacts
from xrl_jax.libraries.xla.convolution import Conv, dense, padded
from xrl_jax.libraries.xla.dot import as_matrices, dot_lowering
from xrl_jax.libraries.xla.plain import conv_layouts, dot_dims

_MAX_TILED = 1 << 24  # elements of an image; its tiles take a multiple of that
# The error, relative to a tile's largest value, from sums over a tile that cancel in each result.
_TILE_ERROR = {"float32": 16 * 2.0**-23}
_NAME = "onednn"


def _onednn(
    c: Conv,
    x: jax.Array,
    w: jax.Array,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    right: str = "float32",
) -> jax.Array:
    """Convolve by oneDNN, features last; by XLA where oneDNN does not take the arrays.

    Args:
      right: type in which to multiply; see `calls.convolution`.
    """
    if right == "float32" and not calls.takes(x, w):
        return epilogue(dense(c, x, w))
    c, x = _only_padded(c, x)
    return calls.convolution(
        x,
        lax.transpose(w, (*range(2, c.rank), 1, 0)),
        stride=c.stride,
        padding=c.padding,
        dilation=c.rhs_dilation,
        groups=c.groups,
        epilogue=epilogue,
        right=right,
    )


def _only_padded(c: Conv, x: jax.Array) -> tuple[Conv, jax.Array]:
    """Return an equivalent convolution with an undilated image and without negative padding."""
    if min(low for pair in c.padding for low in pair) >= 0 and max(c.lhs_dilation) == 1:
        return c, x
    n = len(c.stride)
    return replace(c, padding=((0, 0),) * n, lhs_dilation=(1,) * n), padded(c, x)


def _winograd(m: int) -> Callable[..., jax.Array]:
    def fn(c: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
        c, x = _only_padded(c, x)
        w = winograd.transformed(w, m)
        return calls.winograd_convolution(x, w, m, c.padding, c.precision)

    return fn


def _onednn_matmul(transposed: bool) -> Callable[..., jax.Array]:
    def fn(c: Conv, x: jax.Array, w: jax.Array, epilogue: Epilogue = NO_EPILOGUE) -> jax.Array:
        if not calls.takes(x, w):
            return epilogue(matmul(c, x, w, transposed=transposed))
        if epilogue.addend is not None:
            epilogue = epilogue._replace(addend=epilogue.addend.reshape(-1, w.shape[0]))
        product = partial(calls.dot_general, epilogue=epilogue)
        return matmul(c, x, w, transposed=transposed, product=product)

    return fn


def _dot(out_in: bool) -> Callable[..., jax.Array]:
    def fn(
        node: Node, lhs: jax.Array, rhs: jax.Array, epilogue: Epilogue = NO_EPILOGUE
    ) -> jax.Array:
        if not calls.takes_product(lhs, rhs):
            return epilogue(as_matrices(node, lhs, rhs, out_in=out_in))

        def product(left: jax.Array, right: jax.Array, numbers: Any) -> jax.Array:
            after = epilogue
            if after.addend is not None:
                after = after._replace(addend=after.addend.reshape(*left.shape[:-1], -1))
            return calls.dot_general(left, right, numbers, after)

        return as_matrices(node, lhs, rhs, out_in=out_in, product=product)

    return fn


def _narrow_dot(dtype: str) -> Callable[..., jax.Array]:
    """Return a product that rounds its operands to this type: as a convolution of one row of
    pixels, because not all of the library's products in int8 are fast.
    """

    def fn(
        node: Node, lhs: jax.Array, rhs: jax.Array, epilogue: Epilogue = NO_EPILOGUE
    ) -> jax.Array:
        def product(left: jax.Array, right: jax.Array, _: Any) -> jax.Array:
            (m, k), n = left.shape, right.shape[1]
            after = epilogue
            if after.addend is not None:
                after = after._replace(addend=after.addend.reshape(1, 1, m, n))
            y = calls.convolution(
                left.reshape(1, 1, m, k),
                right.astype(left.dtype).reshape(1, 1, k, n),
                stride=(1, 1),
                padding=((0, 0), (0, 0)),
                dilation=(1, 1),
                groups=1,
                epilogue=after,
                right=dtype,
            )
            return y.reshape(m, n)

        return as_matrices(node, lhs, rhs, out_in=False, product=product)

    return fn


def _tiles(c: ConvFacts) -> Any:
    """Whether a 3 x 3 kernel on one group of features has no stride and no dilation of its own, and
    neither the image nor the result is too large.
    """
    few = [c.product(*(sizes[i] for i in range(4))) <= _MAX_TILED for sizes in (c.image, c.result)]
    three = all_of(n == winograd.KERNEL for n in c.window) & (c.groups == 1)
    return c.moves_by_one("stride", "rhs_dilation") & three & few[0] & few[1]


def _stays_last(c: ConvFacts) -> Any:
    """Whether features are last in the image and in the result."""
    return c.ends_in_features & c.image_layout_is(False)


_ON_CPU = ("cpu",)
_PRODUCT: dict[str, Any] = dict(
    absorbs=_stays_last, platforms=_ON_CPU, source="measured: 64 features x1.4"
)
_DOT: dict[str, Any] = dict(
    absorbs="ends_in_columns",
    platforms=_ON_CPU,
    source="measured: 64 features x1.4",
)
# Errors of one product, relative to the largest operands; those of integers are absolute ones.
_NARROW = {"bfloat16": 2.0**-8, "int8": 2.0 / 63, "uint8": 2.0 / 127, "int16": 2.0 / LARGEST}


def _narrow(dtype: str, summed: Callable[[Node, int, int], Sequence[int]]) -> dict[str, Any]:
    """Return the attributes of a row that rounds to a type.

    Args:
      summed: returns the axes of operand 0 or 1 that are summed over, given its rank.
    """

    def in_bfloat16(_: Node, w: np.ndarray) -> np.ndarray:
        return w.astype(jnp.bfloat16).astype(np.float32)

    def in_int8(node: Node, w: np.ndarray) -> np.ndarray:
        axes = summed(node, w.ndim, 1)
        features = tuple(d for d in range(w.ndim) if d not in axes)
        last = range(-len(features), 0)
        moved = np.moveaxis(w, features, last)
        by_feature = moved.reshape(-1, math.prod(w.shape[d] for d in features))
        levels, factors = calls.kernel_levels(by_feature, unsigned=dtype == "uint8")
        return np.moveaxis((levels * factors).reshape(moved.shape), last, features)

    def rows_in_int16(node: Node, x: jax.Array) -> jax.Array:
        levels, factors = operand_types.levels_along(x, summed(node, x.ndim, 0))
        return levels * factors

    def in_int16(node: Node, w: np.ndarray) -> np.ndarray:
        levels, factors = operand_types.levels_along(w, summed(node, w.ndim, 1))
        return levels * factors

    rounds = {
        "bfloat16": Rounding(dtype, lambda _, x: lax.reduce_precision(x, 8, 7), in_bfloat16),
        "int16": Rounding(dtype, rows_in_int16, in_int16),
    }.get(dtype, Rounding(dtype, lambda _, x: operand_types.rounded(x), in_int8))
    return dict(
        rounds=rounds,
        error={"float32": _NARROW[dtype]},
        platforms=_ON_CPU,
        without_library=True,
    )


def _in_convolution(node: Node, rank: int, operand: int) -> Sequence[int]:
    (_, features, *_), (feature, *_), _ = conv_layouts(node)
    return [features] if operand == 0 else [d for d in range(rank) if d != feature]


def _in_product(node: Node, rank: int, operand: int) -> Sequence[int]:
    del rank
    contracted, _ = dot_dims(node)
    return contracted[operand]


_SOURCES = {
    "int16": "measured: x1.8",
    "int8": "measured: x2.0",
    "uint8": "measured: x2.0",
    "bfloat16": "measured with AVX512-BF16: x2.2",
}
_WHERE = {"int16": ("is_pointwise",)}  # conditions on convolutions, by type
_AS_MATRIX = ("is_pointwise", "is_float32", "one_matrix")
LOWERINGS: Mapping[str, tuple[Lowering, ...]] = {
    "conv": (
        conv_lowering(
            _NAME,
            _onednn,
            "is_float32",
            first=False,
            absorbs="ends_in_features",
            platforms=_ON_CPU,
            source="measured: grouped x2.5",
        ),
        conv_lowering(f"{_NAME}_matmul", _onednn_matmul(False), *_AS_MATRIX, **_PRODUCT),
        conv_lowering(f"{_NAME}_matmul_transposed", _onednn_matmul(True), *_AS_MATRIX, **_PRODUCT),
        *(
            conv_lowering(
                f"winograd{m}",
                _winograd(m),
                "is_float32",
                _tiles,
                first=False,
                error=_TILE_ERROR,
                bounded=True,
                instead=_NAME,
                algorithm="tiles",
                without_library=True,
                source="Lavin, Gray 2016",
            )
            for m in winograd.TILES
        ),
        *(
            conv_lowering(
                f"{_NAME}_{dtype}",
                partial(_onednn, right=dtype),
                "is_float32",
                *_WHERE.get(dtype, ()),
                first=False,
                absorbs="ends_in_features",
                source=_SOURCES[dtype],
                **_narrow(dtype, _in_convolution),
            )
            for dtype in _NARROW
        ),
    ),
    "dot": (
        dot_lowering(_NAME, _dot(False), "in_float32", **_DOT),
        dot_lowering(f"{_NAME}_transposed", _dot(True), "in_float32", **_DOT),
        *(
            dot_lowering(
                f"{_NAME}_{dtype}",
                _narrow_dot(dtype),
                "in_float32",
                "without_batch",
                absorbs="ends_in_columns",
                source=_SOURCES[dtype],
                **_narrow(dtype, _in_product),
            )
            for dtype in _NARROW
        ),
    ),
}
