"""Facts and conditions that decide which lowerings are right for a convolution."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from xrl_jax.graph import ops
from xrl_jax.libraries.base import Facts, all_of

_LAYOUTS = np.asarray(ops.LAYOUTS, np.int32)

# Codes of the layouts with features first (True) or last (False), for one and for two spatial
# dimensions: of image and result, and of kernels.
_ARRAY = {
    True: (ops.LAYOUT_CODE[0, 1, 2], ops.LAYOUT_CODE[0, 1, 2, 3]),
    False: (ops.LAYOUT_CODE[0, 2, 1], ops.LAYOUT_CODE[0, 3, 1, 2]),
}
_KERNEL = {
    True: _ARRAY[True],  # O I spatial
    False: (ops.LAYOUT_CODE[2, 1, 0], ops.LAYOUT_CODE[3, 2, 0, 1]),  # spatial I O
}

_MAX_TAPS = 25  # kernel positions, each of which becomes an operation
_MAX_TERMS = 128  # products per result element in an elementwise lowering
_MAX_SPLIT = 64  # convolutions that one is split into
_MAX_DENSE = 1 << 22  # elements of an expanded kernel
_MAX_PATCHES = 1 << 26  # elements of im2col patches


class ConvFacts(Facts):
    """Facts of a convolution of an image with a kernel."""

    @cached_property
    def _sizes(self) -> Any:
        """Sizes [3, 4] of image, kernel and result: batch (in a kernel, features of the result),
        features, and both spatial axes; 1 for a missing axis.
        """
        xp, view = self.xp, self.view
        codes = xp.stack([self.number(f"{which}_layout") for which in ("lhs", "rhs", "out")])
        # Sums instead of gathers, because gathers take long to compile.
        is_code = codes[:, None] == xp.arange(len(_LAYOUTS))
        at = xp.sum(xp.where(is_code[..., None], xp.asarray(_LAYOUTS), 0), axis=1)
        shapes = xp.stack([view.arg_shapes[0], view.arg_shapes[1], view.shape])
        is_axis = at[..., None] == xp.arange(ops.MAX_RANK)
        return xp.where(at < 0, 1, xp.sum(xp.where(is_axis, shapes[:, None], 0), axis=2))

    @cached_property
    def image(self) -> Any:
        """Sizes [4] of batch, features and spatial axes."""
        return self._sizes[0]

    @cached_property
    def outs(self) -> Any:
        """Number of features of the result."""
        return self._sizes[1, 0]

    @cached_property
    def width(self) -> Any:
        """Number of features of the image in each group."""
        return self._sizes[1, 1]

    @cached_property
    def window(self) -> tuple[Any, Any]:
        """Size of the kernel along each spatial axis; 1 for a missing axis."""
        return self._sizes[1, 2], self._sizes[1, 3]

    @cached_property
    def result(self) -> Any:
        """Sizes [4] of batch, features and spatial axes."""
        return self._sizes[2]

    @cached_property
    def positions(self) -> Any:
        return self.window[0] * self.window[1]

    @cached_property
    def groups(self) -> Any:
        return self.number("groups")

    @cached_property
    def suits(self) -> Any:
        """Whether the common condition of all lowerings but the plain one holds: a single
        floating-point dtype, no batch groups, nothing empty.
        """
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
        """Whether there are two spatial dimensions, several kernel positions along each, and few
        patches.
        """
        return (self.view.rank == 4) & all_of(n > 1 for n in self.window) & self.few_patches

    @cached_property
    def few_terms(self) -> Any:
        few = (self.positions * self.width <= _MAX_TERMS) & (self.positions <= _MAX_TAPS)
        return few & (self.groups > 1)

    @cached_property
    def square(self) -> Any:
        """Whether each group has as many output as input features, and more than one."""
        return (self.width > 1) & (self.outs == self.width * self.groups)

    @cached_property
    def expands(self) -> Any:
        elements = self.product(self.outs, self.width, self.groups, self.positions)
        return (self.groups > 1) & (elements <= _MAX_DENSE)

    def moves_by_one(self, *names: str) -> Any:
        """Return whether there are two spatial axes and these attributes are 1 along both."""
        numbers = (n for name in names for n in self.numbers(name))
        return (self.view.rank == 4) & all_of(n == 1 for n in numbers)

    @cached_property
    def overhangs(self) -> Any:
        """Whether there are two spatial dimensions, stride 1, no image dilation, and at most a
        quarter as many surplus rows as result rows.
        """
        rows = self.result[2]
        surplus = self.image[2] + 1 - rows
        return self.moves_by_one("stride", "lhs_dilation") & (rows >= 4 * surplus)

    @cached_property
    def is_float32(self) -> Any:
        return self.is_single(self.number("dtype"))

    # --- layouts ---

    def _layout_is(self, layout: str, codes: tuple[int, int]) -> Any:
        return self.number(layout) == self.xp.where(self.view.rank == 4, codes[1], codes[0])

    def image_layout_is(self, first: bool) -> Any:
        """Return whether the image has its features first, or last."""
        return self._layout_is("lhs_layout", _ARRAY[first])

    def result_layout_is(self, first: bool) -> Any:
        """Return whether the result has its features first, or last."""
        return self._layout_is("out_layout", _ARRAY[first])

    def all_layouts_are(self, first: bool) -> Any:
        """Return whether image, kernel (OIHW or HWIO) and result have features first, or last."""
        kernel = self._layout_is("rhs_layout", _KERNEL[first])
        return kernel & self.image_layout_is(first) & self.result_layout_is(first)

    @cached_property
    def one_matrix(self) -> Any:
        """Whether the positions of all images form one matrix: one image, or features last."""
        return (self.result[0] == 1) | ~self.image_layout_is(True)

    @cached_property
    def ends_in_features(self) -> Any:
        return self.result_layout_is(False)


# --- conditions ---


@functools.cache
def splits(merged: int) -> Callable[[ConvFacts], Any]:
    """Return the condition that groups can be merged `merged` at a time, into a few groups."""

    def applies(c: ConvFacts) -> Any:
        n = c.groups // merged
        return (c.groups % merged == 0) & (n > 1) & (n <= _MAX_SPLIT)

    return applies


@functools.cache
def not_in(first: bool) -> Callable[[ConvFacts], Any]:
    """Return the condition that some array does not have features first, or last."""
    return lambda c: ~c.all_layouts_are(first)


@functools.cache
def image_not_in(first: bool) -> Callable[[ConvFacts], Any]:
    """Return the condition that the image does not have features first, or last."""
    return lambda c: ~c.image_layout_is(first)
