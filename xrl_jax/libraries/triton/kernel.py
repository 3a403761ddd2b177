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
from jax.extend.core import Literal

from xrl_jax.graph.equations import variables
from xrl_jax.libraries.triton import strided, tile
from xrl_jax.libraries.triton.attention import Attention, Operand, Part
from xrl_jax.libraries.triton.naming import Work, name_of
from xrl_jax.libraries.triton.positions import Numbers, Space, both, digits

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


def arguments_of(found: Attention) -> list[Any]:
    """Return the variables that `attend` takes the values of."""
    operands = (found.queries, found.keys, found.values, *found.others.values())
    return list(dict.fromkeys(root for operand in operands for root in operand.roots))


def attend(found: Attention, *arrays: jax.Array, interpret: bool = False) -> jax.Array:
    """Return the result of an attention.

    Args:
      arrays: the values of `arguments_of`.
      interpret: run on any platform, as JAX.
    """
    out, blocks = found.result.aval, blocks_of(found)
    passes = passes_of(found)
    times = 1 if blocks.chunks == 1 else len(passes) + 1
    name = name_of(Work(found.sizes, times, _multiplied_in(found)))

    def body(*refs: Any) -> None:
        inputs = dict(zip(arguments_of(found), refs[:-1], strict=True))
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


def _multiplied_in(found: Attention) -> str:
    """Return the type in which the hardware multiplies."""
    precision = str(found.scores.params["precision"])
    dtype = str(found.dtype)
    exact = "HIGHEST" in precision or "F32_F32_F32" in precision
    return "tf32" if dtype == "float32" and not exact else dtype


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
        self.queries = self.operand(
            found.queries, found.query_part, self.batch, self.row, self.summed
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

    def operand(
        self, operand: Operand, part: Part, batch: Any, free: Numbers, summed: Numbers
    ) -> jax.Array:
        """Return a tile of an operand of a product; what does not exist is 0."""
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
                return _literal(of.root)
            place = of.view.start + strided.offset(of.view.axes, each if of.view.axes else ())
            return _load(self.inputs[of.root], jnp.broadcast_to(place, shape), mask)

        found = read(operand)
        for step in operand.steps:
            given = {v: read(other) for v, other in step.others.items()}
            operands = [
                _literal(v) if isinstance(v, Literal) else given.get(v, found)
                for v in step.equation.invars
            ]
            found = tile.evaluate(step.equation, operands)
        if operand.steps and mask is not None:
            found = jnp.where(mask, found, jnp.zeros((), found.dtype))
        return found


class _Chunk:
    """A tile of scores and what is computed from it.

    Args:
      first: number of the first column.
      known: values of the rows, by variable; they may be added to.
    """

    def __init__(self, program: _Program, first: Any, known: dict[Any, jax.Array]) -> None:
        self.program, self.known = program, known
        found, blocks = program.found, program.blocks
        count, size = blocks.columns, found.sizes.columns
        padded = size % count != 0
        self.column = Numbers(first, count, size, 1, padded=padded)
        self.key = Numbers(first, count, size, 0, padded=padded)
        self.space = program.scores(self.column.values)
        keys = program.operand(found.keys, found.key_part, program.batch, self.key, program.summed)
        scores = _product(found.scores, program.queries, keys, 1)
        out = found.scores.outvars[0].aval
        self.values = {found.scores.outvars[0]: scores.astype(out.dtype)}
        self.producer = {e.outvars[0]: e for e in found.between}

    def value(self, variable: Any) -> jax.Array:
        """Return the tile of a variable between the products."""
        if variable in self.known:
            return self.known[variable]
        if variable not in self.values:
            equation = self.producer[variable]
            self.values[variable] = tile.evaluate(
                equation, [self._operand(equation, v) for v in equation.invars]
            )
        return self.values[variable]

    def reduced(self, equation: Any) -> jax.Array:
        """Return the reduction of the chunk's columns, [rows, 1], in float32."""
        tiles = jnp.broadcast_to(
            self.value(equation.invars[0]), (self.program.blocks.rows, self.program.blocks.columns)
        )
        return tile.reduced(equation.primitive.name, tiles, self.column.exist)

    def result(self) -> jax.Array:
        """Return the chunk's part of the result, in float32."""
        program, found = self.program, self.program.found
        weights = self.value(found.rows)
        weights = jnp.broadcast_to(weights, (program.blocks.rows, program.blocks.columns))
        if self.column.exist is not None:
            weights = jnp.where(self.column.exist, weights, jnp.zeros((), weights.dtype))
        values = program.operand(
            found.values, found.value_part, program.value_batch, program.feature, self.key
        )
        return _product(found.product, weights, values, 0)

    def _operand(self, equation: Any, v: Any) -> jax.Array:
        program = self.program
        if isinstance(v, Literal):
            return _literal(v)
        if v not in program.found.others:
            return self.value(v)
        root, view = program.found.others[v].root, program.found.others[v].view
        if isinstance(root, Literal):
            return _literal(root)
        axes = program.found.axes[equation.outvars[0]] if view.axes else ()
        # Where nothing depends on a row or column, there is nothing to mask for it.
        each = [
            self.space.along(axis) if any(p.stride for p in own) else 0
            for axis, own in zip(axes, view.axes, strict=True)
        ]
        place = jnp.asarray(view.start + strided.offset(view.axes, each), jnp.int32)
        sides = (program.row.exist, self.column.exist)
        masks = [m for s, m in enumerate(sides) if place.ndim == 2 and place.shape[s] > 1]
        return _load(program.inputs[root], place, both(*masks))


def _product(product: Any, left: jax.Array, right: jax.Array, summed: int) -> jax.Array:
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


def _literal(v: Any) -> jax.Array:
    return jnp.asarray(v.val, v.aval.dtype)


def _load(ref: Any, place: Any, mask: jax.Array | None) -> jax.Array:
    """Return the elements at flat positions; 0 where the mask does not hold."""
    if mask is None:
        return triton.load(ref.at[place])
    place, mask = jnp.broadcast_arrays(place, mask)
    return triton.load(ref.at[place], mask=mask, other=0)
