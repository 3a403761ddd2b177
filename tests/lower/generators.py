"""Random nodes for every operator of the table: one generator for each, found by the operator's
name.

A generator takes a NumPy random generator and gives attributes (by name) and the shapes and dtypes
of arguments that fit them. It is one table, hence one file: a new operator is one more entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, infer, pack_attrs

Rng = np.random.Generator
FLOATS = ("float32", "float16", "bfloat16", "float64")
INTS = ("int32", "int8", "uint8", "uint32", "int64", "int16")
COMPLEX = ("complex64", "complex128")


@dataclass(frozen=True)
class Sample:
    """A node and the arguments it fits."""

    node: Node
    args: tuple[Node, ...]


def sample(op: str, attrs: dict[str, Any], args: Sequence[tuple[tuple[int, ...], str]]) -> Sample:
    """The node of `op`, shape and dtype inferred; AssertionError where the rules refuse it."""
    sources = tuple(Node("input", shape=shape, dtype=dtype, ref=0) for shape, dtype in args)
    packed = pack_attrs(op, attrs)
    inferred = infer(op, packed, sources)
    assert inferred is not None, f"the shape rule of {op!r} refuses {args} with {attrs}"
    shape, dtype = inferred
    return Sample(Node(op, tuple(range(len(sources))), packed, shape=shape, dtype=dtype), sources)


def a_shape(rng: Rng, *, low: int = 0, high: int = 4, least: int = 0) -> tuple[int, ...]:
    """Sizes `least` to 5 in `low` to `high` dimensions."""
    return tuple(int(n) for n in rng.integers(least, 6, rng.integers(low, high + 1)))


def a_choice(rng: Rng, options: Sequence[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


def some_axes(rng: Rng, rank: int) -> tuple[int, ...]:
    return tuple(a for a in range(rank) if rng.integers(2))


def elementwise(op: str, arity: int, dtypes: Sequence[str], **attrs: Callable[[Rng], int]):
    def make(rng: Rng) -> Sample:
        shape, dtype = a_shape(rng), a_choice(rng, dtypes)
        args = [(shape if rng.integers(4) or i == 0 else (), dtype) for i in range(arity)]
        return sample(op, {name: choose(rng) for name, choose in attrs.items()}, args)

    return make


def cast(rng: Rng) -> Sample:
    target = a_choice(rng, (*FLOATS, *INTS, "bool"))
    attrs = {"dtype": ops.DTYPE_CODE[target]}
    return sample("cast", attrs, [(a_shape(rng), a_choice(rng, (*FLOATS, *INTS, "bool")))])


def select(rng: Rng) -> Sample:
    shape, dtype = a_shape(rng), a_choice(rng, (*FLOATS, *INTS, *COMPLEX))
    which = shape if rng.integers(2) else ()
    return sample("select", {}, [(which, "bool"), (shape, dtype), (shape, dtype)])


def clamp(rng: Rng) -> Sample:
    shape, dtype = a_shape(rng), a_choice(rng, (*FLOATS, *INTS))
    bound = shape if rng.integers(2) else ()
    return sample("clamp", {}, [(bound, dtype), (shape, dtype), (bound, dtype)])


def transpose(rng: Rng) -> Sample:
    shape = a_shape(rng, high=6)
    perm = [int(i) for i in rng.permutation(len(shape))]
    return sample("transpose", {"perm": perm}, [(shape, a_choice(rng, FLOATS))])


def reshape(rng: Rng) -> Sample:
    shape = a_shape(rng, high=4)
    target = [int(n) for n in rng.permutation(shape)]
    if rng.integers(2):
        target = [1, int(np.prod(shape)), 1]
    attrs = {"shape": target, "rank": len(target)}
    return sample("reshape", attrs, [(shape, a_choice(rng, INTS))])


def broadcast(rng: Rng) -> Sample:
    target = a_shape(rng, high=6)
    dims = some_axes(rng, len(target))
    shape = tuple(1 if rng.integers(3) == 0 else target[d] for d in dims)
    attrs = {"shape": target, "rank": len(target), "dims": dims}
    return sample("broadcast", attrs, [(shape, a_choice(rng, FLOATS))])


def concat(rng: Rng) -> Sample:
    shape = a_shape(rng, low=1)
    axis = int(rng.integers(len(shape)))
    parts = []
    for _ in range(int(rng.integers(1, ops.MAX_ARGS + 1))):
        part = list(shape)
        part[axis] = int(rng.integers(0, 4))
        parts.append((tuple(part), "float32"))
    return sample("concat", {"axis": axis}, parts)


def slice_(rng: Rng) -> Sample:
    shape = a_shape(rng, high=6)
    start = [int(rng.integers(0, n + 1)) for n in shape]
    limit = [int(rng.integers(s, n + 1)) for s, n in zip(start, shape, strict=True)]
    stride = [int(rng.integers(1, 4)) for _ in shape]
    attrs = {"start": start, "limit": limit, "stride": stride}
    return sample("slice", attrs, [(shape, a_choice(rng, FLOATS))])


def pad(rng: Rng) -> Sample:
    shape, dtype = a_shape(rng, high=5, least=2), a_choice(rng, (*FLOATS, *INTS))
    low, high = ([int(n) for n in rng.integers(-1, 4, len(shape))] for _ in range(2))
    interior = [int(n) for n in rng.integers(0, 3, len(shape))]
    attrs = {"low": low, "high": high, "interior": interior}
    return sample("pad", attrs, [(shape, dtype), ((), dtype)])


def rev(rng: Rng) -> Sample:
    shape = a_shape(rng)
    return sample("rev", {"axes": ops.mask_of(some_axes(rng, len(shape)))}, [(shape, "float32")])


def reduction(op: str, dtypes: Sequence[str]):
    def make(rng: Rng) -> Sample:
        shape = a_shape(rng, low=1, least=1)
        attrs = {"axes": ops.mask_of(some_axes(rng, len(shape)))}
        return sample(op, attrs, [(shape, a_choice(rng, dtypes))])

    return make


def arg_reduction(op: str):
    def make(rng: Rng) -> Sample:
        shape = a_shape(rng, low=1, least=1)
        axis = int(rng.integers(len(shape)))
        attrs = {"axes": 1 << axis, "dtype": ops.DTYPE_CODE[a_choice(rng, ("int32", "int8"))]}
        return sample(op, attrs, [(shape, a_choice(rng, (*FLOATS, *INTS)))])

    return make


def cumulative(op: str, dtypes: Sequence[str]):
    def make(rng: Rng) -> Sample:
        shape = a_shape(rng, low=1)
        attrs = {"axis": int(rng.integers(len(shape))), "reverse": int(rng.integers(2))}
        return sample(op, attrs, [(shape, a_choice(rng, dtypes))])

    return make


def window(op: str):
    def make(rng: Rng) -> Sample:
        rank = int(rng.integers(1, 5))
        shape = tuple(int(n) for n in rng.integers(1, 8, rank))
        size = [int(rng.integers(1, min(n, 3) + 1)) for n in shape]
        stride = [int(n) for n in rng.integers(1, 3, rank)]
        low, high = ([int(rng.integers(0, w)) for w in size] for _ in range(2))
        kind = int(rng.integers(4))
        if kind == 0:  # over the whole array
            size, low, high = list(shape), [0] * rank, [0] * rank
        elif kind == 1 and shape[0] > size[0] > 1:  # XLA aborts on negative padding of a 1x1 window
            low[0] = -1
        attrs = {"window": size, "stride": stride, "low": low, "high": high}
        return sample(op, attrs, [(shape, a_choice(rng, (*FLOATS, *INTS)))])

    return make


def softmax(rng: Rng) -> Sample:
    shape = a_shape(rng, low=1, least=1)
    axes = some_axes(rng, len(shape)) or (len(shape) - 1,)
    dtype = a_choice(rng, ("float32", "float64"))
    return sample("softmax", {"axes": ops.mask_of(axes)}, [(shape, dtype)])


def dot(rng: Rng) -> Sample:
    """Any number of axes of each kind, in any order."""
    n_batch, n_contract, n_left, n_right = (int(rng.integers(0, 3)) for _ in range(4))
    n_left, n_right = min(n_left, 6 - n_batch - n_contract), min(n_right, 6 - n_batch - n_contract)
    while n_batch + n_left + n_right > ops.MAX_RANK:
        n_right -= 1
    sizes = [int(n) for n in rng.integers(1, 5, n_batch + n_contract)]
    sides = []
    for n_free in (n_left, n_right):
        every = sizes + [int(n) for n in rng.integers(1, 5, n_free)]
        order = (
            [int(i) for i in rng.permutation(len(every))] if rng.integers(2) else range(len(every))
        )
        at = {axis: position for position, axis in enumerate(order)}
        sides.append(
            (
                tuple(every[axis] for axis in order),
                [at[i] for i in range(n_batch)],
                [at[n_batch + i] for i in range(n_contract)],
            )
        )
    dtype = a_choice(rng, FLOATS)
    (left, lb, lc), (right, rb, rc) = sides
    attrs = {
        "lhs_contract": ops.pack_dims(tuple(lc)),
        "rhs_contract": ops.pack_dims(tuple(rc)),
        "lhs_batch": ops.pack_dims(tuple(lb)),
        "rhs_batch": ops.pack_dims(tuple(rb)),
        "dtype": ops.DTYPE_CODE[dtype],
    }
    return sample("dot", attrs, [(left, dtype), (right, dtype)])


def conv(rng: Rng) -> Sample:
    """One or two spatial dimensions, any layout (the usual ones more often), dilations, groups; one
    in six has the kernel that most networks have, 3 x 3, and features for more than a vector.
    """
    usual = rng.integers(6) == 0
    n = 2 if usual or rng.integers(5) else 1
    groups = 1 if usual else a_choice(rng, (1, 1, 2, 4, 8))
    width = a_choice(rng, (1, 4, 17) if usual else (1, 2, 3))
    outs = groups * a_choice(rng, (1, 2, width))
    pointwise = not usual and rng.integers(4) == 0
    kernel = [1 if pointwise else 3 if usual else int(rng.integers(1, 4)) for _ in range(n)]
    dilation = [1 if pointwise or usual else int(rng.integers(1, 3)) for _ in range(n)]
    lhs_dilation = [int(rng.integers(1, 3)) if rng.integers(4) == 0 else 1 for _ in range(n)]
    spatial = [int(rng.integers((k - 1) * d + 2, 9)) for k, d in zip(kernel, dilation, strict=True)]
    low, high = ([int(rng.integers(-1, 3)) for _ in range(n)] for _ in range(2))
    batch_groups = 2 if groups == 1 and rng.integers(8) == 0 else 1
    outs *= batch_groups
    batch = batch_groups * int(rng.integers(1, 3))
    layouts = []
    for common in ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)):
        choice = int(rng.integers(3))
        order = [int(i) for i in rng.permutation(n + 2)]
        if choice == 0:
            order = list(common[: n + 2])
        elif choice == 1:
            order = [0, n + 1, *range(1, n + 1)]
        layouts.append(tuple(order))
    dtype = a_choice(rng, FLOATS)

    def place(sizes: Sequence[int], layout: Sequence[int]) -> tuple[int, ...]:
        out = [0] * len(sizes)
        for size, position in zip(sizes, layout, strict=True):
            out[position] = size
        return tuple(out)

    attrs = {
        "stride": [1 if usual else int(rng.integers(1, 3)) for _ in range(n)],
        "low": low,
        "high": high,
        "lhs_dilation": lhs_dilation,
        "rhs_dilation": dilation,
        "groups": groups,
        "batch_groups": batch_groups,
        "lhs_layout": ops.LAYOUT_CODE[layouts[0]],
        "rhs_layout": ops.LAYOUT_CODE[layouts[1]],
        "out_layout": ops.LAYOUT_CODE[layouts[2]],
        "dtype": ops.DTYPE_CODE[dtype],
    }
    left = place([batch, groups * width, *spatial], layouts[0])
    right = place([outs, width, *kernel], layouts[1])
    return sample("conv", attrs, [(left, dtype), (right, dtype)])


def const(rng: Rng) -> Sample:
    shape, dtype = a_shape(rng), a_choice(rng, (*FLOATS, *INTS, "bool"))
    return Sample(Node("const", shape=shape, dtype=dtype, value=1.0), ())


def iota(rng: Rng) -> Sample:
    shape, dtype = a_shape(rng, low=1), a_choice(rng, (*FLOATS, *INTS))
    attrs = pack_attrs("iota", {"axis": int(rng.integers(len(shape)))})
    return Sample(Node("iota", attrs=attrs, shape=shape, dtype=dtype), ())


_ANY = (*FLOATS, *INTS, *COMPLEX)
_REAL = (*FLOATS, *INTS)
_LOGICAL = (*INTS, "bool")
_DTYPES: dict[str, Sequence[str]] = {
    **dict.fromkeys("neg square copy add sub mul div eq ne".split(), _ANY),
    **dict.fromkeys("max min rem ge gt le lt".split(), _REAL),
    **dict.fromkeys("not and or xor".split(), _LOGICAL),
    **dict.fromkeys("population_count clz shift_left".split(), INTS),
    **dict.fromkeys("shift_right_logical shift_right_arithmetic".split(), INTS),
    "abs": (*FLOATS, "int32", "int8"),
    "sign": _ANY,
    "nextafter": ("float32", "float64"),
}
GENERATORS: dict[str, Callable[[Rng], Sample]] = {
    "const": const,
    "iota": iota,
    "cast": cast,
    "select": select,
    "clamp": clamp,
    "transpose": transpose,
    "reshape": reshape,
    "broadcast": broadcast,
    "concat": concat,
    "slice": slice_,
    "pad": pad,
    "rev": rev,
    "argmax": arg_reduction("argmax"),
    "argmin": arg_reduction("argmin"),
    "softmax": softmax,
    "dot": dot,
    "conv": conv,
    "is_finite": elementwise("is_finite", 1, FLOATS),
    "round": elementwise("round", 1, FLOATS, method=lambda rng: int(rng.integers(2))),
    "integer_pow": elementwise(
        "integer_pow", 1, FLOATS, exponent=lambda rng: int(rng.integers(-3, 6))
    ),
    **{
        name: elementwise(name, spec.arity[0], _DTYPES.get(name, FLOATS))
        for name, spec in ops.OPS.items()
        if spec.shape == "elementwise" and not spec.fields and name not in ("select", "clamp")
    },
    **{
        f"reduce_{kind}": reduction(f"reduce_{kind}", dtypes)
        for kind, dtypes in {
            "sum": _ANY,
            "prod": _ANY,
            "max": _REAL,
            "min": _REAL,
            "and": _LOGICAL,
            "or": _LOGICAL,
            "xor": _LOGICAL,
        }.items()
    },
    **{
        f"cum{kind}": cumulative(f"cum{kind}", dtypes)
        for kind, dtypes in {
            "sum": _ANY,
            "prod": _ANY,
            "max": _REAL,
            "min": _REAL,
            "logsumexp": FLOATS,
        }.items()
    },
    **{name: window(name) for name in ("window_sum", "window_max", "window_min")},
}
