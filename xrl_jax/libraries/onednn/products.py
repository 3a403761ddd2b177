"""Planning of convolutions and matrix products, whose weights may be packed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from xrl_jax.libraries.onednn.blocked import Blocked
from xrl_jax.libraries.onednn.builder import Value
from xrl_jax.libraries.onednn.c_api import (
    ADDEND,
    BIAS,
    DST,
    SRC,
    SRC_1,
    SRC_SCALE,
    WEIGHTS,
    WEIGHTS_SCALES,
    Desc,
    Prim,
    UnimplementedError,
    row_major,
)
from xrl_jax.libraries.onednn.flow import STRIP
from xrl_jax.libraries.onednn.int16 import Products16
from xrl_jax.libraries.onednn.native import Place
from xrl_jax.libraries.onednn.operators import Operators
from xrl_jax.libraries.onednn.post_ops import PostOps
from xrl_jax.libraries.onednn.spec import (
    Conv,
    Dot,
    Epilogue,
    Instruction,
    Partition,
    Shape,
    Winograd,
    swap,
)
from xrl_jax.libraries.onednn.stream import MOST_ROWS, Streamed, uses_strips
from xrl_jax.libraries.onednn.tiles import Results, Tiles
from xrl_jax.libraries.onednn.winograd import n_tiles

_EXACT = ("brdgmm", "x64:gemm")  # implementations that compute no features beyond the last
_MOST_FEATURES = 1 << 16  # of Winograd convolutions: the features of a pixel are kept on the stack


class Packing(NamedTuple):
    """How a weight is packed.

    Attributes:
      nbytes: size of the packed weight.
      moves: for each part of the weight, its layouts before and after packing.
    """

    nbytes: int
    moves: tuple[tuple[Desc, Desc], ...]


@dataclass
class Products(Operators):
    """Builder of the steps of convolutions and products."""

    partition: Partition = field(kw_only=True)
    strides: dict[int, Shape] = field(kw_only=True)  # by value, see `strides.result_strides`
    types: dict[int, str] = field(default_factory=dict)  # by value, see `result_types`
    weights: dict[int, Packing] = field(default_factory=dict)

    def shape_of(self, value: int) -> tuple[int, ...]:
        return self.partition.shape(value)

    def convolution(
        self, op: Conv, i: Instruction, args: list[Value], output: Place | None
    ) -> Value:
        if op.right == "int16":
            return self.in_int16(op, i, args, output)
        n = len(i.shape)
        x_shape, w_shape = self.shape_of(i.args[0]), self.shape_of(i.args[1])
        # Axes of size 1 first: the library's tiles go along the last one.
        inner = sorted(range(1, n - 1), key=lambda a: (x_shape[a], i.shape[a]) != (1, 1))
        first = (0, n - 1, *inner)  # features before the spatial axes
        src = self.lib.any_desc([x_shape[a] for a in first], op.left)
        dtype = self.types.get(len(self.values), "float32")
        dst = self.requested_layout(i.shape, first, output, dtype)
        w, steps = args[1], self.lib.strides(args[1].desc)
        if steps is None:  # a blocked layout
            w, steps = self.to_layout(w, self.lib.desc(w_shape)), row_major(w_shape)
        dims, strides = kernel_layout(w_shape, steps, op.groups, inner)
        weights = self.lib.any_desc(dims, op.right)
        stride, dilation = ([f[a - 1] for a in inner] for f in (op.stride, op.dilation))
        padding = [op.padding[a - 1] for a in inner]

        def make(bias: Desc | None, post_ops: PostOps) -> Prim:
            scales = (1 if op.groups == 1 else 3) if op.right == "int8" else None
            return self.lib.convolution(
                src, weights, bias, dst, stride, dilation, padding, post_ops, scales
            )

        more, factors = args[op.n_operands :], None
        if op.right == "int8":
            levels, scale, _ = self.levels(i.args[0], args[0], x_shape, op.left)
            args, factors = [levels, *args[1:]], [(SRC_SCALE, scale), (WEIGHTS_SCALES, args[2])]
        x = self.transposed(args[0], first)
        w = Value(self.lib.desc(dims, strides, op.right), w.place)
        bias = more.pop(0) if op.after.bias else None
        addend = self.transposed(more.pop(0), first) if op.after.addend else None
        after, clip = op.after, op.after.clip
        if clip is not None and self.computes_padding_features(op, i, make):
            after = replace(after, clip=None)  # in float32, by generated code
            dst = self.requested_layout(i.shape, first, output)
        y = self.product(make, after, i.args[1], x, w, bias, addend, output, factors or ())
        if after != op.after and clip is not None:
            y = self.clipped(clip, y, self.requested_layout(i.shape, first, Place.result(0)))
        return self.transposed(y, [first.index(a) for a in range(n)])

    def in_int16(self, op: Conv, i: Instruction, args: list[Value], output: Place | None) -> Value:
        """Append a convolution of one pixel in int16, which is a product of rows of pixels."""
        if not self.partition.is_packed(i.args[1]):
            raise UnimplementedError("a kernel in int16 that is not packed")
        lib, shape = self.lib, self.shape_of(i.args[0])
        levels, scales, _ = self.row_levels(i.args[0], args[0], shape)
        k, n = shape[-1], i.shape[-1]
        packed = self.pack_in_strips(i.args[1], -(-k // 2), n, (n, 1), "int32")
        more = self.row_major(
            args[op.n_operands :], [self.shape_of(a) for a in i.args[op.n_operands :]]
        )
        y = self.result(lib.desc(i.shape), output)
        what = Products16(math.prod(i.shape) // n, k, n, op.after, lib.lanes)
        used = (levels, scales, Value(packed, args[1].place), args[2], *more, y)
        self.append(what, [(0, v.desc, v.place) for v in used])
        return y

    def computes_padding_features(
        self, op: Conv, i: Instruction, make: Callable[[Desc | None, PostOps], Prim]
    ) -> bool:
        """Return whether the library computes features beyond the last, from data after an array.

        They may be NaN; if they were clipped, the NaN would set a flag (`flags`), and the whole
        call would be rerun.
        """
        features = i.shape[-1]
        if op.groups != features:
            features //= op.groups
        if features >= self.lib.lanes:
            return False
        return not self.lib.implementation(make(None, PostOps())).startswith(_EXACT)

    def dot(self, op: Dot, i: Instruction, args: list[Value], output: Place | None) -> Value:
        if uses_strips(self.partition, i):
            return self.by_strips(op, i, args, output)
        if op.right != "float32":
            raise UnimplementedError(f"a product with a weight in {op.right}, outside of strips")
        swapped = swap(len(i.shape))
        x = self.transposed(args[0], swapped) if op.left_transposed else args[0]
        w = self.transposed(args[1], swapped) if op.right_transposed else args[1]
        weights = w.desc
        if self.partition.is_packed(i.args[1]):
            dims = self.shape_of(i.args[1])
            weights = self.lib.any_desc([dims[a] for a in swapped] if op.right_transposed else dims)
        dst = self.lib.desc(i.shape)
        if output is None and (strides := self.strides.get(len(self.values))) is not None:
            with contextlib.suppress(UnimplementedError):
                transposed = self.lib.desc(i.shape, strides)
                self.lib.matmul(x.desc, weights, None, transposed, PostOps())
                dst = transposed

        def make(bias: Desc | None, post_ops: PostOps) -> Prim:
            return self.lib.matmul(x.desc, weights, bias, dst, post_ops)

        more = args[2:]
        bias = more.pop(0) if op.after.bias else None
        addend = more.pop(0) if op.after.addend else None
        return self.product(make, op.after, i.args[1], x, w, bias, addend, output)

    def by_strips(self, dot: Dot, i: Instruction, args: list[Value], output: Place | None) -> Value:
        """Append a product [rows, k] with a weight [k, n], in any layouts, by generated code."""
        lib = self.lib
        k, n = self.shape_of(i.args[1])[:: -1 if dot.right_transposed else 1]
        rows = math.prod(i.shape) // n
        x = self.transposed(args[0], (1, 0)) if dot.left_transposed else args[0]
        steps = (1, k) if dot.right_transposed else (n, 1)
        packed = self.pack_in_strips(i.args[1], k, n, steps, dot.right)
        by_rows, by_columns = lib.desc((rows, k)), lib.desc((rows, k), (1, rows))
        if rows <= MOST_ROWS:
            what: Streamed | Blocked = Streamed(rows, k, n, dot.after, dot.right)
            x = self.to_layout(x, by_columns)
        else:
            transposed = lib.equal(x.desc, by_columns)
            what = Blocked(rows, k, n, transposed, dot.after, lib.lanes, dot.right)
            x = x if transposed else self.to_layout(x, by_rows)
        operands = self.row_major(args[2:], [self.shape_of(a) for a in i.args[2:]])
        y = self.result(lib.desc(i.shape), output)
        used = (x, Value(packed, args[1].place), *operands, y)
        self.append(what, [(0, v.desc, v.place) for v in used])
        return y

    def pack_in_strips(
        self, weight: int, k: int, n: int, strides: tuple[int, int], dtype: str
    ) -> Desc:
        """Return the layout in strips of a weight [k, n] with these strides; record its packing."""
        lib = self.lib
        whole, left = divmod(n, STRIP)
        packed = lib.desc(((whole + (left > 0)) * k, STRIP), dtype=dtype)
        moves = []
        if whole:
            steps = (STRIP * strides[1], *strides)
            before = lib.desc((whole, k, STRIP), steps, dtype)
            moves.append((before, lib.desc((whole, k, STRIP), dtype=dtype)))
        if left:
            whole_weight = lib.desc((k, n), strides, dtype)
            before = lib.part(whole_weight, (k, left), (0, whole * STRIP))
            moves.append((before, lib.part(packed, (k, left), (whole * k, 0))))
        self.weights[weight] = Packing(lib.nbytes(packed), tuple(moves))
        return packed

    def winograd(
        self, op: Winograd, i: Instruction, args: list[Value], output: Place | None
    ) -> Value:
        shape, dims = self.shape_of(i.args[0]), self.shape_of(i.args[1])
        if max(dims) > _MOST_FEATURES:
            raise UnimplementedError(f"a kernel of {dims}")
        height, width = (
            n_tiles(n, p, op.tile) for n, p in zip(shape[1:3], op.padding, strict=True)
        )
        low = op.padding[0][0], op.padding[1][0]
        before = Tiles(op.tile, shape, (height, width), low)
        after = Results(op.tile, i.shape, (height, width), op.after)
        x = self.to_layout(args[0], self.lib.desc(shape))
        source, dst = self.lib.desc(before.shape), self.lib.desc(after.shape)
        tiles = Value(source, self.block(source))
        self.append(before, [(0, v.desc, v.place) for v in (x, tiles)])
        weights = self.lib.any_desc(dims) if self.partition.is_packed(i.args[1]) else args[1].desc

        def make(bias: Desc | None, post_ops: PostOps) -> Prim:
            return self.lib.matmul(source, weights, bias, dst, post_ops)

        products = self.product(make, Epilogue(), i.args[1], tiles, args[1], None, None, None)
        operands = self.row_major(args[2:], [self.shape_of(a) for a in i.args[2:]])
        y = self.result(self.lib.desc(i.shape), output)
        self.append(after, [(0, v.desc, v.place) for v in (products, *operands, y)])
        return y

    def product(
        self,
        make: Callable[[Desc | None, PostOps], Prim],
        after: Epilogue,
        weight: int,
        x: Value,
        w: Value,
        bias: Value | None,
        addend: Value | None,
        output: Place | None,
        factors: Sequence[tuple[int, Value]] = (),
    ) -> Value:
        """Append a convolution or product with its epilogue.

        The addend is added by a step of its own where its layout differs from the result's.

        Args:
          factors: further arguments of the primitive, those of operands in int8.
        """
        bias_desc = None if bias is None else bias.desc
        plain = PostOps(clip=after.clip if addend is None else None)
        prim = make(bias_desc, plain)
        sum_apart = False
        if addend is not None:
            dst = self.lib.of(prim, "dst")
            layouts = self.lib.layout(addend.desc), self.lib.layout(dst)  # whatever their types
            sum_apart = not self.lib.equal(addend.desc, dst) and layouts[0] != layouts[1]
            if not sum_apart:
                try:
                    prim = make(bias_desc, PostOps(addend.desc, clip=after.clip))
                except UnimplementedError:
                    sum_apart = True
        x = self.to_layout(x, self.lib.of(prim, "src"))
        wanted = self.lib.of(prim, "weights")
        packs = self.partition.is_packed(weight)
        w = self.packed(weight, w, wanted) if packs else self.to_layout(w, wanted)
        dst = self.lib.of(prim, "dst")
        y = self.result(dst, None if sum_apart else output)
        operands = [(SRC, x), (WEIGHTS, w), (DST, y), *factors]
        if bias is not None:
            operands.append((BIAS, bias))
        if addend is not None and not sum_apart:
            operands.append((ADDEND, addend))
        self.run(prim, operands)
        if addend is None or not sum_apart:
            return y
        total = self.result(dst, output)
        prim = self.lib.binary("add", dst, addend.desc, dst, PostOps(clip=after.clip))
        self.run(prim, [(SRC, y), (SRC_1, addend), (DST, total)])
        return total

    def packed(self, weight: int, w: Value, wanted: Desc) -> Value:
        """Return a packed weight, in the layout that a primitive wants; record its packing."""
        self.weights[weight] = Packing(self.lib.nbytes(wanted), ((w.desc, wanted),))
        return Value(wanted, w.place)


def kernel_layout(
    shape: Sequence[int], strides: Sequence[int], groups: int, inner: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the dimensions and strides of a kernel [spatial.., C / groups, O] in another order.

    That is O C spatial or, with groups, G O C spatial.

    Args:
      strides: strides of the kernel in memory.
      inner: the order of the spatial axes, counted from 1 on.
    """
    *_, c, o = range(len(shape))
    axes = (o, c, *(a - 1 for a in inner))
    dims, steps = [shape[d] for d in axes], [strides[d] for d in axes]
    if groups == 1:
        return dims, steps
    features = dims[0] // groups
    return [groups, features, *dims[1:]], [features * steps[0], *steps]
