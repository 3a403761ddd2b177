"""When each form of a convolution is right; `lowerings_conv` has the forms."""

from __future__ import annotations

import math
from collections.abc import Callable

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node
from xrl_jax.libraries.onednn.winograd import KERNEL
from xrl_jax.lowerings.plain import conv_layouts, dims, dtype_attr, number

Condition = Callable[[Node, tuple[Node, ...]], bool]

_MAX_TAPS = 25  # kernel positions that are worth an operation each
_MAX_TERMS = 128  # products of an elementwise form, per element of the result
_MAX_SPLIT = 64  # convolutions that one may be split into
_MAX_DENSE = 1 << 22  # elements of an expanded kernel
_MAX_PATCHES = 1 << 26  # elements of the patches of im2col
_MAX_TILED = 1 << 24  # elements of an image whose tiles take a multiple of that


def suits(node: Node, args: tuple[Node, ...]) -> bool:
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


def is_pointwise(node: Node, args: tuple[Node, ...]) -> bool:
    return _kernel(node, args)[2] == 1 and number(node, "groups") == 1


def few_taps(node: Node, args: tuple[Node, ...]) -> bool:
    positions = _kernel(node, args)[2]
    return 1 < positions <= _MAX_TAPS or (positions == 1 and number(node, "groups") > 1)


def few_patches(node: Node, args: tuple[Node, ...]) -> bool:
    outs, width, positions = _kernel(node, args)
    patches = math.prod(node.shape) // outs * width * number(node, "groups") * positions
    return positions > 1 and patches <= _MAX_PATCHES


def halves(node: Node, args: tuple[Node, ...]) -> bool:
    """Two spatial dimensions with several positions along each."""
    kernel = [args[1].shape[d] for d in conv_layouts(node)[1][2:]]
    return len(kernel) == 2 and min(kernel) > 1 and few_patches(node, args)


def few_terms(node: Node, args: tuple[Node, ...]) -> bool:
    _, width, positions = _kernel(node, args)
    return positions * width <= _MAX_TERMS and positions <= _MAX_TAPS and number(node, "groups") > 1


def square(node: Node, args: tuple[Node, ...]) -> bool:
    """As many features out of each group as into it, and more than one."""
    outs, width, _ = _kernel(node, args)
    return width > 1 and outs == width * number(node, "groups")


def splits(merged: int) -> Condition:
    def applies(node: Node, args: tuple[Node, ...]) -> bool:
        groups = number(node, "groups")
        return groups % merged == 0 and 1 < groups // merged <= _MAX_SPLIT

    return applies


def expands(node: Node, args: tuple[Node, ...]) -> bool:
    outs, width, positions = _kernel(node, args)
    groups = number(node, "groups")
    return groups > 1 and outs * width * groups * positions <= _MAX_DENSE


def overhangs(node: Node, args: tuple[Node, ...]) -> bool:
    """Two spatial dimensions, no stride, no dilated image, at most a quarter too many rows."""
    n = len(node.shape) - 2
    if n != 2 or set(dims(node, "stride", n)) | set(dims(node, "lhs_dilation", n)) != {1}:
        return False
    left, _, out = conv_layouts(node)
    rows = node.shape[out[2]]
    return rows >= 4 * (args[0].shape[left[2]] + 1 - rows)


def single(node: Node, args: tuple[Node, ...]) -> bool:
    return dtype_attr(node) == "float32"


def one_matrix(node: Node, args: tuple[Node, ...]) -> bool:
    """Whether all positions of all images make one matrix: a single image, or features last."""
    left = conv_layouts(node)[0]
    return node.shape[conv_layouts(node)[2][0]] == 1 or left != tuple(range(len(left)))


def not_in(first: bool) -> Condition:
    """Whether some array is laid out otherwise than features first (OIHW), or last (HWIO)."""

    def applies(node: Node, args: tuple[Node, ...]) -> bool:
        left, right, out = conv_layouts(node)
        n = len(left)
        there = tuple(range(n)) if first else (0, n - 1, *range(1, n - 1))
        kernel = tuple(range(n)) if first else (n - 1, n - 2, *range(n - 2))
        return (left, right, out) != (there, kernel, there)

    return applies


def features_come_last(node: Node, args: tuple[Node, ...]) -> bool:
    out = conv_layouts(node)[2]
    return out == (0, len(out) - 1, *range(1, len(out) - 1))


def features_stay_last(node: Node, args: tuple[Node, ...]) -> bool:
    return features_come_last(node, args) and conv_layouts(node)[0] == conv_layouts(node)[2]


def moved(first: bool) -> Condition:
    """Whether the left argument is laid out otherwise than features first, or last."""

    def applies(node: Node, args: tuple[Node, ...]) -> bool:
        left = conv_layouts(node)[0]
        n = len(left)
        return left != (tuple(range(n)) if first else (0, n - 1, *range(1, n - 1)))

    return applies


def tiles(node: Node, args: tuple[Node, ...]) -> bool:
    """A kernel of 3 x 3 on one group of features, nothing strided or dilated but the image."""
    n = len(node.shape) - 2
    if n != 2 or set(dims(node, "stride", n)) | set(dims(node, "rhs_dilation", n)) != {1}:
        return False
    kernel = [args[1].shape[d] for d in conv_layouts(node)[1][2:]]
    few = max(math.prod(node.shape), math.prod(args[0].shape)) <= _MAX_TILED
    return kernel == [KERNEL, KERNEL] and number(node, "groups") == 1 and few
