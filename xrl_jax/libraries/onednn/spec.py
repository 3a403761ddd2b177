"""Library calls as plain data: operators, and partitions made of them.

A partition is the part of a program that one library call computes: a list of operators on values,
which are numbered from the inputs on. All values are float32, except weights that a product or a
convolution reads in a narrower type, and inputs that `Widen` reads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax import lax

from xrl_jax.libraries.onednn import operand_types, winograd
from xrl_jax.libraries.onednn.moves import Repeat, Reshape, Shape, Slice, Transpose, Widen


@dataclass(frozen=True)
class Clip:
    """Clipping to the range from `low` to `high`; None means no bound."""

    low: float | None = None
    high: float | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.low is not None:
            x = lax.max(x, lax.full_like(x, self.low))
        return x if self.high is None else lax.min(x, lax.full_like(x, self.high))

    def then(self, other: Clip) -> Clip:
        """Return one clipping equal to this one followed by `other`."""
        low = other.low if self.low is None else other.of_scalar(self.low)
        high = other.high if self.high is None else other.of_scalar(self.high)
        return Clip(low, high)

    def of_scalar(self, x: float) -> float:
        """Return the scalar `x`, clipped."""
        x = x if self.low is None else max(x, self.low)
        return x if self.high is None else min(x, self.high)


RELU = Clip(0.0)


@dataclass(frozen=True)
class Epilogue:
    """Operations on the result of a kernel: add a bias, add an array, clip, in this order.

    `bias` and `addend` say whether the kernel has these operands, which follow its first two;
    `xrl_jax.libraries.base.Epilogue` holds the arrays themselves.
    """

    bias: bool = False
    addend: bool = False
    clip: Clip | None = None

    def __call__(self, y: jax.Array, more: Sequence[jax.Array]) -> jax.Array:
        """Apply the epilogue to `y` as lax code; `more` has the bias and the addend."""
        rest = list(more)
        if self.bias:
            y = y + lax.broadcast_in_dim(rest.pop(0).reshape(-1), y.shape, (y.ndim - 1,))
        if self.addend:
            y = y + rest.pop(0)
        return y if self.clip is None else self.clip(y)


@dataclass(frozen=True)
class Conv:
    """Convolution of images [N, spatial.., C] with kernels [spatial.., C / groups, O]; bias [O].

    In a type narrower than float32 the kernel operand has that type, and the image is rounded to
    it. For integers two operands follow the kernel: the factors of its features [O], and the kernel
    in float32, for images that are not finite (`careful`). Int16 is for kernels of one pixel, whose
    operand is in pairs (`operand_types.pairs`).

    Attributes:
      right: type in which image and kernel are multiplied.
      unsigned: whether the image is in uint8, because it has no negative element.
    """

    stride: Shape
    padding: tuple[tuple[int, int], ...]
    dilation: Shape
    groups: int
    after: Epilogue = Epilogue()
    right: str = "float32"
    unsigned: bool = False

    @property
    def left(self) -> str:
        """The type of the image."""
        return "uint8" if self.unsigned else self.right

    @property
    def n_operands(self) -> int:
        """Number of operands before those of the epilogue."""
        return 4 if self.in_integers else 2

    @property
    def in_integers(self) -> bool:
        return self.right in ("int8", "int16")

    def __call__(self, x: jax.Array, w: jax.Array, *more: jax.Array) -> jax.Array:
        if self.right == "int16":
            levels, scales = operand_types.levels_along(x, (x.ndim - 1,))
            kernel, factors = operand_types.levels_along(more[1], range(w.ndim - 1))
            y = self._convolved(levels, kernel) * (scales * factors)
            more = more[2:]
        elif self.right == "int8":
            levels, scale = operand_types.levels(x)
            y = self._convolved(levels, w.astype(x.dtype)) * (scale * more[0])
            more = more[2:]
        else:
            y = self._convolved(x.astype(self.right), w)
        return self.after(y, more)

    def _convolved(self, x: jax.Array, w: jax.Array) -> jax.Array:
        n = x.ndim
        inner = range(1, n - 1)
        numbers = lax.ConvDimensionNumbers(
            (0, n - 1, *inner), (n - 1, n - 2, *range(n - 2)), (0, n - 1, *inner)
        )
        return lax.conv_general_dilated(
            x,
            w,
            self.stride,
            self.padding,
            rhs_dilation=self.dilation,
            dimension_numbers=numbers,
            feature_group_count=self.groups,
            preferred_element_type=jax.numpy.float32,
        )


@dataclass(frozen=True)
class Dot:
    """Matrix product [.., M, K] by [.., K, N]; bias [1, .., N]; at most one batch axis."""

    left_transposed: bool  # the first operand is stored [.., K, M]
    right_transposed: bool  # the second operand is stored [.., N, K]
    after: Epilogue = Epilogue()
    right: str = "float32"  # type of the second operand; a narrower one is a weight
    n_operands = 2  # before those of the epilogue

    def __call__(self, a: jax.Array, b: jax.Array, *more: jax.Array) -> jax.Array:
        n = a.ndim - 2
        over = (n if self.left_transposed else n + 1, n + 1 if self.right_transposed else n)
        batch = tuple(range(n))
        numbers = ((over[0],), (over[1],)), (batch, batch)
        y = lax.dot_general(a, b, numbers, preferred_element_type=a.dtype)
        return self.after(y, more)


@dataclass(frozen=True)
class Winograd:
    """Winograd convolution of images [N, H, W, C], without stride; bias [O].

    The kernel operand is a result of `winograd.transformed`.

    Attributes:
      tile: number of results in a tile along each axis.
    """

    tile: int
    padding: tuple[tuple[int, int], ...]
    after: Epilogue = Epilogue()
    n_operands = 2  # before those of the epilogue

    def __call__(self, x: jax.Array, w: jax.Array, *more: jax.Array) -> jax.Array:
        return self.after(winograd.convolved(x, w, self.tile, self.padding), more)


Kernel = Conv | Dot | Winograd  # the operators that may have an epilogue


@dataclass(frozen=True)
class Pool:
    """The maximum of each window, or its sum multiplied by `scale`.

    `window`, `stride` and `padding` have one entry for each axis of the array.
    """

    kind: str  # "max" or "sum"
    window: Shape
    stride: Shape
    padding: tuple[tuple[int, int], ...]
    scale: float = 1.0

    def __call__(self, x: jax.Array) -> jax.Array:
        start, combine = (-math.inf, lax.max) if self.kind == "max" else (0.0, lax.add)
        y = lax.reduce_window(x, start, combine, self.window, self.stride, self.padding)
        return y if self.scale == 1 else y * lax.full_like(y, self.scale)


@dataclass(frozen=True)
class Concat:
    axis: int

    def __call__(self, *xs: jax.Array) -> jax.Array:
        return lax.concatenate(xs, self.axis)


@dataclass(frozen=True)
class Binary:
    """Elementwise operation on two arrays of equal rank; axes of the second may have size 1."""

    kind: str  # one of BINARY, named as in lax

    def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return getattr(lax, self.kind)(a, lax.broadcast_in_dim(b, a.shape, tuple(range(a.ndim))))


BINARY = ("add", "sub", "mul", "div", "max", "min")


@dataclass(frozen=True)
class Map:
    """Elementwise function of scalars and of arrays of equal rank, whose axes may have size 1."""

    kind: str  # one of MAPS, named as in lax
    scalars: tuple[float | None, ...]  # for each operand a scalar, or None for the next array

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        shape = jax.numpy.broadcast_shapes(*(a.shape for a in arrays))
        rest = iter(arrays)
        xs = [
            lax.full(shape, n, jax.numpy.float32)
            if n is not None
            else lax.broadcast_in_dim(next(rest), shape, tuple(range(len(shape))))
            for n in self.scalars
        ]
        if self.kind == "integer_pow":
            assert self.scalars[1] is not None
            return lax.integer_pow(xs[0], int(self.scalars[1]))
        if self.kind == "select_n":
            return lax.select_n(xs[0] != 0, *xs[1:])
        return getattr(lax, self.kind)(*xs).astype(jax.numpy.float32)


COMPARISONS = ("eq", "ne", "ge", "gt", "le", "lt")  # results are 1 where true, else 0
# The exponent of `integer_pow` is a scalar; the first operand of `select_n` is true where nonzero.
MAPS = (
    *("exp", "tanh", "logistic", "erf", "erfc", "sqrt", "rsqrt", "neg", "abs", "square"),
    *("floor", "ceil", "integer_pow", "select_n", *BINARY),
    *COMPARISONS,
)


@dataclass(frozen=True)
class Reduce:
    """Reduction over the last axis, which is removed."""

    kind: str  # one of REDUCTIONS

    def __call__(self, x: jax.Array) -> jax.Array:
        start, combine = REDUCTIONS[self.kind]
        return lax.reduce(x, jax.numpy.float32(start), combine, (x.ndim - 1,))


REDUCTIONS = {
    "sum": (0.0, lax.add),
    "max": (-math.inf, lax.max),
    "min": (math.inf, lax.min),
}


@dataclass(frozen=True)
class Scale:
    """Multiplication by a scalar."""

    by: float

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * lax.full_like(x, self.by)


def swap(rank: int) -> Shape:
    """Return the order of axes that swaps the last two."""
    return (*range(rank - 2), rank - 1, rank - 2)


@dataclass(frozen=True)
class Loop:
    """Elementwise functions and reductions, computed row by row by one generated kernel.

    Attributes:
      rows, columns: sizes of the whole arrays; other values have one element for each row.
      inputs: shapes of the arguments.
      code: instructions on values numbered from the arguments on; the last is the result. All
        operators but `Reduce` are elementwise or, as `Reshape` here, change nothing in memory.
    """

    rows: int
    columns: int
    inputs: tuple[Shape, ...]
    code: tuple[Instruction, ...]

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        return _as_lax(self.code, arrays)[-1]


@dataclass(frozen=True)
class Attention:
    """Attention: a product giving scores, a loop over each row of them, a product of its result.

    The operands are those of the first product, the loop's arguments except the scores, and the
    second operand of the last product.

    Attributes:
      at: index of the scores among the loop's arguments.
      transposed: whether the result's last two axes are swapped.
    """

    first: Dot
    loop: Loop
    at: int
    last: Dot
    transposed: bool = False

    def __call__(self, a: jax.Array, b: jax.Array, *more: jax.Array) -> jax.Array:
        scores = self.first(a, b)
        given, c = list(more[:-1]), more[-1]
        given.insert(self.at, scores)
        given = [x.reshape(s) for x, s in zip(given, self.loop.inputs, strict=True)]
        y = self.last(self.loop(*given).reshape(scores.shape), c)
        return jax.numpy.swapaxes(y, -1, -2) if self.transposed else y


_Elementwise = Binary | Clip | Map | Reduce | Scale | Loop
_Move = Reshape | Repeat | Transpose | Slice | Widen
Op = Kernel | Attention | Pool | Concat | _Elementwise | _Move


@dataclass(frozen=True)
class Instruction:
    """An operator, the indices of the values it takes, and the shape of its result."""

    op: Op
    args: tuple[int, ...]
    shape: Shape


def _as_lax(code: Sequence[Instruction], inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Run instructions as lax code; return all values, the inputs first."""
    values = list(inputs)
    for i in code:
        values.append(i.op(*(values[a] for a in i.args)))
    return values


@dataclass(frozen=True)
class Partition:
    """A list of instructions; values are the inputs, then the results of the instructions.

    Attributes:
      packed: for each input, whether it is a weight (the second operand of a `Kernel`) in the
        library's layout, as a vector; such an input has one use.
      outputs: indices of the values returned.
    """

    inputs: tuple[Shape, ...]
    packed: tuple[bool, ...]
    code: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    def __call__(self, *inputs: jax.Array) -> list[jax.Array]:
        """Run the partition as lax code, on inputs that are not packed."""
        values = _as_lax(self.code, inputs)
        return [values[o] for o in self.outputs]

    def shape(self, value: int) -> Shape:
        n = len(self.inputs)
        return self.inputs[value] if value < n else self.code[value - n].shape

    def is_packed(self, value: int) -> bool:
        return value < len(self.inputs) and self.packed[value]

    @functools.cached_property
    def narrow(self) -> dict[int, str]:
        """The types of the inputs that are read by `Widen`; the others are float32 or packed."""
        return {i.args[0]: i.op.dtype for i in self.code if isinstance(i.op, Widen)}

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.inputs, self.packed, self.code, self.outputs))

    def __hash__(self) -> int:
        return self._hash  # a whole network is hashed once for each of its weights
