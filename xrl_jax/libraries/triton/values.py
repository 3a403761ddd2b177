"""What a kernel computes from a tile of a product: the values of the equations that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from xrl_jax.libraries.triton import strided, tile
from xrl_jax.libraries.triton.operands import Operand
from xrl_jax.libraries.triton.positions import Space, both
from xrl_jax.libraries.triton.reading import literal, load
from xrl_jax.libraries.triton.strided import Axis


class Values:
    """The tiles of values that follow a product, computed when they are asked for.

    Args:
      equations: that make them.
      others: operands of the equations that are read from memory, by variable.
      axes: of every value, as positions in the product.
      inputs: the kernel's inputs, by variable.
      space: the positions of the tile in the product.
      exist: masks of the rows and of the columns that exist; None where all do.
      product: variable of the product, and its tile.
      known: tiles of further values, by variable; the caller may add to them.
    """

    def __init__(
        self,
        equations: Sequence[Any],
        others: Mapping[Any, Operand],
        axes: Mapping[Any, tuple[Axis, ...]],
        inputs: Mapping[Any, Any],
        space: Space,
        exist: tuple[jax.Array | None, jax.Array | None],
        product: tuple[Any, jax.Array],
        known: Mapping[Any, jax.Array] = MappingProxyType({}),
    ) -> None:
        self._producer = {e.outvars[0]: e for e in equations}
        self._others, self._axes, self._inputs = others, axes, inputs
        self._space, self._exist, self._known = space, exist, known
        self._made = dict((product,))

    def of(self, variable: Any) -> jax.Array:
        """Return the tile of a variable."""
        if variable in self._known:
            return self._known[variable]
        if variable not in self._made:
            equation = self._producer[variable]
            operands = [self._operand(equation, v) for v in equation.invars]
            self._made[variable] = tile.evaluate(equation, operands)
        return self._made[variable]

    def _operand(self, equation: Any, v: Any) -> jax.Array:
        if isinstance(v, Literal):
            return literal(v)
        if v not in self._others:
            return self.of(v)
        root, view = self._others[v].root, self._others[v].view
        if isinstance(root, Literal):
            return literal(root)
        axes = self._axes[equation.outvars[0]] if view.axes else ()
        # Where nothing depends on a row or column, there is nothing to mask for it.
        each = [
            self._space.along(axis) if any(p.stride for p in own) else 0
            for axis, own in zip(axes, view.axes, strict=True)
        ]
        place = jnp.asarray(view.start + strided.offset(view.axes, each), jnp.int32)
        masks = [m for s, m in enumerate(self._exist) if place.ndim == 2 and place.shape[s] > 1]
        return load(self._inputs[root], place, both(*masks))
