"""Lowerings of convolutions to lax code.

All of them work for any layout, stride, padding (including negative), input and kernel dilation, in
one and two spatial dimensions. They are equal to the plain lowering for finite values; 16-bit
floats are accumulated in float32. Operations on the kernel are plain lax code that depends on the
kernel only, so that they are hoisted out of the call if the kernel is a weight.

Letters as in `convolution`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.graph.graph import Node
from xrl_jax.libraries.base import Condition, Epilogue, Lowering
from xrl_jax.libraries.xla.conv_facts import image_not_in, not_in, splits
from xrl_jax.libraries.xla.convolution import (
    Conv,
    accumulator,
    contract,
    dense,
    merge,
    open_conv,
    taps,
)

# --- the lowerings: (convolution, x, kernel as O C spatial) -> result ---


def matmul(
    c: Conv,
    x: jax.Array,
    w: jax.Array,
    *,
    transposed: bool = False,
    product: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    ((_, rows),) = taps(c, x, w.shape[2:])
    return contract(
        c, rows, w.reshape(w.shape[:2]), in_first=c.first == transposed, product=product
    )


def _by_taps(c: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
    terms = [
        contract(c, part, w[(slice(None), slice(None), *at)], in_first=not c.first)
        for at, part in taps(c, x, w.shape[2:])
    ]
    return sum(terms[1:], terms[0])


def _patches(c: Conv, x: jax.Array, kernel: tuple[int, ...]) -> jax.Array:
    """Return the input that each kernel position reads, concatenated as features within groups."""
    parts = [part for _, part in taps(c, x, kernel)]
    at, shape = c.feature, parts[0].shape
    split = (*shape[:at], c.groups, shape[at] // c.groups, *shape[at + 1 :])
    patches = lax.concatenate([part.reshape(split) for part in parts], at + 1)
    return patches.reshape(*shape[:at], len(parts) * shape[at], *shape[at + 1 :])


def _im2col(c: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
    kernel = jnp.moveaxis(w.reshape(*w.shape[:2], -1), 1, 2).reshape(w.shape[0], -1)
    return contract(c, _patches(c, x, w.shape[2:]), kernel, in_first=not c.first)


def _im2col_one_axis(c: Conv, x: jax.Array, w: jax.Array, *, gathered: int) -> jax.Array:
    """Compute the convolution with im2col along one spatial axis only, the axis `gathered`.

    Kernel positions along that axis become features of the patches. Positions along the other axis
    become features of the product, which are then shifted and summed. The patches are smaller than
    those of im2col and the product is wider. kn2row (Vasudevan et al. 2017, arXiv:1709.03395)
    treats both axes in the second way.
    """
    g, p, added = c.groups, w.shape[0] // c.groups, 1 - gathered
    positions, step, dilation = w.shape[2 + added], c.stride[added], c.rhs_dilation[added]
    unstrided = replace(c, stride=tuple(1 if a == added else n for a, n in enumerate(c.stride)))
    one = tuple(1 if a == added else k for a, k in enumerate(w.shape[2:]))
    kernel = lax.transpose(w.reshape(g, p, *w.shape[1:]), (0, 3 + added, 1, 3 + gathered, 2))
    kernel = kernel.reshape(g * positions * p, -1)
    y = contract(unstrided, _patches(unstrided, x, one), kernel, in_first=not c.first)
    at, axis = c.feature, c.layout[2 + added] + (2 if c.first else 0)
    y = y.reshape(*y.shape[:at], g, positions, p, *y.shape[at + 1 :])
    reach = y.shape[axis] - (positions - 1) * dilation
    terms = [
        lax.slice_in_dim(part, i * dilation, i * dilation + reach, step, axis)
        for i, part in enumerate(jnp.split(y, positions, axis=at + 1))
    ]
    total = sum(terms[1:], terms[0])
    return total.reshape(*total.shape[:at], g * p, *total.shape[at + 3 :])


def _shifted(c: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
    g, width, wide = c.groups, w.shape[1], accumulator(x.dtype)
    at = c.feature
    total: Any = None
    kernel = w.reshape(g, w.shape[0] // g, *w.shape[1:]).astype(wide)
    for position, part in taps(c, x, w.shape[2:]):
        shape = part.shape
        part = part.astype(wide).reshape(*shape[:at], g, width, *shape[at + 1 :])
        for i in range(width):
            factor = kernel[(slice(None), slice(None), i, *position)]  # [G, P]
            factor = factor.reshape(*factor.shape, *(1,) * (c.rank - at - 1))
            term = lax.slice_in_dim(part, i, i + 1, axis=at + 1) * factor
            total = term if total is None else total + term
    return total.reshape(*total.shape[:at], -1, *total.shape[at + 2 :])


def _rotated(c: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute as `_shifted`, but with the features of each group rotated against the result's, so
    that no feature is broadcast.
    """
    g, width, wide = c.groups, w.shape[1], accumulator(x.dtype)
    at = c.feature
    kernel = w.reshape(g, width, *w.shape[1:]).astype(wide)
    inputs = x.reshape(*x.shape[:at], g, width, *x.shape[at + 1 :])
    lanes = np.arange(width)
    total: Any = None
    for turn in range(width):
        factors = kernel[:, lanes, (lanes + turn) % width]  # [G, C, spatial]
        parts = [
            lax.slice_in_dim(inputs, turn, width, axis=at + 1),
            lax.slice_in_dim(inputs, 0, turn, axis=at + 1),
        ]
        transposed = lax.concatenate(parts, at + 1).reshape(x.shape) if turn else x
        for position, part in taps(c, transposed, w.shape[2:]):
            factor = factors[(slice(None), slice(None), *position)]
            term = part.astype(wide) * factor.reshape(-1, *(1,) * (c.rank - at - 1))
            total = term if total is None else total + term
    return total


