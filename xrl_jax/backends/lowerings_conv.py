"""Ways for a convolution to become lax code.

All forms work for any layout, stride, padding (negative too), input and kernel dilation, in one
and two spatial dimensions. They are equal to the plain form for finite values; 16-bit floats are
accumulated in float32. What they do to the kernel is plain lax code on the kernel alone, so that
hoisting takes it out of the call where the kernel is a weight.

Letters as in `convolution`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.backends import onednn
from xrl_jax.backends.convolution import (
    Conv,
    accumulator,
    contract,
    dense,
    merge,
    open_conv,
    padded,
    taps,
)
from xrl_jax.backends.onednn import NOTHING, Epilogue
from xrl_jax.backends.plain import Lowering, conv_layouts, dims, dtype_attr, nothing, number
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node

_MAX_TAPS = 25  # kernel positions that are worth an operation each
_MAX_TERMS = 128  # products of an elementwise form, per element of the result
_MAX_SPLIT = 64  # convolutions that one may be split into
_MAX_DENSE = 1 << 22  # elements of an expanded kernel
_MAX_PATCHES = 1 << 26  # elements of the patches of im2col


# --- the forms: (convolution, x, kernel as O C spatial) -> result ---


def _matmul(
    c: Conv,
    x: jax.Array,
    w: jax.Array,
    *,
    turned: bool = False,
    product: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    ((_, rows),) = taps(c, x, w.shape[2:])
    return contract(c, rows, w.reshape(w.shape[:2]), in_first=c.first == turned, product=product)


def _by_taps(c: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
    terms = [
        contract(c, part, w[(slice(None), slice(None), *at)], in_first=not c.first)
        for at, part in taps(c, x, w.shape[2:])
    ]
    return sum(terms[1:], terms[0])


def _patches(c: Conv, x: jax.Array, kernel: tuple[int, ...]) -> jax.Array:
    """What the kernel's positions meet, side by side as features, group by group."""
    parts = [part for _, part in taps(c, x, kernel)]
    at, shape = c.feature, parts[0].shape
    split = (*shape[:at], c.groups, shape[at] // c.groups, *shape[at + 1 :])
    patches = lax.concatenate([part.reshape(split) for part in parts], at + 1)
    return patches.reshape(*shape[:at], len(parts) * shape[at], *shape[at + 1 :])


def _im2col(c: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
    kernel = jnp.moveaxis(w.reshape(*w.shape[:2], -1), 1, 2).reshape(w.shape[0], -1)
    return contract(c, _patches(c, x, w.shape[2:]), kernel, in_first=not c.first)


def _half(c: Conv, x: jax.Array, w: jax.Array, *, gathered: int) -> jax.Array:
    """Half of im2col: positions along one spatial axis become features of the patches, those along
    the other features of the product, which are added up where they belong.

    Smaller patches than im2col's, and a wider product; kn2row (Vasudevan et al. 2017,
    arXiv:1709.03395) does so for both axes.
    """
    g, p, added = c.groups, w.shape[0] // c.groups, 1 - gathered
    positions, step, dilation = w.shape[2 + added], c.stride[added], c.rhs_dilation[added]
    every = replace(c, stride=tuple(1 if a == added else n for a, n in enumerate(c.stride)))
    one = tuple(1 if a == added else k for a, k in enumerate(w.shape[2:]))
    kernel = lax.transpose(w.reshape(g, p, *w.shape[1:]), (0, 3 + added, 1, 3 + gathered, 2))
    kernel = kernel.reshape(g * positions * p, -1)
    y = contract(every, _patches(every, x, one), kernel, in_first=not c.first)
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
    """As `_shifted`, the features of a group turned against the result's: no lane is copied."""
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
        turned = lax.concatenate(parts, at + 1).reshape(x.shape) if turn else x
        for position, part in taps(c, turned, w.shape[2:]):
            factor = factors[(slice(None), slice(None), *position)]
            term = part.astype(wide) * factor.reshape(-1, *(1,) * (c.rank - at - 1))
            total = term if total is None else total + term
    return total


def _surplus(c: Conv, n: int, k: int) -> int:
    """Rows to compute beyond the result's for it to be taller than the image; of `n` input rows."""
    low, high = c.padding[0]
    return max(n + 1 - (n + low + high - (k - 1) * c.rhs_dilation[0]), 0)


def _overhang(c: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
    """The convolution with some rows too many, which are dropped.

    XLA:CPU gives convolutions to YNNPACK only where the result is no larger than the image, and its
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


def _onednn(c: Conv, x: jax.Array, w: jax.Array, epilogue: Epilogue = NOTHING) -> jax.Array:
    """oneDNN's convolution: features last, and where it is not there, XLA's."""
    if not onednn.takes(x, w):
        return epilogue(dense(c, x, w))
    if min(low for pair in c.padding for low in pair) < 0 or max(c.lhs_dilation) > 1:
        x = padded(c, x)
        c = replace(c, padding=((0, 0),) * len(c.stride))
    return onednn.convolution(
        x,
        lax.transpose(w, (*range(2, c.rank), 1, 0)),
        stride=c.stride,
        padding=c.padding,
        dilation=c.rhs_dilation,
        groups=c.groups,
        epilogue=epilogue,
    )


def _onednn_matmul(turned: bool) -> Callable[..., jax.Array]:
    def fn(c: Conv, x: jax.Array, w: jax.Array, epilogue: Epilogue = NOTHING) -> jax.Array:
        if not onednn.takes(x, w):
            return epilogue(_matmul(c, x, w, turned=turned))
        if epilogue.addend is not None:
            epilogue = epilogue._replace(addend=epilogue.addend.reshape(-1, w.shape[0]))
        product = partial(onednn.dot_general, epilogue=epilogue)
        return _matmul(c, x, w, turned=turned, product=product)

    return fn


# --- conditions ---

_Condition = Callable[[Node, tuple[Node, ...]], bool]


def _suits(node: Node, args: tuple[Node, ...]) -> bool:
    """What every form needs: one floating dtype, no batch groups, no empty array."""
    same = {a.dtype for a in args} == {dtype_attr(node)}
    sizes = [d for n in (node, *args) for d in n.shape]
    return (
        same
        and dtype_attr(node) in ops.FLOAT_DTYPES
        and number(node, "batch_groups") == 1
        and all(sizes)
    )


def _kernel(node: Node, args: tuple[Node, ...]) -> tuple[int, int, int]:
    """(output features, features per group, kernel positions)."""
    shape = [args[1].shape[d] for d in conv_layouts(node)[1]]
    return shape[0], shape[1], math.prod(shape[2:])


def _is_pointwise(node: Node, args: tuple[Node, ...]) -> bool:
    return _kernel(node, args)[2] == 1 and number(node, "groups") == 1


def _few_taps(node: Node, args: tuple[Node, ...]) -> bool:
    positions = _kernel(node, args)[2]
    return 1 < positions <= _MAX_TAPS or (positions == 1 and number(node, "groups") > 1)


def _few_patches(node: Node, args: tuple[Node, ...]) -> bool:
    outs, width, positions = _kernel(node, args)
    patches = math.prod(node.shape) // outs * width * number(node, "groups") * positions
    return positions > 1 and patches <= _MAX_PATCHES


def _halves(node: Node, args: tuple[Node, ...]) -> bool:
    """Two spatial dimensions with several positions along each."""
    kernel = [args[1].shape[d] for d in conv_layouts(node)[1][2:]]
    return len(kernel) == 2 and min(kernel) > 1 and _few_patches(node, args)


def _few_terms(node: Node, args: tuple[Node, ...]) -> bool:
    _, width, positions = _kernel(node, args)
    return positions * width <= _MAX_TERMS and positions <= _MAX_TAPS and number(node, "groups") > 1


def _square(node: Node, args: tuple[Node, ...]) -> bool:
    """As many features out of each group as into it, and more than one."""
    outs, width, _ = _kernel(node, args)
    return width > 1 and outs == width * number(node, "groups")


def _splits(merged: int) -> _Condition:
    def applies(node: Node, args: tuple[Node, ...]) -> bool:
        groups = number(node, "groups")
        return groups % merged == 0 and 1 < groups // merged <= _MAX_SPLIT

    return applies


def _expands(node: Node, args: tuple[Node, ...]) -> bool:
    outs, width, positions = _kernel(node, args)
    groups = number(node, "groups")
    return groups > 1 and outs * width * groups * positions <= _MAX_DENSE


def _overhangs(node: Node, args: tuple[Node, ...]) -> bool:
    """Two spatial dimensions, no stride, no dilated image, at most a quarter too many rows."""
    n = len(node.shape) - 2
    if n != 2 or set(dims(node, "stride", n)) | set(dims(node, "lhs_dilation", n)) != {1}:
        return False
    left, _, out = conv_layouts(node)
    rows = node.shape[out[2]]
    return rows >= 4 * (args[0].shape[left[2]] + 1 - rows)


def _single(node: Node, args: tuple[Node, ...]) -> bool:
    return dtype_attr(node) == "float32"


def _one_matrix(node: Node, args: tuple[Node, ...]) -> bool:
    """Whether all positions of all images make one matrix: a single image, or features last."""
    left = conv_layouts(node)[0]
    return node.shape[conv_layouts(node)[2][0]] == 1 or left != tuple(range(len(left)))


def _not_in(first: bool) -> _Condition:
    """Whether some array is laid out otherwise than features first (OIHW), or last (HWIO)."""

    def applies(node: Node, args: tuple[Node, ...]) -> bool:
        left, right, out = conv_layouts(node)
        n = len(left)
        there = tuple(range(n)) if first else (0, n - 1, *range(1, n - 1))
        kernel = tuple(range(n)) if first else (n - 1, n - 2, *range(n - 2))
        return (left, right, out) != (there, kernel, there)

    return applies


def _features_come_last(node: Node, args: tuple[Node, ...]) -> bool:
    out = conv_layouts(node)[2]
    return out == (0, len(out) - 1, *range(1, len(out) - 1))


def _features_stay_last(node: Node, args: tuple[Node, ...]) -> bool:
    return _features_come_last(node, args) and conv_layouts(node)[0] == conv_layouts(node)[2]


def _moved(first: bool) -> _Condition:
    """Whether the left argument is laid out otherwise than features first, or last."""

    def applies(node: Node, args: tuple[Node, ...]) -> bool:
        left = conv_layouts(node)[0]
        n = len(left)
        return left != (tuple(range(n)) if first else (0, n - 1, *range(1, n - 1)))

    return applies


def _form(
    name: str,
    fn: Callable[..., jax.Array],
    *conditions: _Condition,
    first: bool | None = None,
    absorbs: _Condition = nothing,
) -> Lowering:
    """A lowering from a form; `first` asks for a layout inside, with transposes around it."""

    def lowered(node: Node, x: jax.Array, w: jax.Array, **epilogue: Epilogue) -> jax.Array:
        c, x, w = open_conv(node, x, w, first=first)
        return c.close(fn(c, x, w, **epilogue))

    def applies(node: Node, args: tuple[Node, ...]) -> bool:
        return _suits(node, args) and all(test(node, args) for test in conditions)

    return Lowering(name, lowered, applies, absorbs)


def _turned(c: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
    return _matmul(c, x, w, turned=True)


def _split_by(merged: int) -> Callable[..., jax.Array]:
    return lambda c, x, w: _split(c, x, w, merged=merged)


def _half_of(gathered: int) -> Callable[..., jax.Array]:
    return lambda c, x, w: _half(c, x, w, gathered=gathered)


CONV: tuple[Lowering, ...] = (
    _form("matmul", _matmul, _is_pointwise),
    _form("matmul_turned", _turned, _is_pointwise),
    _form("nhwc", dense, _not_in(False), first=False),
    _form("nchw", dense, _not_in(True), first=True),
    _form("shifted", _shifted, _few_terms),
    _form("split", _split, _splits(1)),
    _form("split2", _split_by(2), _splits(2)),
    _form("split4", _split_by(4), _splits(4)),
    _form("im2col", _im2col, _few_patches),
    _form("taps", _by_taps, _few_taps),
    _form("dense", _expanded, _expands),
    _form("nhwc_matmul", _matmul, _is_pointwise, _moved(False), first=False),
    _form("nhwc_shifted", _shifted, _few_terms, _moved(False), first=False),
    _form("nchw_shifted", _shifted, _few_terms, _moved(True), first=True),
    _form("nhwc_split", _split, _splits(1), _moved(False), first=False),
    _form("nhwc_split2", _split_by(2), _splits(2), _moved(False), first=False),
    _form("nhwc_split4", _split_by(4), _splits(4), _moved(False), first=False),
    _form("rotated", _rotated, _few_terms, _square),
    _form("overhang", _overhang, _overhangs),
    _form("half_rows", _half_of(0), _halves),
    _form("half_columns", _half_of(1), _halves),
    _form("onednn", _onednn, _single, first=False, absorbs=_features_come_last),
    _form(
        "onednn_matmul",
        _onednn_matmul(False),
        _is_pointwise,
        _single,
        _one_matrix,
        absorbs=_features_stay_last,
    ),
    _form(
        "onednn_matmul_turned",
        _onednn_matmul(True),
        _is_pointwise,
        _single,
        _one_matrix,
        absorbs=_features_stay_last,
    ),
)
