"""A product with its epilogue as one kernel, written in Pallas and compiled by Triton.

Each program of the kernel computes a tile of the product, step by step along the summed axis, and
then what follows on that tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xrl_jax.libraries.triton.epilogue import ProductAndEpilogue
from xrl_jax.libraries.triton.naming import ProductWork, product_name
from xrl_jax.libraries.triton.positions import Numbers, Space, both
from xrl_jax.libraries.triton.product import multiplied_in
from xrl_jax.libraries.triton.reading import operand_tile, product_tile
from xrl_jax.libraries.triton.values import Values

# Rows and columns, large ones first: larger ones spill registers. `measure.gpu.predict` knows how
# fast each is.
_TILES = ((128, 64), (64, 64), (64, 32), (32, 32))
_PROGRAMS = 96  # with fewer, most multiprocessors of a large GPU would be idle
_STEP_BYTES = 128  # of a row of an operand, for each step
_STAGES = 3  # steps whose operands are loaded at the same time


class Tile(NamedTuple):
    """The sizes of a kernel's tiles: of the result, and of a step along the summed axis."""

    rows: int
    columns: int
    summed: int


def tile_of(found: ProductAndEpilogue) -> Tile:
    """Return the largest tile of which there are enough."""
    sizes = found.sizes
    item = max(v.aval.dtype.itemsize for v in found.product.invars)
    most = pl.next_power_of_2(sizes.rows), pl.next_power_of_2(sizes.columns)
    for rows, columns in _TILES:
        n = -(-sizes.rows // rows) * -(-sizes.columns // columns)
        if n >= _PROGRAMS and rows <= most[0] and columns <= most[1]:
            break
    return Tile(rows, columns, max(_STEP_BYTES // item, 16))


def multiply(found: ProductAndEpilogue, *arrays: jax.Array, interpret: bool = False) -> jax.Array:
    """Return the result of a product with its epilogue.

    Args:
      arrays: the values of `found.arguments`.
      interpret: run on any platform, as JAX.
    """
    out, sizes, tile = found.result.aval, found.sizes, tile_of(found)
    name = product_name(ProductWork(*sizes, tile.rows, tile.columns, multiplied_in(found.product)))

    def body(*refs: Any) -> None:
        _compute(found, tile, dict(zip(found.arguments, refs[:-1], strict=True)), refs[-1])

    body.__name__ = name
    call = pl.pallas_call(
        body,
        grid=(-(-sizes.rows // tile.rows), -(-sizes.columns // tile.columns)),
        out_shape=jax.ShapeDtypeStruct((math.prod(out.shape),), out.dtype),
        compiler_params=triton.CompilerParams(
            num_warps=8 if tile.rows * tile.columns > 1 << 12 else 4, num_stages=_STAGES
        ),
        interpret=interpret,
        name=name,
    )
    return call(*(x.reshape(-1) for x in arrays)).reshape(out.shape)


def _compute(found: ProductAndEpilogue, tile: Tile, inputs: Mapping[Any, Any], output: Any) -> None:
    """Compute a tile of the result and write it.

    Args:
      inputs: the kernel's inputs, by variable.
    """
    sizes = found.sizes

    def numbers(first: Any, count: int, size: int, side: int) -> Numbers:
        return Numbers(first, count, size, side, padded=size % count != 0)

    first_row, first_column = pl.program_id(0) * tile.rows, pl.program_id(1) * tile.columns
    row = numbers(first_row, tile.rows, sizes.rows, 0)
    column = numbers(first_column, tile.columns, sizes.columns, 1)

    def step(n: Any, total: jax.Array) -> jax.Array:
        along, down = (numbers(n * tile.summed, tile.summed, sizes.summed, side) for side in (1, 0))
        left = operand_tile(inputs, found.left, found.left_part, 0, row, along)
        right = operand_tile(inputs, found.right, found.right_part, 0, column, down)
        return total + product_tile(found.product, left, right, 0)

    zeros = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    total = lax.fori_loop(0, -(-sizes.summed // tile.summed), step, zeros)
    (product,) = found.product.outvars
    space = Space((sizes.rows, row.values), (sizes.columns, column.values))
    values = Values(
        found.after,
        found.others,
        found.axes,
        inputs,
        space,
        (row.exist, column.exist),
        (product, total.astype(product.aval.dtype)),
    )
    result = jnp.broadcast_to(values.of(found.result), total.shape)
    place = jnp.broadcast_to(space.place(found.result_axes), total.shape)
    mask = both(row.exist, column.exist)
    if mask is not None:
        mask = jnp.broadcast_to(mask, total.shape)
        place = jnp.where(mask, place, math.prod(found.result.aval.shape))
    triton.store(output.at[place], result.astype(found.result.aval.dtype), mask=mask)