def _surplus(c: Conv, n: int, k: int) -> int:
    """Return how many extra rows make the result taller than an image of `n` rows."""
    low, high = c.padding[0]
    return max(n + 1 - (n + low + high - (k - 1) * c.rhs_dilation[0]), 0)


def _overhang(c: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute the convolution with surplus rows, which are dropped.

    XLA:CPU uses YNNPACK for a convolution only if the result is no larger than the image, and its
    own kernel is up to 2.5 times faster for large images (jax 0.10.2).
    """
    rows = c.layout[2]
    surplus = _surplus(c, x.shape[rows], w.shape[2])
    (low, high), *others = c.padding
    y = dense(replace(c, padding=((low, high + surplus), *others)), x, w)
    return lax.slice_in_dim(y, 0, y.shape[rows] - surplus, axis=rows)


def _split(c: Conv, x: jax.Array, w: jax.Array, *, merged: int = 1) -> jax.Array:
    n = c.groups // merged
    w = merge(w, c.groups, merged)
    one = replace(c, groups=1)
    inputs = jnp.split(x, n, axis=c.feature)
    kernels = jnp.split(w, n, axis=0)
    parts = [dense(one, a, b) for a, b in zip(inputs, kernels, strict=True)]
    return lax.concatenate(parts, c.feature)


def _expanded(c: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
    return dense(replace(c, groups=1), x, merge(w, c.groups, c.groups))


# --- the table ---


def conv_lowering(
    name: str,
    fn: Callable[..., jax.Array],
    *when: Condition,
    first: bool | None = None,
    **more: Any,
) -> Lowering:
    """Return a lowering made from a function of (convolution, image, kernel as O C spatial).

    Args:
      when: conditions in addition to `ConvFacts.suits`.
      first: whether `fn` works with features first or last, between transposes; None for the layout
        of the image.
      more: further attributes of the row.
    """

    def lowered(node: Node, x: jax.Array, w: jax.Array, **epilogue: Epilogue) -> jax.Array:
        c, x, w = open_conv(node, x, w, first=first)
        return c.close(fn(c, x, w, **epilogue))

    return Lowering(name, lowered, ("suits", *when), **more)


def _transposed(c: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
    return matmul(c, x, w, transposed=True)


def _split_by(merged: int) -> Callable[..., jax.Array]:
    return lambda c, x, w: _split(c, x, w, merged=merged)


def _im2col_along(gathered: int) -> Callable[..., jax.Array]:
    return lambda c, x, w: _im2col_one_axis(c, x, w, gathered=gathered)


_row = conv_lowering
_LAST, _FIRST = dict(first=False), dict(first=True)
CONV: tuple[Lowering, ...] = (
    _row("matmul", matmul, "is_pointwise", source="XLA gap: 1x1 x3.9"),
    _row("matmul_transposed", _transposed, "is_pointwise", source="XLA gap: 1x1 x5.5"),
    _row("nhwc", dense, not_in(False), **_LAST, source="XLA gap: NHWC x1.0-1.4"),
    _row("nchw", dense, not_in(True), **_FIRST, source="XLA gap: NCHW"),
    _row("shifted", _shifted, "few_terms", source="XLA gap: depthwise x40, grouped x18"),
    _row("split", _split, splits(1), source="XLA gap: 32 split convs x3.9"),
    *(
        _row(
            f"split{k}", _split_by(k), splits(k), bounded=True, source="XLA gap: merged groups x2.3"
        )
        for k in (2, 4)
    ),
    _row("im2col", _im2col, "few_patches", source="XLA gap: im2col x3.4"),
    _row("taps", _by_taps, "few_taps", source="XLA gap: shifted matmuls"),
    _row("dense", _expanded, "expands", bounded=True, source="XLA gap: zero-expanded x2.5"),
    _row(
        "nhwc_matmul",
        matmul,
        "is_pointwise",
        image_not_in(False),
        **_LAST,
        source="XLA gap: NHWC x3.0",
    ),
    _row(
        "nhwc_shifted",
        _shifted,
        "few_terms",
        image_not_in(False),
        **_LAST,
        source="XLA gap: depthwise NHWC x19",
    ),
    _row(
        "nchw_shifted",
        _shifted,
        "few_terms",
        image_not_in(True),
        **_FIRST,
        source="XLA gap: depthwise NCHW x40",
    ),
    _row(
        "nhwc_split", _split, splits(1), image_not_in(False), **_LAST, source="XLA gap: split x3.3"
    ),
    *(
        _row(
            f"nhwc_split{k}",
            _split_by(k),
            splits(k),
            image_not_in(False),
            **_LAST,
            bounded=True,
            source="XLA gap: merged groups NHWC",
        )
        for k in (2, 4)
    ),
    _row("rotated", _rotated, "few_terms", "square", source="XLA gap: grouped, 4 wide x2.0"),
    _row("overhang", _overhang, "overhangs", source="measured: YNNPACK against XLA's own"),
    _row("half_rows", _im2col_along(0), "halves", source="measured: grouped x1.4"),
    _row("half_columns", _im2col_along(1), "halves", source="measured: grouped x1.4"),
)
