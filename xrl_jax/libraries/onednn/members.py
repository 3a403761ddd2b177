"""Translation of jaxpr equations to the library's operators and their operands.

Jaxprs express the same operator in several ways: scalars are broadcast to whole arrays, axes are
broadcast by an equation of their own, means are sums multiplied by a scalar.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from xrl_jax.graph import ops
from xrl_jax.libraries.onednn import kernels, loops
from xrl_jax.libraries.onednn.code import WIDTH
from xrl_jax.libraries.onednn.spec import (
    BINARY,
    COMPARISONS,
    MAPS,
    Binary,
    Clip,
    Concat,
    Map,
    Op,
    Pool,
    Reduce,
    Repeat,
    Reshape,
    Scale,
    Slice,
    Transpose,
    Widen,
)

_LARGEST_POWER = 8
_SMALLEST = 2.0**-126  # positive normal float32


class Operand(NamedTuple):
    """A variable, read as an array of this shape."""

    variable: Any
    shape: tuple[int, ...]


class Member(NamedTuple):
    """An equation, its operator, and the operands that the library takes for it."""

    equation: Any
    op: Op
    operands: list[Operand]

    @property
    def result(self) -> Any:
        return self.equation.outvars[0]

    @property
    def taken(self) -> list[Any]:
        return [o.variable for o in self.operands]


def _operands(e: Any, op: Op, producer: dict[Any, Any]) -> list[Operand]:
    """Return the operands of the operator, without the scalars that it holds itself."""
    if isinstance(op, Binary):
        sources = [_source(v, e, producer) for v in e.invars]
        return sources if sources[0].shape == e.outvars[0].aval.shape else sources[::-1]
    if isinstance(op, Repeat):
        return [_source(e.outvars[0], e, producer)]
    atoms = e.invars
    if isinstance(op, Clip | Scale | Map):
        atoms = [v for v in atoms if _scalar(v, producer) is None]
    if isinstance(op, Map):
        return [_source(v, e, producer) for v in atoms]
    return [Operand(v, v.aval.shape) for v in atoms]


def _source(v: Any, of: Any, producer: dict[Any, Any]) -> Operand:
    """Return operand `v` of an equation or, if it is broadcast, its source with axes of size 1."""
    if not v.aval.shape:
        return Operand(v, (1,) * len(of.outvars[0].aval.shape))
    e = producer.get(v)
    if e is None or not is_broadcast(e) or isinstance(e.invars[0], Literal):
        return Operand(v, v.aval.shape)
    source, axes = e.invars[0], e.params["broadcast_dimensions"]
    shape = [1] * len(v.aval.shape)
    for a, n in zip(axes, source.aval.shape, strict=True):
        shape[a] = n
    return Operand(source, tuple(shape))


def is_broadcast(e: Any) -> bool:
    return e.primitive.name == "broadcast_in_dim"


def _is_array(v: Any, e: Any) -> bool:
    return not isinstance(v, Literal) and v.aval.shape == e.outvars[0].aval.shape


def as_member(e: Any, producer: dict[Any, Any]) -> Member | None:
    """Translate the equation; return None if the library cannot do it."""
    op = _as_op(e, producer)
    if op is None:
        return None
    member = _member(e, op, producer)
    if member is None and isinstance(op, Binary):
        member = _member(e, Map(op.kind, (None, None)), producer)
    return member


def _member(e: Any, op: Op, producer: dict[Any, Any]) -> Member | None:
    """Return the equation as this operator; None if the library has no kernel for the shapes."""
    operands = _operands(e, op, producer)
    if loops.needs_loop(op):
        possible = loops.is_possible(op, [o.shape for o in operands], e.outvars[0].aval.shape)
        return Member(e, op, operands) if possible else None
    shape = result_shape(op, operands, e.outvars[0].aval.shape)
    part = kernels.single_op(op, [o.shape for o in operands], shape)
    return Member(e, op, operands) if kernels.is_possible(part) else None


def _as_op(e: Any, producer: dict[Any, Any]) -> Op | None:
    """Return the operator of the equation; None if the library has none for it."""
    if e.primitive is kernels.kernel_p:
        return e.params["op"]
    kind, p = e.primitive.name, e.params
    # Booleans are passed to the library as float32 (`partition._run`).
    floats = e.invars[1:] if kind == "select_n" and len(e.invars) == 3 else e.invars
    results = () if kind in COMPARISONS else e.outvars
    if any(getattr(v.aval, "dtype", None) != "float32" for v in (*floats, *results)):
        return None
    match kind:
        case "reduce_window_max":
            return _pool("max", p)
        case "concatenate":
            return Concat(p["dimension"]) if not _has_literal(e) else None
        case "reduce_window_sum":
            return _pool("sum", p)
        case kind if kind in BINARY:
            return _with_scalar(e, producer) or _binary(e, producer) or _map(e, producer)
        case kind if kind in MAPS:
            return _map(e, producer)
        case "reduce_sum" | "reduce_max" | "reduce_min":
            return _reduction(kind.removeprefix("reduce_"), e.invars[0].aval.shape, p["axes"])
        case "reshape" | "squeeze" | "expand_dims" | "copy" | "stop_gradient":
            return Reshape(e.outvars[0].aval.shape) if not _has_literal(e) else None
        case "broadcast_in_dim" if not _has_literal(e):
            shape, grows = e.outvars[0].aval.shape, e.outvars[0].aval.size > e.invars[0].aval.size
            return Repeat(shape) if grows else Reshape(shape)
        case "slice":
            step = tuple(p["strides"] or (1,) * len(e.outvars[0].aval.shape))
            return Slice(tuple(p["start_indices"]), tuple(p["limit_indices"]), step)
        case "transpose":
            return Transpose(tuple(p["permutation"]))
    return None


def as_widened(
    e: Any, producer: dict[Any, Any], readers: Mapping[Any, Sequence[Any]]
) -> Member | None:
    """Return a conversion from bfloat16 or float16 as a member; None if the equation is none.

    It may be of an array, or of adjacent elements of one that nothing else reads.
    """
    if e.primitive.name != "convert_element_type" or e.outvars[0].aval.dtype != "float32":
        return None
    source = e.invars[0]
    if isinstance(source, Literal) or str(source.aval.dtype) not in ops.NARROW_DTYPES:
        return None
    dtype, slices = str(source.aval.dtype), []
    while (by := producer.get(source)) is not None and len(readers[source]) == 1:
        if by.primitive.name == "slice":
            slices.append(by)
        elif slices or by.primitive.name not in ("reshape", "squeeze"):
            break
        source = by.invars[0]
    shape = source.aval.shape
    part = Slice((0,) * len(shape), shape, (1,) * len(shape))
    for by in reversed(slices):
        part = _slice_of(part, by.params, by.outvars[0].aval.shape)
    large = math.prod(part.sizes) >= WIDTH
    adjacent = _is_adjacent(part, shape)
    return Member(e, Widen(dtype, part), [Operand(source, shape)]) if large and adjacent else None


def _is_adjacent(part: Slice, shape: tuple[int, ...]) -> bool:
    """Return whether the elements of a slice of a row-major array lie one after the other."""
    sizes = part.sizes
    first = next((a for a, n in enumerate(sizes) if n > 1), len(sizes))
    steps = part.step[first:]
    return steps == (1,) * len(steps) and sizes[first + 1 :] == shape[first + 1 :]


def _slice_of(outer: Slice, p: Any, shape: tuple[int, ...]) -> Slice:
    """Return a slice of a slice as one slice; `shape` is its result's."""
    steps = p["strides"] or (1,) * len(shape)
    starts = zip(outer.start, outer.step, p["start_indices"], strict=True)
    start = tuple(a + s * b for a, s, b in starts)
    step = tuple(a * b for a, b in zip(outer.step, steps, strict=True))
    stop = tuple(a + s * (n - 1) + 1 for a, s, n in zip(start, step, shape, strict=True))
    return Slice(start, stop, step)


