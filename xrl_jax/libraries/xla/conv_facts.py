"""What decides which lowerings of a convolution are right."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from xrl_jax.graph import ops
from xrl_jax.libraries.base import Facts, every

_LAYOUTS = np.asarray(ops.LAYOUTS, np.int32)

# The codes of layouts with features first, or last, of arrays and of kernels, with one spatial
# dimension and with two.
_ARRAY = {
    True: (ops.LAYOUT_CODE[0, 1, 2], ops.LAYOUT_CODE[0, 1, 2, 3]),
    False: (ops.LAYOUT_CODE[0, 2, 1], ops.LAYOUT_CODE[0, 3, 1, 2]),
}
_KERNEL = {
    True: _ARRAY[True],  # O I spatial
    False: (ops.LAYOUT_CODE[2, 1, 0], ops.LAYOUT_CODE[3, 2, 0, 1]),  # spatial I O
}

_MAX_TAPS = 25  # kernel positions that are worth an operation each
_MAX_TERMS = 128  # products of an elementwise form, per element of the result
_MAX_SPLIT = 64  # convolutions that one may be split into
_MAX_DENSE = 1 << 22  # elements of an expanded kernel
_MAX_PATCHES = 1 << 26  # elements of the patches of im2col


class ConvFacts(Facts):
    """A convolution of an image with a kernel."""

    @cached_property
    def _sizes(self) -> Any:
        """Of image, kernel and result [3], the sizes [4] of batch (features of the result in a
        kernel), features, and spatial axes; 1 where there is none.
        """
        xp, view = self.xp, self.view
        codes = xp.stack([self.number(f"{which}_layout") for which in ("lhs", "rhs", "out")])
        # As sums, for gathers take long to compile.
        is_code = codes[:, None] == xp.arange(len(_LAYOUTS))
        at = xp.sum(xp.where(is_code[..., None], xp.asarray(_LAYOUTS), 0), axis=1)
        shapes = xp.stack([view.arg_shapes[0], view.arg_shapes[1], view.shape])
        is_axis = at[..., None] == xp.arange(ops.MAX_RANK)
        return xp.where(at < 0, 1, xp.sum(xp.where(is_axis, shapes[:, None], 0), axis=2))

    @cached_property
    def image(self) -> Any:
        """Sizes of batch, features and spatial axes."""
        return self._sizes[0]

    @cached_property
    def outs(self) -> Any:
        """Features of the result."""
        return self._sizes[1, 0]

    @cached_property
    def width(self) -> Any:
        """Features of the image in each group."""
        return self._sizes[1, 1]

    @cached_property
    def window(self) -> tuple[Any, Any]:
        """Positions of the kernel along each spatial axis; 1 where there is none."""
        return self._sizes[1, 2], self._sizes[1, 3]

    @cached_property
    def result(self) -> Any:
        """Sizes of batch, features and spatial axes."""
        return self._sizes[2]

    @cached_property
    def positions(self) -> Any:
        return self.window[0] * self.window[1]

    @cached_property
    def groups(self) -> Any:
        return self.number("groups")

    @cached_property
    def suits(self) -> Any:
        """What every lowering needs: one floating dtype, no batch groups, nothing empty."""
        dtype, (image, kernel) = self.number("dtype"), self.view.arg_dtypes[:2]
        same = (image == dtype) & (kernel == dtype)
        return same & self.is_float(dtype) & (self.number("batch_groups") == 1) & self.nonempty

    @cached_property
    def is_pointwise(self) -> Any:
        return (self.positions == 1) & (self.groups == 1)

    @cached_property
    def few_taps(self) -> Any:
        several = (self.positions > 1) | (self.groups > 1)
        return several & (self.positions <= _MAX_TAPS)

    @cached_property
    def few_patches(self) -> Any:
        places = (self.result[i] for i in (0, 2, 3))
        patches = self.product(*places, self.width, self.groups, self.positions)
        return (self.positions > 1) & (patches <= _MAX_PATCHES)

    @cached_property
    def halves(self) -> Any:
        """Two spatial dimensions with several positions along each."""
        return (self.view.rank == 4) & every(n > 1 for n in self.window) & self.few_patches

    @cached_property
    def few_terms(self) -> Any:
        few = (self.positions * self.width <= _MAX_TERMS) & (self.positions <= _MAX_TAPS)
        return few & (self.groups > 1)

    @cached_property
    def square(self) -> Any:
        """As many features out of each group as into it, and more than one."""
        return (self.width > 1) & (self.outs == self.width * self.groups)

    @cached_property
    def expands(self) -> Any:
        elements = self.product(self.outs, self.width, self.groups, self.positions)
        return (self.groups > 1) & (elements <= _MAX_DENSE)

    def moves_by_one(self, *names: str) -> Any:
        """Whether these attributes are 1 along both of two spatial axes."""
        numbers = (n for name in names for n in self.numbers(name))
        return (self.view.rank == 4) & every(n == 1 for n in numbers)

    @cached_property
    def overhangs(self) -> Any:
        """Two spatial dimensions, no stride, no dilated image, at most a quarter too many rows."""
        rows = self.result[2]
        surplus = self.image[2] + 1 - rows
        return self.moves_by_one("stride", "lhs_dilation") & (rows >= 4 * surplus)

    @cached_property
    def is_float32(self) -> Any:
        return self.is_single(self.number("dtype"))

    # --- layouts ---

    def _lies(self, layout: str, codes: tuple[int, int]) -> Any:
        return self.number(layout) == self.xp.where(self.view.rank == 4, codes[1], codes[0])

    def image_lies(self, first: bool) -> Any:
        """Whether the image has its features first, or last."""
        return self._lies("lhs_layout", _ARRAY[first])

    def result_lies(self, first: bool) -> Any:
        """Whether the result has its features first, or last."""
        return self._lies("out_layout", _ARRAY[first])

    def all_lie(self, first: bool) -> Any:
        """Whether all three arrays lie with features first (OIHW), or last (HWIO)."""
        kernel = self._lies("rhs_layout", _KERNEL[first])
        return kernel & self.image_lies(first) & self.result_lies(first)

    @cached_property
    def one_matrix(self) -> Any:
        """Whether all positions of all images make one matrix: a single image, or features last."""
        return (self.result[0] == 1) | ~self.image_lies(True)

    @cached_property
    def ends_in_features(self) -> Any:
        return self.result_lies(False)


# --- conditions ---


@functools.cache
def splits(merged: int) -> Callable[[ConvFacts], Any]:
    """Groups can be taken `merged` at a time, and are few then."""

    def applies(c: ConvFacts) -> Any:
        n = c.groups // merged
        return (c.groups % merged == 0) & (n > 1) & (n <= _MAX_SPLIT)

    return applies


@functools.cache
def not_in(first: bool) -> Callable[[ConvFacts], Any]:
    """Some array lies otherwise than with features first, or last."""
    return lambda c: ~c.all_lie(first)


@functools.cache
def moved(first: bool) -> Callable[[ConvFacts], Any]:
    """The image lies otherwise than with features first, or last."""
    return lambda c: ~c.image_lies(first)
