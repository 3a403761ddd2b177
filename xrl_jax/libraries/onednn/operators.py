"""Planning of the operators that take no weight, for values in any layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp

from xrl_jax.libraries.onednn import rows
from xrl_jax.libraries.onednn.attention import Attended
from xrl_jax.libraries.onednn.builder import Builder, Part, Value, block_of
from xrl_jax.libraries.onednn.c_api import DST, SRC, Desc, UnimplementedError, row_major
from xrl_jax.libraries.onednn.code import WIDTH
from xrl_jax.libraries.onednn.convert import Converted
from xrl_jax.libraries.onednn.int16 import RowLevels
from xrl_jax.libraries.onednn.keeping import Clipped
from xrl_jax.libraries.onednn.levels import Largest, Levels
from xrl_jax.libraries.onednn.native import Place
from xrl_jax.libraries.onednn.post_ops import PostOps
from xrl_jax.libraries.onednn.server import MOST_ARGUMENTS
from xrl_jax.libraries.onednn.spec import (
    Attention,
    Clip,
    Loop,
    Pool,
    Scale,
    Shape,
    Slice,
    Widen,
    swap,
)

_BYTES = 4  # of a float32
_LEAST_COLUMNS = 8  # of a loop on transposed axes: half a vector


class InLevels(NamedTuple):
    """The levels of an array, their factor, and the number of steps after which it is computed."""

    levels: Value
    scale: Value
    n_steps: int


@dataclass
class Operators(Builder):
    """Builder of the steps of the operators that take no weight.

    Attributes:
      in_levels: arrays in integers, by the index of the value, its layout and the type.
    """

    in_levels: dict[tuple[int, Shape, str], InLevels] = field(default_factory=dict)

    def levels(self, number: int, x: Value, shape: Shape, dtype: str) -> InLevels:
        """Return the levels of the value of this index, computed once for all readers.

        Args:
          dtype: int8 or, if no level is negative, uint8.
        """
        n = math.prod(shape)
        if n < WIDTH:
            raise UnimplementedError(f"levels of {n} elements")
        strides = self.lib.strides(x.desc)
        if strides is None or self.lib.nbytes(x.desc) != _BYTES * n:
            strides, x = row_major(shape), self.to_layout(x, self.lib.desc(shape))
        key = number, strides, dtype
        if key not in self.in_levels:
            largest, levels = Largest(n), Levels(n)
            parts, scale = (self.lib.desc((k,)) for k in (largest.blocks, 1))
            narrow = self.lib.desc(shape, strides, dtype)
            made = [Value(desc, self.block(desc)) for desc in (parts, scale, narrow)]
            self.append(largest, [(0, v.desc, v.place) for v in (x, made[0])])
            self.append(levels, [(0, v.desc, v.place) for v in (x, *made)])
            self.in_levels[key] = InLevels(made[2], made[1], len(self.steps))
        return self.in_levels[key]

    def row_levels(self, number: int, x: Value, shape: Shape) -> InLevels:
        """Return the levels in int16 of the rows of the value of this index, as pairs, and their
        factors; computed once for all readers.
        """
        k, rows = shape[-1], math.prod(shape[:-1])
        if k < WIDTH:
            raise UnimplementedError(f"levels of rows of {k} elements")
        key = number, shape, "int16"
        if key not in self.in_levels:
            x = self.to_layout(x, self.lib.desc(shape))
            found = self.lib.desc((rows, -(-k // 2)), dtype="int32"), self.lib.desc((rows,))
            levels, scales = (Value(desc, self.block(desc)) for desc in found)
            self.append(RowLevels(rows, k), [(0, v.desc, v.place) for v in (x, levels, scales)])
            self.in_levels[key] = InLevels(levels, scales, len(self.steps))
        return self.in_levels[key]

    def forget_steps(self, n_steps: int) -> None:
        super().forget_steps(n_steps)
        self.in_levels = {k: v for k, v in self.in_levels.items() if v.n_steps <= n_steps}

    def slice(self, op: Slice, x: Value, whole: Shape, shape: Shape) -> Value:
        """Return the slice in the memory of the array."""
        return self._view(op, self.to_layout(x, self.lib.desc(whole)), whole, shape, "float32")

    def widened(self, op: Widen, x: Value, whole: Shape, output: Place | None) -> Value:
        """Return an adjacent slice of a row-major array of a narrow type, in float32."""
        shape = op.part.sizes
        view = self._view(op.part, x, whole, shape, op.dtype)
        y = self.result(self.lib.desc(shape), output)
        what = Converted(math.prod(shape), op.dtype)
        self.append(what, [(0, v.desc, v.place) for v in (view, y)])
        return y

    def _view(self, op: Slice, x: Value, whole: Shape, shape: Shape, dtype: str) -> Value:
        """Return a slice in the memory of a row-major array of this type."""
        strides, place = row_major(whole), x.place
        nbytes = jnp.dtype(dtype).itemsize
        offset = nbytes * sum(a * s for a, s in zip(op.start, strides, strict=True))
        if isinstance(place, Place):
            place = place._replace(offset=place.offset + offset)
        elif offset:
            inner = place.offset if isinstance(place, Part) else 0
            place = Part(block_of(place), inner + offset)
        steps = [a * b for a, b in zip(strides, op.step, strict=True)]
        return Value(self.lib.desc(shape, steps, dtype), place)

    def elementwise(
        self, op: Clip | Scale, shape: Sequence[int], x: Value, output: Place | None
    ) -> Value:
        what = PostOps(clip=op) if isinstance(op, Clip) else PostOps(scale=op.by)
        if not what.elementwise:  # multiplied by one
            return x if output is None else self.copied(x, output, shape)
        dst = x.desc if output is None else self.lib.desc(shape)
        x = self.to_layout(x, dst)
        y = self.result(dst, output)
        self.run(self.lib.elementwise(x.desc, dst, what), [(SRC, x), (DST, y)])
        return y

    def clipped(self, clip: Clip, x: Value, dense: Desc, y: Value | None = None) -> Value:
        """Clip an array by generated code, into `y` (of the same layout) or in place.

        If its layout has zeros as padding that clipping would change, the array is converted to
        the layout `dense` first, and `y` is not used.
        """
        if self.lib.nbytes(x.desc) != self.lib.nbytes(dense) and clip.of_scalar(0.0) != 0:
            x, y = self.new_copy(x, dense), None
        y = y or x
        n = self.lib.nbytes(x.desc) // 4
        self.append(Clipped(n, clip), [(0, v.desc, v.place) for v in (x, y)])
        return y

    def loop(
        self, op: Loop, shape: Sequence[int], args: Sequence[Value], output: Place | None
    ) -> Value:
        if len(args) >= MOST_ARGUMENTS:
            raise UnimplementedError(f"a loop has {len(args)} arguments, which is too many")
        plain = self.lib.desc(shape)
        desc, flat = args[0].desc, rows.flattened(op)
        alike = all(self.lib.equal(x.desc, desc) for x in args)
        alike &= self.lib.nbytes(desc) == _BYTES * math.prod(shape)  # no padding
        if flat is not None and alike and (output is None or self.lib.equal(desc, plain)):
            op, operands = flat, list(args)
        elif output is None and (order := self.common_order(op, shape, args)) is not None:
            back, op = [order.index(a) for a in range(len(shape))], rows.transposed(op, order) or op
            operands = [
                self.to_layout(x, self.lib.permuted(self.lib.desc(s), back))
                for x, s in zip(args, op.inputs, strict=True)
            ]
            desc = self.lib.permuted(self.lib.desc(op.code[-1].shape), back)
        else:
            desc = plain
            operands = self.row_major(args, op.inputs)
        y = self.result(desc, output)
        self.append(op, [(0, v.desc, v.place) for v in (*operands, y)])
        return y

    def common_order(
        self, op: Loop, shape: Sequence[int], args: Sequence[Value]
    ) -> tuple[int, ...] | None:
        """Return the order in memory of the axes of most arguments, for a loop to follow.

        None if that is the usual order, or if the loop cannot follow it.
        """
        found: Counter[tuple[int, ...]] = Counter()
        for x, s in zip(args, op.inputs, strict=True):
            strides = self.lib.strides(x.desc) if s == shape else None
            if strides is None:
                continue
            steps = dict(enumerate(strides))
            order = sorted(steps, key=lambda a: (s[a] > 1, -steps[a]))
            dims = [s[a] for a in order]
            dense = zip(dims, row_major(dims), order, strict=True)
            if all(n == 1 or steps[a] == step for n, step, a in dense):
                found[tuple(order)] += 1
        (order, _), *_ = *found.most_common(1), ((), 0)
        is_usual = [a for a in order if shape[a] > 1] == sorted(a for a in order if shape[a] > 1)
        if is_usual or shape[order[-1]] < _LEAST_COLUMNS or rows.transposed(op, order) is None:
            return None
        return order

    def attention(
        self,
        op: Attention,
        shapes: Sequence[Shape],
        args: Sequence[Value],
        strides: Shape | None,
        output: Place | None,
    ) -> Value:
        """Append attention by generated code; operands of its products may have any strides.

        Args:
          shapes: shapes of the arguments.
          strides: strides of the result before `op.transposed` swaps its axes; None for row-major.
        """
        if len(args) >= MOST_ARGUMENTS:
            raise UnimplementedError(f"an attention has {len(args)} arguments, which is too many")
        a, b, *others, c = args
        transposed = op.first.left_transposed, op.first.right_transposed, op.last.right_transposed
        operands, sizes, steps = [], [], []
        for x, shape, is_transposed in zip(
            (a, b, c), (*shapes[:2], shapes[-1]), transposed, strict=True
        ):
            found = self.lib.strides(x.desc)
            if found is None:
                x, found = self.to_layout(x, self.lib.desc(shape)), row_major(shape)
            operands.append(x)
            sizes.append(_as_matrices(shape, is_transposed))
            steps.append(_as_matrices(found, is_transposed, 0))
        (batch, m, k), (_, _, n), (_, _, d) = sizes
        shape = (*shapes[0][:-2], m, d)
        strides = strides or row_major(shape)
        loop_operands = self.row_major(others, shapes[2:-1])
        y = self.result(self.lib.desc(shape, strides), output)
        layouts = (*steps, _as_matrices(strides, False, 0))
        what = Attended(batch, m, k, n, d, layouts, op.loop, op.at, self.lib.lanes)
        used = (*operands[:2], *loop_operands, operands[2], y)
        self.append(what, [(0, v.desc, v.place) for v in used])
        return self.transposed(y, swap(len(shape))) if op.transposed else y

    def pool(self, op: Pool, x: Value, whole: Shape, shape: Shape, output: Place | None) -> Value:
        moving = self.spatial(op, x)
        order = (*(d for d in range(len(shape)) if d not in moving), *moving)
        back = tuple(order.index(d) for d in range(len(shape)))
        dtype = self.lib.dtype(x.desc)
        dst = self.requested_layout(shape, order, output, dtype)
        x = self.transposed(x, order)
        window, stride = ([f[d] for d in order[2:]] for f in (op.window, op.stride))
        padding = [op.padding[d] for d in order[2:]]
        # A sum is an average multiplied by the size of the window; 49 * (1 / 49) is not quite 1.
        kind, scale = ("max", 1.0) if op.kind == "max" else ("average", float(math.prod(window)))
        scale *= op.scale
        scale = 1.0 if math.isclose(scale, 1, rel_tol=1e-12) else scale
        # For a window that is all -inf, the library gives the lowest finite float32.
        after = PostOps(scale=scale, overflow=op.kind == "max")
        into = output
        try:
            prim = self.lib.pool(kind, x.desc, dst, window, stride, padding, after)
            slow = self.lib.implementation(prim).startswith("simple")
        except UnimplementedError:
            slow = True
        if slow:  # a layout with the features last is fast
            into = None
            dims = [whole[d] for d in (order[0], *moving, order[1])]
            first = (0, len(dims) - 1, *range(1, len(dims) - 1))
            x = self.to_layout(x, self.lib.permuted(self.lib.desc(dims, dtype=dtype), first))
            dst = self.lib.any_desc([shape[d] for d in order], dtype)
            prim = self.lib.pool(kind, x.desc, dst, window, stride, padding, after)
        y = self.result(self.lib.of(prim, "dst"), into)
        self.run(prim, [(SRC, x), (DST, y)])
        y = self.transposed(y, back)
        return y if output is None or into is not None else self.copied(y, output, shape)

    def spatial(self, op: Pool, x: Value) -> list[int]:
        """Return the spatial axes of a pool.

        Windows move along them, or along only one of an image's two. In that case the features are
        the axis that is innermost in memory or, if windows move along that one, the first after
        the batch; the axis left over is the second spatial one.
        """
        moving = [d for d, n in enumerate(op.window) if (n, op.stride[d]) != (1, 1)]
        if len(op.window) - len(moving) == 2:
            return moving
        _, *others = (d for d in range(len(op.window)) if d not in moving)
        _, strides, _, blocked, _ = self.lib.layout(x.desc)
        innermost = min(range(1, len(strides)), key=lambda d: (d not in blocked, strides[d]))
        others.remove(innermost if innermost in others else others[0])
        return sorted((*moving, *others))

    def copied(self, value: Value, output: Place, shape: Sequence[int]) -> Value:
        """Copy the array to a result of the call, row-major."""
        y = Value(self.lib.desc(shape), output)
        self.run(self.lib.reorder(value.desc, y.desc), [(SRC, value), (DST, y)])
        return y


def _as_matrices(of: Sequence[int], is_transposed: bool, batch: int = 1) -> tuple[int, int, int]:
    """Return the sizes or strides of a batch of matrices, transposed if `is_transposed`.

    `batch` is the value for a batch axis that is missing.
    """
    first, second = of[-2:]
    return (
        of[0] if len(of) == 3 else batch,
        *((second, first) if is_transposed else (first, second)),
    )
