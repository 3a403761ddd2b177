"""Reads tiles of operands from memory, and multiplies them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton
from jax.extend.core import Literal

from xrl_jax.libraries.triton import strided, tile
from xrl_jax.libraries.triton.operands import Operand
from xrl_jax.libraries.triton.positions import Numbers, both, digits
from xrl_jax.libraries.triton.product import Part


def operand_tile(
    inputs: Mapping[Any, Any],
    operand: Operand,
    part: Part,
    batch: Any,
    free: Numbers,
    summed: Numbers,
) -> jax.Array:
    """Return a tile of an operand of a product; what does not exist is 0.

    Args:
      inputs: the kernel's inputs, by variable.
      part: the operand's axes.
      batch: number of the element of the batch.
      free, summed: numbers along the two sides of the tile.
    """
    axes = operand.view.axes
    each: list[Any] = [0] * len(axes)
    for which, flat in (
        (part.batch, batch),
        (part.free, free.values),
        (part.summed, summed.values),
    ):
        own = digits(flat, [strided.size_of(axes[d]) for d in which])
        for d, index in zip(which, own, strict=True):
            each[d] = index
    shape = jnp.broadcast_shapes(free.values.shape, summed.values.shape)
    mask = both(free.exist, summed.exist)

    def read(of: Operand) -> jax.Array:
        if isinstance(of.root, Literal):
            return literal(of.root)
        place = of.view.start + strided.offset(of.view.axes, each if of.view.axes else ())
        return load(inputs[of.root], jnp.broadcast_to(place, shape), mask)

    found = read(operand)
    for step in operand.steps:
        given = {v: read(other) for v, other in step.others.items()}
        operands = [
            literal(v) if isinstance(v, Literal) else given.get(v, found)
            for v in step.equation.invars
        ]
        found = tile.evaluate(step.equation, operands)
    if operand.steps and mask is not None:
        found = jnp.where(mask, found, jnp.zeros((), found.dtype))
    return found


def product_tile(product: Any, left: jax.Array, right: jax.Array, summed: int) -> jax.Array:
    """Return a product of tiles in float32, summed over axis 1 of the left one and `summed` of the
    right one.
    """
    return lax.dot_general(
        left,
        right,
        (((1,), (summed,)), ((), ())),
        precision=product.params["precision"],
        preferred_element_type=jnp.float32,
    )


def literal(v: Any) -> jax.Array:
    return jnp.asarray(v.val, v.aval.dtype)


def load(ref: Any, place: Any, mask: jax.Array | None) -> jax.Array:
    """Return the elements at flat positions; 0 where the mask does not hold."""
    if mask is None:
        return triton.load(ref.at[place])
    place, mask = jnp.broadcast_arrays(place, mask)
    return triton.load(ref.at[place], mask=mask, other=0)
