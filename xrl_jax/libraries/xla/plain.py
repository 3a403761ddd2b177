"""The plain lowering of every operator: the lax primitive that the front ends translate from, with
the same parameters, so that results are bit-identical to the traced function's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xrl_jax.graph import ops
from xrl_jax.graph.graph import GraphError, Node
from xrl_jax.libraries.base import Lowering


def dims(node: Node, name: str, rank: int) -> tuple[int, ...]:
    """Return the first `rank` entries of an attribute with several entries."""
    values = node.attr(name)
    assert isinstance(values, tuple)
    return values[:rank]


def number(node: Node, name: str) -> int:
    """Return an attribute of width one."""
    value = node.attr(name)
    assert isinstance(value, int)
    return value


def axes_of(node: Node) -> tuple[int, ...]:
    """Return the axes in the node's mask, ascending."""
    return ops.axes_of(number(node, "axes"))


def dtype_attr(node: Node) -> str:
    """Return the dtype that the node's dtype attribute names."""
    return ops.DTYPES[number(node, "dtype")]


def accumulator(node: Node, *arrays: jax.Array) -> str | None:
    """Return a contraction's `preferred_element_type`: None if all arguments have that dtype."""
    out = dtype_attr(node)
    return None if all(a.dtype.name == out for a in arrays) else out


# --- dot and conv ---


def dot_dims(node: Node) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return a dot node's `dimension_numbers`: ((lhs, rhs contract), (lhs, rhs batch))."""
    lc, rc, lb, rb = (
        ops.unpack_dims(number(node, f))
        for f in ("lhs_contract", "rhs_contract", "lhs_batch", "rhs_batch")
    )
    return (lc, rc), (lb, rb)


def dot_rows(node: Node, shape: Sequence[int]) -> int:
    """Return the number of rows of a product without a batch, given its left operand's shape."""
    (contracted, _), _ = dot_dims(node)
    return math.prod(n for d, n in enumerate(shape) if d not in contracted)


