"""Attention as one kernel, written in Pallas and compiled by Triton.

Each program of the kernel computes a tile of rows of one element of the batch: all of their scores,
what is done to these, and their product with the values. Nothing between is written to memory.

A row of scores that is too long for that is computed in chunks of columns: once for each reduction
that needs another one's result, and once for the product. So every operator between the products
computes exactly what it computes on whole rows.

Source: T. Dao et al., FlashAttention (2022), without its running maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xrl_jax.graph.equations import variables
from xrl_jax.libraries.triton import tile
from xrl_jax.libraries.triton.attention import Attention
from xrl_jax.libraries.triton.naming import Work, name_of
from xrl_jax.libraries.triton.positions import Numbers, Space, both
from xrl_jax.libraries.triton.product import multiplied_in
from xrl_jax.libraries.triton.reading import operand_tile, product_tile
from xrl_jax.libraries.triton.values import Values

_LEAST_BLOCK = 16  # of a product in Triton
_MOST_ROWS = 64  # of a tile
_MOST_SCORES = 1 << 14  # of a tile; they are in registers
_FOUR_WARPS = 1 << 14  # elements of an array in the registers of 128 threads
_UNALIGNED = 4  # times as many registers hold the addresses of single elements
_FEW_PROGRAMS = 264  # two for each multiprocessor of a large GPU
# Bytes of the keys, or of the values, that a program holds: of all of them, or else of a chunk.
_WHOLE_BYTES, _CHUNK_BYTES = 1 << 16, 1 << 15
_WHOLE_COLUMNS = 512


@dataclass(frozen=True)
class Blocks:
    """The sizes of a kernel's tiles, powers of two: of rows, columns, summed features and features
    of a value.

    Attributes:
      chunks: how many tiles of columns there are.
      aligned: whether operands can be read 16 bytes at a time.
    """

    rows: int
    columns: int
    summed: int
    features: int
    chunks: int
    aligned: bool = True

    @property
    def warps(self) -> int:
        """Groups of 32 threads that compute a tile."""
        widest = max(self.summed, self.features) * (1 if self.aligned else _UNALIGNED)
        most = max(self.rows * self.columns, self.columns * widest, self.rows * widest)
        return 4 if most <= _FOUR_WARPS else 8


def blocks_of(found: Attention) -> Blocks:
    """Return the tiles for an attention: few rows where there would be few programs otherwise."""
    sizes, item = found.sizes, found.dtype.itemsize
    whole, summed, features = (
        max(pl.next_power_of_2(n), _LEAST_BLOCK)
        for n in (sizes.columns, sizes.summed, sizes.features)
    )
    bytes_of_one = item * max(summed, features)
    columns = whole
    if whole > min(_WHOLE_COLUMNS, _WHOLE_BYTES // bytes_of_one):
        columns = max(min(whole, _CHUNK_BYTES // bytes_of_one), _LEAST_BLOCK)
    most = min(pl.next_power_of_2(sizes.rows), _MOST_ROWS, _MOST_SCORES // columns)
    rows = _LEAST_BLOCK
    while rows < most and sizes.batch * -(-sizes.rows // (2 * rows)) >= _FEW_PROGRAMS:
        rows *= 2
    aligned = sizes.summed * item % 16 == 0 and sizes.features * item % 16 == 0
    return Blocks(rows, columns, summed, features, -(-sizes.columns // columns), aligned)


def attend(found: Attention, *arrays: jax.Array, interpret: bool = False) -> jax.Array:
    """Return the result of an attention.

    Args:
      arrays: the values of `found.arguments`.
      interpret: run on any platform, as JAX.
    """
    out, blocks = found.result.aval, blocks_of(found)
    passes = passes_of(found)
    times = 1 if blocks.chunks == 1 else len(passes) + 1
    name = name_of(Work(found.sizes, times, multiplied_in(found.scores)))

    def body(*refs: Any) -> None:
        inputs = dict(zip(found.arguments, refs[:-1], strict=True))
        _Program(found, blocks, inputs).run(passes, refs[-1])

    body.__name__ = name
    call = pl.pallas_call(
        body,
        grid=(found.sizes.batch * -(-found.sizes.rows // blocks.rows),),
        out_shape=jax.ShapeDtypeStruct((math.prod(out.shape),), out.dtype),
        compiler_params=triton.CompilerParams(
            num_warps=blocks.warps, num_stages=1 if blocks.chunks == 1 else 2
        ),
        interpret=interpret,
        name=name,
    )
    return call(*(x.reshape(-1) for x in arrays)).reshape(out.shape)


def passes_of(found: Attention) -> list[list[Any]]:
    """Return the reductions between the products, in the order in which they can be computed: those
    of a pass need only the results of the passes before it.
    """
    depth = {found.scores.outvars[0]: 0}
    passes: list[list[Any]] = []
    for equation in found.between:
        own = max(depth[v] for v in variables(equation.invars) if v in depth)
        if equation.primitive.name in tile.REDUCTIONS:
            passes += [[]] * (own == len(passes))
            passes[own] = [*passes[own], equation]
            own += 1
        depth[equation.outvars[0]] = own
    return passes


class _Program:
    """A program of the kernel: a tile of rows of one element of the batch.

    Args:
      inputs: the kernel's inputs, by variable.
    """

    def __init__(self, found: Attention, blocks: Blocks, inputs: Mapping[Any, Any]) -> None:
        self.found, self.blocks, self.inputs = found, blocks, inputs
        sizes = found.sizes
        tiles = -(-sizes.rows // blocks.rows)
        program = pl.program_id(0)
        self.batch = program // tiles if tiles > 1 else program
        first = program % tiles * blocks.rows if tiles > 1 else 0
        padded = sizes.rows % blocks.rows != 0
        self.row = Numbers(first, blocks.rows, sizes.rows, 0, padded=padded)
        padded = sizes.summed != blocks.summed
        self.summed = Numbers(0, blocks.summed, sizes.summed, 1, padded=padded)
        padded = sizes.features != blocks.features
        self.feature = Numbers(0, blocks.features, sizes.features, 1, padded=padded)
        # The numbers by which the second product counts the batch and the rows; they do not depend
        # on a column.
        scores = self.scores(0)
        self.value_batch = scores.along(found.batch_order)
        self.result_row = scores.along(found.row_order)
        self.queries = operand_tile(
            inputs, found.queries, found.query_part, self.batch, self.row, self.summed
        )

    def scores(self, columns: Any) -> Space:
        """Return the positions in the scores of the program's rows and of these columns."""
        sizes = self.found.sizes
        sides = [(sizes.rows, self.row.values), (sizes.columns, columns)]
        return Space((sizes.batch, self.batch), *sides[:: -1 if self.found.columns_first else 1])

    def run(self, passes: Sequence[Sequence[Any]], output: Any) -> None:
        """Compute the tile and write it.

        Args:
          passes: see `passes_of`.
        """
        found, blocks = self.found, self.blocks
        known: dict[Any, jax.Array] = {}
        whole = _Chunk(self, 0, known) if blocks.chunks == 1 else None

        def over_chunks(
            part: Callable[[_Chunk], tuple[jax.Array, ...]],
            join: Callable[[tuple[jax.Array, ...], tuple[jax.Array, ...]], tuple[jax.Array, ...]],
            start: tuple[jax.Array, ...],
        ) -> tuple[jax.Array, ...]:
            if whole is not None:
                return part(whole)
            at_start = dict(known)

            def step(n: Any, before: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                return join(before, part(_Chunk(self, n * blocks.columns, at_start)))

            return lax.fori_loop(0, blocks.chunks, step, start)

        for equations in passes:
            names = [e.primitive.name for e in equations]
            reduced = over_chunks(
                lambda chunk, of=equations: tuple(chunk.reduced(e) for e in of),
                lambda a, b, of=names: tuple(
                    tile.combined(name, x, y) for name, x, y in zip(of, a, b, strict=True)
                ),
                tuple(jnp.full((blocks.rows, 1), tile.START[n], jnp.float32) for n in names),
            )
            for e, value in zip(equations, reduced, strict=True):
                known[e.outvars[0]] = value.astype(e.outvars[0].aval.dtype)
        zeros = jnp.zeros((blocks.rows, blocks.features), jnp.float32)
        (result,) = over_chunks(
            lambda chunk: (chunk.result(),), lambda a, b: (a[0] + b[0],), (zeros,)
        )
        sizes = found.sizes
        sides = [(sizes.rows, self.result_row), (sizes.features, self.feature.values)]
        space = Space((sizes.batch, self.value_batch), *sides[:: 1 if found.rows_first else -1])
        place = jnp.broadcast_to(space.place(found.result_axes), result.shape)
        mask = both(self.row.exist, self.feature.exist)
        if mask is not None:
            mask = jnp.broadcast_to(mask, result.shape)
            place = jnp.where(mask, place, math.prod(found.result.aval.shape))
        triton.store(output.at[place], result.astype(found.result.aval.dtype), mask=mask)


class _Chunk:
    """A tile of scores and what is computed from it.

    Args:
      first: number of the first column.
      known: values of the rows, by variable; they may be added to.
    """

    def __init__(self, program: _Program, first: Any, known: dict[Any, jax.Array]) -> None:
        self.program = program
        found, blocks = program.found, program.blocks
        count, size = blocks.columns, found.sizes.columns
        padded = size % count != 0
        self.column = Numbers(first, count, size, 1, padded=padded)
        self.key = Numbers(first, count, size, 0, padded=padded)
        keys = operand_tile(
            program.inputs, found.keys, found.key_part, program.batch, self.key, program.summed
        )
        scores = product_tile(found.scores, program.queries, keys, 1)
        out = found.scores.outvars[0]
        space, exist = program.scores(self.column.values), (program.row.exist, self.column.exist)
        self.values = Values(
            found.between,
            found.others,
            found.axes,
            program.inputs,
            space,
            exist,
            (out, scores.astype(out.aval.dtype)),
            known,
        )

    def reduced(self, equation: Any) -> jax.Array:
        """Return the reduction of the chunk's columns, [rows, 1], in float32."""
        tiles = jnp.broadcast_to(
            self.values.of(equation.invars[0]),
            (self.program.blocks.rows, self.program.blocks.columns),
        )
        return tile.reduced(equation.primitive.name, tiles, self.column.exist)

    def result(self) -> jax.Array:
        """Return the chunk's part of the result, in float32."""
        program, found = self.program, self.program.found
        weights = self.values.of(found.rows)
        weights = jnp.broadcast_to(weights, (program.blocks.rows, program.blocks.columns))
        if self.column.exist is not None:
            weights = jnp.where(self.column.exist, weights, jnp.zeros((), weights.dtype))
        values = operand_tile(
            program.inputs,
            found.values,
            found.value_part,
            program.value_batch,
            program.feature,
            self.key,
        )
        return product_tile(found.product, weights, values, 0)
