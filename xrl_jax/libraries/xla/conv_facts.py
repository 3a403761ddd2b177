"""What decides which lowerings of a convolution are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.view import NodeView
from xrl_jax.libraries.base import Condition, Facts

_LAYOUTS = np.asarray(ops.LAYOUTS, np.int32)

_MAX_TAPS = 25  # kernel positions that are worth an operation each
_MAX_TERMS = 128  # products of an elementwise form, per element of the result
_MAX_SPLIT = 64  # convolutions that one may be split into
_MAX_DENSE = 1 << 22  # elements of an expanded kernel
_MAX_PATCHES = 1 << 26  # elements of the patches of im2col


class ConvFacts(Facts):
    """A convolution of an image with a kernel."""

    def __init__(self, xp: Any, view: NodeView) -> None:
        super().__init__(xp, view, "conv")

    def _layout(self, name: str) -> Any:
        """Positions [4] of (batch or out feature, feature, spatial...); -1 beyond the rank."""
        is_code = self.xp.arange(len(_LAYOUTS)) == self.number(name)
        return self.xp.sum(self.xp.where(is_code[:, None], self.xp.asarray(_LAYOUTS), 0), axis=0)

    @cached_property
    def image(self) -> Any:
        return self._layout("lhs_layout")

    @cached_property
    def kernel(self) -> Any:
        return self._layout("rhs_layout")

    @cached_property
    def result(self) -> Any:
        return self._layout("out_layout")

    def _size(self, shape: Any, position: Any) -> Any:
        # As a sum, for gathers take long to compile; where there is no position, the size is 1.
        sizes = self.xp.where(self.xp.arange(len(shape)) == position, shape, 0)
        return self.xp.where(position >= 0, self.xp.sum(sizes), 1)

    @cached_property
    def outs(self) -> Any:
        """Features of the result."""
        return self._size(self.view.arg_shapes[1], self.kernel[0])

    @cached_property
    def width(self) -> Any:
        """Features of the image in each group."""
        return self._size(self.view.arg_shapes[1], self.kernel[1])

    @cached_property
    def window(self) -> Any:
        """Positions [2] of the kernel along each spatial axis; 1 where there is none."""
        sizes = [self._size(self.view.arg_shapes[1], self.kernel[i]) for i in (2, 3)]
        return self.xp.stack(sizes)

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
        places = [self._size(self.view.shape, self.result[i]) for i in (0, 2, 3)]
        patches = self.product(*places, self.width, self.groups, self.positions)
        return (self.positions > 1) & (patches <= _MAX_PATCHES)

    @cached_property
    def halves(self) -> Any:
        """Two spatial dimensions with several positions along each."""
        return (self.view.rank == 4) & self.xp.all(self.window > 1) & self.few_patches

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
        ones = [self.xp.all(self.numbers(name) == 1) for name in names]
        return (self.view.rank == 4) & self.xp.all(self.xp.stack(ones))

    @cached_property
    def overhangs(self) -> Any:
        """Two spatial dimensions, no stride, no dilated image, at most a quarter too many rows."""
        rows = self._size(self.view.shape, self.result[2])
        surplus = self._size(self.view.arg_shapes[0], self.image[2]) + 1 - rows
        return self.moves_by_one("stride", "lhs_dilation") & (rows >= 4 * surplus)

    @cached_property
    def is_float32(self) -> Any:
        return self.is_single(self.number("dtype"))

    # --- layouts ---

    def _is(self, layout: Any, wanted: Any) -> Any:
        lane = self.xp.arange(4)
        return self.xp.all((lane >= self.view.rank) | (layout == wanted))

    @cached_property
    def _last(self) -> Any:
        """Features last: 0, n - 1, then the spatial axes."""
        lane, n = self.xp.arange(4), self.view.rank
        return self.xp.where(lane == 0, 0, self.xp.where(lane == 1, n - 1, lane - 1))

    def lies(self, layout: Any, first: bool) -> Any:
        """Whether an image or a result has its features first, or last."""
        return self._is(layout, self.xp.arange(4) if first else self._last)

    def all_lie(self, first: bool) -> Any:
        """Whether all three arrays lie with features first (OIHW), or last (HWIO)."""
        lane, n = self.xp.arange(4), self.view.rank
        last = self.xp.where(lane == 0, n - 1, self.xp.where(lane == 1, n - 2, lane - 2))
        kernel = self._is(self.kernel, lane if first else last)
        return kernel & self.lies(self.image, first) & self.lies(self.result, first)

    @cached_property
    def one_matrix(self) -> Any:
        """Whether all positions of all images make one matrix: a single image, or features last."""
        single = self._size(self.view.shape, self.result[0]) == 1
        return single | ~self.lies(self.image, True)

    @cached_property
    def ends_in_features(self) -> Any:
        return self.lies(self.result, False)


# --- conditions ---


def all_of(*tests: str | Condition) -> Condition:
    """Facts by name, or functions of facts, that must all hold, beside `suits`."""

    def applies(c: ConvFacts) -> Any:
        ok = c.suits
        for test in tests:
            ok = ok & (getattr(c, test) if isinstance(test, str) else test(c))
        return ok

    return applies


def splits(merged: int) -> Callable[[ConvFacts], Any]:
    """Groups can be taken `merged` at a time, and are few then."""

    def applies(c: ConvFacts) -> Any:
        n = c.groups // merged
        return (c.groups % merged == 0) & (n > 1) & (n <= _MAX_SPLIT)

    return applies


def not_in(first: bool) -> Callable[[ConvFacts], Any]:
    """Some array lies otherwise than with features first, or last."""
    return lambda c: ~c.all_lie(first)


def moved(first: bool) -> Callable[[ConvFacts], Any]:
    """The image lies otherwise than with features first, or last."""
    return lambda c: ~c.lies(c.image, first)