def dot(node: Node, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Compute `lax.dot_general`."""
    return lax.dot_general(
        lhs,
        rhs,
        dot_dims(node),  # type: ignore[arg-type]
        precision=ops.decode_precision(number(node, "precision")),
        preferred_element_type=accumulator(node, lhs, rhs),
    )


def conv_layouts(node: Node) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the layouts (batch or out feature, feature, spatial...) of arguments and result."""
    left, right, out = (
        tuple(d for d in ops.LAYOUTS[number(node, f)] if d >= 0)
        for f in ("lhs_layout", "rhs_layout", "out_layout")
    )
    return left, right, out


def conv(node: Node, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Compute `lax.conv_general_dilated` over one or two spatial dimensions."""
    left, right, out = conv_layouts(node)
    n = len(left) - 2
    return lax.conv_general_dilated(
        lhs,
        rhs,
        window_strides=dims(node, "stride", n),
        padding=tuple(zip(dims(node, "low", n), dims(node, "high", n), strict=True)),
        lhs_dilation=dims(node, "lhs_dilation", n),
        rhs_dilation=dims(node, "rhs_dilation", n),
        dimension_numbers=lax.ConvDimensionNumbers(left, right, out),
        feature_group_count=number(node, "groups"),
        batch_group_count=number(node, "batch_groups"),
        precision=ops.decode_precision(number(node, "precision")),
        preferred_element_type=accumulator(node, lhs, rhs),  # type: ignore[arg-type]
    )


# --- everything else ---


def softmax(node: Node, x: jax.Array) -> jax.Array:
    """Compute exp(x - max x) / sum exp(x - max x) over the masked axes, like `jax.nn.softmax`."""
    axes = axes_of(node)
    kept = tuple(d for d in range(x.ndim) if d not in axes)

    def spread(reduced: jax.Array) -> jax.Array:
        shape = tuple(1 if d in axes else n for d, n in enumerate(x.shape))
        return lax.broadcast_in_dim(reduced, shape, kept)

    top = spread(lax.max(jnp.asarray(-jnp.inf, x.dtype), lax.reduce_max(x, axes)))
    weights = jnp.exp(x - lax.stop_gradient(top))
    return weights / spread(lax.reduce_sum(weights, axes))


def _window(primitive: Any) -> Callable[..., jax.Array]:
    def fn(node: Node, x: jax.Array) -> jax.Array:
        low, high = dims(node, "low", x.ndim), dims(node, "high", x.ndim)
        return primitive.bind(
            x,
            window_dimensions=dims(node, "window", x.ndim),
            window_strides=dims(node, "stride", x.ndim),
            padding=tuple(zip(low, high, strict=True)),
            base_dilation=(1,) * x.ndim,
            window_dilation=(1,) * x.ndim,
        )

    return fn


def _const(node: Node) -> jax.Array:
    scalar = jnp.dtype(node.dtype).type(node.value)
    if not node.shape:
        return scalar  # type: ignore[return-value]
    return lax.full(node.shape, scalar, node.dtype)


def _arg(reduce: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def fn(node: Node, x: jax.Array) -> jax.Array:
        (axis,) = axes_of(node)
        return reduce(x, axis, dtype_attr(node))

    return fn


def _from_bindings(node: Node, *arrays: Any) -> Any:
    raise GraphError(
        f"a {node.op!r} node needs its bindings: evaluate it with program.program.evaluate"
    )


def _pad(node: Node, x: jax.Array, value: jax.Array) -> jax.Array:
    widths = (dims(node, f, x.ndim) for f in ("low", "high", "interior"))
    return lax.pad(x, value, tuple(zip(*widths, strict=True)))


def _broadcast(node: Node, x: jax.Array) -> jax.Array:
    shape = dims(node, "shape", number(node, "rank"))
    return lax.broadcast_in_dim(x, shape, dims(node, "dims", x.ndim))


def _slice(node: Node, x: jax.Array) -> jax.Array:
    start, limit, stride = (dims(node, f, x.ndim) for f in ("start", "limit", "stride"))
    return lax.slice(x, start, limit, stride)


# Operators with another name in lax.
_LAX_NAME = {"not": "bitwise_not", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
_REDUCTIONS = [n for n in ops.OPS if n.startswith("reduce_")]
_CUMULATIVE = [n for n in ops.OPS if n.startswith("cum")]


def _elementwise(name: str) -> Callable[..., jax.Array]:
    fn = getattr(lax, _LAX_NAME.get(name, name))
    return lambda node, *arrays: fn(*arrays)


def _reduction(name: str) -> Callable[..., jax.Array]:
    fn = getattr(lax, name)
    return lambda node, x: fn(x, axes_of(node))


def _cumulative(name: str) -> Callable[..., jax.Array]:
    fn = getattr(lax, name)
    return lambda node, x: fn(x, axis=number(node, "axis"), reverse=bool(number(node, "reverse")))


_SPECIAL: dict[str, Callable[..., Any]] = {
    "hole": _from_bindings,
    "input": _from_bindings,
    "weight": _from_bindings,
    "array": _from_bindings,
    "opaque": _from_bindings,
    "call": _from_bindings,
    "const": _const,
    "iota": lambda node: lax.broadcasted_iota(node.dtype, node.shape, number(node, "axis")),
    "pack": lambda node, *arrays: arrays,
    "proj": lambda node, results: results[number(node, "index")],
    "copy": lambda node, x: lax.copy_p.bind(x),
    "round": lambda node, x: lax.round(x, lax.RoundingMethod(number(node, "method"))),
    "integer_pow": lambda node, x: lax.integer_pow(x, number(node, "exponent")),
    "cast": lambda node, x: lax.convert_element_type(x, dtype_attr(node)),
    "select": lambda node, which, *cases: lax.select_n(which, *cases),
    "transpose": lambda node, x: lax.transpose(x, dims(node, "perm", x.ndim)),
    "reshape": lambda node, x: lax.reshape(x, dims(node, "shape", number(node, "rank"))),
    "broadcast": _broadcast,
    "concat": lambda node, *arrays: lax.concatenate(arrays, number(node, "axis")),
    "slice": _slice,
    "pad": _pad,
    "rev": lambda node, x: lax.rev(x, axes_of(node)),
    "argmax": _arg(lax.argmax),
    "argmin": _arg(lax.argmin),
    "window_sum": _window(lax.reduce_window_sum_p),
    "window_max": _window(lax.reduce_window_max_p),
    "window_min": _window(lax.reduce_window_min_p),
    "softmax": softmax,
    "dot": dot,
    "conv": conv,
    **{name: _reduction(name) for name in _REDUCTIONS},
    **{name: _cumulative(name) for name in _CUMULATIVE},
}

PLAIN: Mapping[str, Lowering] = MappingProxyType(
    {name: Lowering("plain", _SPECIAL.get(name) or _elementwise(name)) for name in ops.OPS}
)
