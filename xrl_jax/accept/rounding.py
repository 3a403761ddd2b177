"""Variances of the rounding errors of operators' results, to first order.

Every operator passes on the errors of its operands (multiplied by its squared derivative) and adds
the rounding of its result and of its sums, all taken as independent. An integer or boolean computed
from floats (a comparison, a rounding, an argmax) is marked where an error of that size could change
it.

Source: N. Higham and T. Mary, A new approach to probabilistic rounding error analysis (SIAM J. Sci.
Comput. 2019).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.graph import kinds, ops
from xrl_jax.graph.attributes import with_kind
from xrl_jax.graph.graph import Node
from xrl_jax.libraries.xla.plain import axes_of
from xrl_jax.lower.table import lower

_SURE = 32.0  # standard errors beyond which a comparison is not in doubt
_DIRECTIONS = 8  # of random errors; with one, some element in a thousand seems to have no error
_EXACT = "neg abs max min clamp copy nextafter iota input weight array const hole pack proj".split()
_MOVES = "transpose reshape broadcast slice rev concat pad".split()
_SUMS = ("reduce_sum", "window_sum", "cumsum")
_EXTREMES = {
    f"{kind}_{way}": f"{kind}_max" for kind in ("reduce", "window") for way in ("max", "min")
}
_EXTREMES |= {"cummax": "cummax", "cummin": "cummax"}
_COMPARISONS = ("eq", "ne", "ge", "gt", "le", "lt")
_STEPS = ("floor", "ceil", "round", "sign")


class Value(NamedTuple):
    """The value of a node and its rounding error.

    Attributes:
      exact: the value; floats in double precision.
      error: of floats the variance of the rounding error, of other dtypes whether such an error
        could change the value; None where there is no error.
    """

    exact: Any
    error: Any = None


def standard_error(v: Value) -> Any:
    """Return the standard rounding error of a float; for other dtypes, whether an error could
    change the value.
    """
    if not is_inexact(v.exact):
        return jnp.zeros(jnp.shape(v.exact), bool) if v.error is None else v.error
    return jnp.zeros(v.exact.shape) if v.error is None else jnp.sqrt(v.error)


def with_rounding_error(
    node: Node, wide: Node, y: Any, dtypes: Sequence[str], xs: Sequence[Value]
) -> Value:
    """Return the result of an operator with its rounding error.

    Args:
      node: the node as in the program.
      wide: the node in double precision.
      y: the exact result.
      dtypes: dtypes of the operands in the program.
      xs: the operands.
    """
    if not xs:
        return Value(y)
    if not is_inexact(y):
        return Value(y, _in_doubt(node, wide, y, xs))
    error = _propagated(node, wide, y, xs)
    if _rounds(node, dtypes):
        error = _sum(error, _rounding(y, jnp.dtype(node.dtype)))
    return Value(y, error)


def _propagated(node: Node, wide: Node, y: Any, xs: Sequence[Value]) -> Any:
    """Return the variance that a float result has from operands and sums; None for none."""
    op = node.op
    if op in ("dot", "conv"):
        return _of_product(node, wide, *xs)
    if op in _SUMS:
        squares = lower(wide, _square(xs[0].exact))
        passed = None if xs[0].error is None else lower(wide, xs[0].error)
        return _sum(passed, _sum_unit(node.dtype) ** 2 * squares)
    if op == "select":
        return _of_select(wide, xs)
    if op == "cast":
        return _of_cast(xs[0])
    if all(x.error is None for x in xs):
        return None
    if op in _MOVES:
        return lower(wide, *map(_variance, xs))
    if op in ("reduce_max", "reduce_min"):
        return _of_extreme(node, y, xs[0])
    if op in _EXTREMES:
        return lower(replace(wide, op=_EXTREMES[op]), xs[0].error)
    if op in _STEPS:
        return _of_step(op, xs[0])
    if op == "softmax":
        return _of_softmax(node, y, xs[0])
    if node.spec.shape == "elementwise":
        return _of_elementwise(wide, xs)
    aval = jax.ShapeDtypeStruct(node.shape, jnp.dtype(node.dtype))
    (result,) = by_random_signs(lambda *a: [lower(wide, *a)], [aval], xs)
    return result.error


def _of_product(node: Node, wide: Node, a: Value, b: Value) -> Any:
    """Return the variance of sums of products: each operand's error multiplied by the other's
    square, and the roundings.

    Computed in float32 with scaling, because two digits of an error's size are enough.
    """
    unit = _sum_unit(node.dtype) ** 2
    left = _sum(a.error, unit * _square(a.exact))
    variance = _narrow_product(wide, left, _square(b.exact))
    if b.error is not None:
        variance = variance + _narrow_product(wide, _square(a.exact), b.error)
    return variance


def _narrow_product(wide: Node, a: Any, b: Any) -> Any:
    scales = [jnp.max(jnp.where(jnp.isfinite(x), x, 0.0), initial=0.0) for x in (a, b)]
    scales = [jnp.where(s > 0, s, 1.0) for s in scales]
    a, b = ((x / s).astype(jnp.float32) for x, s in zip((a, b), scales, strict=True))
    single = _with_dtype(replace(wide, dtype="float32"), "float32")
    return lower(single, a, b).astype(jnp.float64) * scales[0] * scales[1]


def _of_select(wide: Node, xs: Sequence[Value]) -> Any:
    which, *cases = xs
    error = None
    if any(c.error is not None for c in cases):
        error = lower(wide, which.exact, *map(_variance, cases))
    if which.error is not None:
        first, *rest = (c.exact for c in cases)
        apart = functools.reduce(jnp.maximum, (_square(c - first) for c in rest))
        error = _sum(error, jnp.where(which.error, apart, 0.0))
    return error


def _of_cast(x: Value) -> Any:
    if is_inexact(x.exact) or x.error is None:
        return x.error
    return jnp.where(x.error, 1.0, 0.0)


def _of_step(op: str, x: Value) -> Any:
    """Return the variance after a step function: that of a whole step where an error can carry the
    operand across a step, else zero.
    """
    return jnp.where(_near_step(op, x.exact, x.error), 4.0 if op == "sign" else 1.0, 0.0)


def _near_step(op: str, x: Any, error: Any) -> Any:
    border = {"sign": jnp.zeros_like, "round": lambda x: jnp.floor(x) + 0.5}.get(op, jnp.round)(x)
    return jnp.abs(x - border) <= _SURE * jnp.sqrt(error)


def _of_extreme(node: Node, y: Any, x: Value) -> Any:
    """Return the largest error of those elements that may be the extreme one."""
    axes = axes_of(node)
    apart = jnp.abs(x.exact - jnp.expand_dims(y, axes))
    error = jnp.where(apart <= _SURE * jnp.sqrt(x.error), x.error, 0.0)
    return jnp.max(error, axis=axes)


def _of_softmax(node: Node, y: Any, x: Value) -> Any:
    """Return the variance by the derivative dy = y (dx - sum y dx)."""
    axes = axes_of(node)
    common = jnp.sum(_square(y) * x.error, axis=axes, keepdims=True)
    return _scaled(_square(y), x.error + common)


def _of_elementwise(wide: Node, xs: Sequence[Value]) -> Any:
    total = None
    for i, x in enumerate(xs):
        if x.error is None or not is_inexact(x.exact):
            continue

        def of_one(a: Any, i: int = i) -> Any:
            return lower(wide, *(a if j == i else o.exact for j, o in enumerate(xs)))

        _, slope = jax.jvp(of_one, (x.exact,), (jnp.ones_like(x.exact),))
        total = _sum(total, _scaled(_square(slope), x.error))
    return total


def by_random_signs(
    run: Callable[..., Sequence[Any]], avals: Sequence[Any], xs: Sequence[Value]
) -> list[Value]:
    """Return the results of `run` with their errors, from its derivative along operand errors of
    random signs. These include a rounding of every operand, because `run` may sum its operands.
    Where `run` has no derivative, the relative error of its results is that of the operands.
    """
    exact = [x.exact for x in xs]
    moving = [i for i, x in enumerate(xs) if is_inexact(x.exact)]
    in_doubt = [x.error for x in xs if x.error is not None and not is_inexact(x.exact)]

    def of_moving(*moved: Any) -> list[Any]:
        given = list(exact)
        for i, x in zip(moving, moved, strict=True):
            given[i] = x
        return [y for y in run(*given) if is_inexact(y)]

    results = list(run(*exact))
    slopes: list[Any] = [None] * sum(map(is_inexact, results))
    if moving:
        errors = [_variance(xs[i]) + 2.0**-48 * _square(exact[i]) for i in moving]

        def along(key: Any) -> list[Any]:
            steps = [
                (jnp.sqrt(e) * jax.random.rademacher(k, e.shape, jnp.int8)).astype(exact[i].dtype)
                for i, e, k in zip(moving, errors, jax.random.split(key, len(moving)), strict=True)
            ]
            return list(map(_square, jax.jvp(of_moving, [exact[i] for i in moving], steps)[1]))

        try:
            squares = jax.lax.map(along, jax.random.split(jax.random.key(0), _DIRECTIONS))
            slopes = [jnp.sqrt(jnp.mean(s, axis=0)) for s in squares]
        except Exception:  # no derivative is defined
            sizes = [jnp.max(_square(exact[i]), initial=1e-300) for i in moving]
            worst = sum(jnp.max(e, initial=0) / n for e, n in zip(errors, sizes, strict=True))
            slopes = [y * jnp.sqrt(worst) for y in results if is_inexact(y)]
    unsure = jnp.any(jnp.stack([jnp.any(d) for d in in_doubt])) if in_doubt else None
    of = iter(slopes)
    found = []
    for y, aval in zip(results, avals, strict=True):
        if not is_inexact(y):
            found.append(Value(y, None if unsure is None else jnp.broadcast_to(unsure, y.shape)))
            continue
        slope = next(of)
        error = _rounding(y, aval.dtype)
        error = error if slope is None else error + _square(slope)
        if unsure is not None:
            error = jnp.where(unsure, jnp.inf, error)
        found.append(Value(y, error))
    return found


def _in_doubt(node: Node, wide: Node, y: Any, xs: Sequence[Value]) -> Any:
    """Return whether rounding errors could change a result that is not a float; None for no."""
    if all(x.error is None for x in xs):
        return None
    op, (x, *more) = node.op, xs
    floats = is_inexact(x.exact)
    if op in _COMPARISONS and floats:
        variance = _variance(x) + _variance(more[0])
        return jnp.abs(x.exact - more[0].exact) <= _SURE * jnp.sqrt(variance)
    if op == "cast" and floats:
        return _near_step("floor", x.exact, x.error)
    if op in ("argmax", "argmin"):
        return _of_argmax(node, wide, x)
    if op == "is_finite":
        return None
    flags = [jnp.zeros(v.exact.shape, bool) if v.error is None else v.error for v in xs]
    if op in _MOVES:
        return lower(replace(_with_dtype(wide, "bool"), dtype="bool"), *flags)
    if op == "select" or node.spec.shape == "elementwise":
        found = flags[0]
        for f in flags[1:]:
            found = found | f
        return jnp.broadcast_to(found, y.shape)
    return jnp.broadcast_to(jnp.any(jnp.stack([jnp.any(f) for f in flags])), y.shape)


def _of_argmax(node: Node, wide: Node, x: Value) -> Any:
    """Return whether another element is as extreme as the one found, within the errors."""
    axes = axes_of(node)
    if not is_inexact(x.exact):
        return jnp.any(x.error, axis=axes)
    out = x.exact if node.op == "argmax" else -x.exact
    far = _SURE * jnp.sqrt(x.error)
    lowest = jnp.max(out - far, axis=axes, keepdims=True)
    return jnp.sum(out + far >= lowest, axis=axes) > 1


# --- helpers ---


def _rounds(node: Node, dtypes: Sequence[str]) -> bool:
    """Return whether the operator rounds its result, given the dtypes of its operands."""
    if node.op == "cast":
        source, target = (ops.DTYPE_BYTES[ops.DTYPE_CODE[d]] for d in (*dtypes, node.dtype))
        return target < source or "int" in dtypes[0]
    exact = node.op in _EXACT or node.op in _MOVES or node.op in _EXTREMES or node.op in _STEPS
    return not exact and node.op != "select"


def _rounding(y: Any, dtype: Any) -> Any:
    """Return the variance of rounding a result; zero where the dtype holds it exactly."""
    return jnp.where(y == y.astype(dtype), 0.0, _unit(dtype.name) ** 2 * _square(y))


def _unit(dtype: str) -> float:
    """Return the unit roundoff of a float dtype."""
    return float(jnp.finfo(jnp.dtype(dtype)).eps) / 2


def _sum_unit(dtype: str) -> float:
    """Return the unit roundoff of sums, which are accumulated in float32 at least."""
    return min(_unit(dtype), 2.0**-24)


def is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _square(x: Any) -> Any:
    return jnp.real(x * jnp.conj(x)) if jnp.iscomplexobj(x) else x * x


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


def _scaled(by: Any, error: Any) -> Any:
    """Return the product; zero where there is no error, even if a derivative is infinite."""
    return jnp.where(error > 0, by * error, 0.0)


def _variance(x: Value) -> Any:
    return jnp.zeros(x.exact.shape) if x.error is None else x.error


def _with_dtype(node: Node, dtype: str) -> Node:
    """Return the node with another dtype attribute, where it has one."""
    return replace(node, attrs=with_kind(node, kinds.DTYPE, ops.DTYPE_CODE[dtype]))