def _reduction(kind: str, shape: tuple[int, ...], axes: Sequence[int]) -> Reduce | Pool | None:
    """Return a reduction of the last axis, or the sum of an image as a pool of one window."""
    if tuple(axes) == (len(shape) - 1,):
        return Reduce(kind)
    if kind == "sum" and len(shape) == 4 and len(axes) == 2 and all(shape[a] > 1 for a in axes):
        window = tuple(n if a in axes else 1 for a, n in enumerate(shape))
        return Pool("sum", window, (1, 1, 1, 1), ((0, 0),) * 4)
    return None


def result_shape(op: Op, operands: Sequence[Operand], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the operator's result, given the `shape` of the equation's result.

    They differ where a sum over axes becomes a pool, which keeps the axes of its window.
    """
    if isinstance(op, Pool) and len(shape) < len(op.window):
        return tuple(n - w + 1 for n, w in zip(operands[0].shape, op.window, strict=True))
    if isinstance(op, Widen):
        return op.part.sizes
    return shape


def _pool(kind: str, p: dict[str, Any]) -> Pool | None:
    window, stride = p["window_dimensions"], p["window_strides"]
    if {*p["base_dilation"], *p["window_dilation"]} != {1}:
        return None
    moving = [i for i, n in enumerate(window) if (n, stride[i]) != (1, 1)]
    still = [i for i in range(len(window)) if i not in moving]
    if len(moving) not in (1, 2) or not 2 <= len(still) <= 4 - len(moving):
        return None
    if any(p["padding"][i] != (0, 0) for i in still):
        return None
    if any(max(p["padding"][i]) >= window[i] or min(p["padding"][i]) < 0 for i in moving):
        return None
    return Pool(kind, tuple(window), tuple(stride), tuple(tuple(q) for q in p["padding"]))


def _has_literal(e: Any) -> bool:
    return any(isinstance(v, Literal) for v in e.invars)


def _with_scalar(e: Any, producer: dict[Any, Any]) -> Clip | Scale | None:
    """Return a `Clip` or `Scale` for an operation on an array and a finite scalar, else None."""
    scalars = [_scalar(v, producer) for v in e.invars]
    at = 0 if scalars[0] is None else 1  # index of the array
    scalar = scalars[1 - at]
    if scalar is None or scalars[at] is not None or not _is_array(e.invars[at], e):
        return None
    if not math.isfinite(scalar):
        return None
    match e.primitive.name:
        case "max":
            return Clip(low=scalar)
        case "min":
            return Clip(high=scalar)
        case "mul":
            return Scale(scalar)
        case "div":
            return Scale(1 / scalar) if at == 0 and _is_inverted(scalar) else None
    return None


def _is_inverted(scalar: float) -> bool:
    """Return whether 1 / scalar is a normal float32, with full precision."""
    return _SMALLEST <= abs(scalar) <= 1 / _SMALLEST


def _map(e: Any, producer: dict[Any, Any]) -> Map | None:
    """Return an elementwise function of scalars and at least one array, else None."""
    kind, scalars = e.primitive.name, tuple(_scalar(v, producer) for v in e.invars)
    if kind == "integer_pow":
        if abs(e.params["y"]) > _LARGEST_POWER:
            return None
        return Map(kind, (None, float(e.params["y"]))) if scalars == (None,) else None
    arrays = [v for v, n in zip(e.invars, scalars, strict=True) if n is None]
    if any(isinstance(v, Literal) for v in arrays):
        return None
    return Map(kind, scalars) if arrays else None


def _binary(e: Any, producer: dict[Any, Any]) -> Binary | None:
    """Return an operation on two arrays, else None.

    One of them may have axes of size 1: the second, or either if the operation is commutative.
    """
    kind, shape = e.primitive.name, e.outvars[0].aval.shape
    if any(isinstance(v, Literal) for v in e.invars):
        return None
    first, second = (_source(v, e, producer).shape == shape for v in e.invars)
    commutes = kind not in ("sub", "div")
    return Binary(kind) if first or (second and commutes) else None


def _scalar(v: Any, producer: dict[Any, Any]) -> float | None:
    """Return the scalar that an operand is, or is broadcast from; None if it is neither."""
    if isinstance(v, Literal):
        scalar = float(v.val) if np.shape(v.val) == () else math.nan
        return None if math.isnan(scalar) else scalar
    e = producer.get(v)
    if e is not None and is_broadcast(e):
        return _scalar(e.invars[0], producer)
    if e is not None and e.primitive.name == "div" and v.aval.shape == ():
        over, under = (_scalar(n, producer) for n in e.invars)
        return over / under if over is not None and under else None
    return None
