"""Operations and bytes of a node, in array form: one rule per family, as in `shapes`.

A rule sees one node: `(xp, weight, attrs [K], shapes [A, R], ranks [A], out [R]) -> flops`, with
shapes padded by ones and `xp` either `numpy` or `jax.numpy`. `weight` is the op's entry in
`WEIGHTS`. Counts are float32, because those of whole networks overflow 32-bit integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, padded
from xrl_jax.graph.shapes import unpack

WorkRule = Callable[..., Any]

# Operations per element: 1 if the hardware does it in one instruction, about 4 for a division or
# square root; for a transcendental function, the cost of the usual polynomial or rational
# approximation with its range reduction (tanh: degrees 13 over 6, thus 13 + division). The roofline
# needs the order of magnitude; timings correct the rest.
_WEIGHT_GROUPS: Mapping[int, str] = MappingProxyType(
    {
        4: "div sqrt rsqrt rem integer_pow",
        10: "exp exp2",
        12: "log expm1 log1p",
        14: "logistic cbrt",
        17: "tanh",
        20: "sin cos erf sinh cosh softmax",
        24: "pow tan asin acos atan atan2 asinh acosh atanh erf_inv cumlogsumexp",
        50: "erfc",  # both of its ranges are computed: erf's, and a quotient with an exponential
        60: "lgamma digamma",
        2: "clamp argmax argmin nextafter",
    }
)
WEIGHTS: Mapping[str, float] = MappingProxyType(
    {name: 1.0 for name in ops.OP_NAMES}
    | {name: float(w) for w, names in _WEIGHT_GROUPS.items() for name in names.split()}
)


def _size(xp: Any, shape: Any) -> Any:
    return xp.prod(shape.astype(xp.float32))


def nothing(xp: Any, weight: Any, attrs: Any, shapes: Any, ranks: Any, out: Any) -> Any:
    """Return 0: sources and movement compute nothing; opaque nodes and calls count elsewhere."""
    return xp.zeros((), xp.float32)


def elementwise(xp: Any, weight: Any, attrs: Any, shapes: Any, ranks: Any, out: Any) -> Any:
    """Return weight times elements of the result; scans and softmax are linear in it, too."""
    return weight * _size(xp, out)


def reduce(xp: Any, weight: Any, attrs: Any, shapes: Any, ranks: Any, out: Any) -> Any:
    """Count n - 1 operations for each reduction of n elements to one."""
    return weight * xp.maximum(_size(xp, shapes[0]) - _size(xp, out), 0.0)


def window(xp: Any, weight: Any, attrs: Any, shapes: Any, ranks: Any, out: Any) -> Any:
    """Count a reduction of one window per element of the result; padding counts as elements."""
    return weight * _size(xp, out) * (_size(xp, attrs[:4]) - 1.0)


def dot(xp: Any, weight: Any, attrs: Any, shapes: Any, ranks: Any, out: Any) -> Any:
    """Count a multiplication and an addition for each contracted element: 2 |out| |contract|."""
    contract = unpack(xp, attrs[0])
    sizes = xp.where(contract >= 0, shapes[0][xp.clip(contract, 0, ops.MAX_RANK - 1)], 1)
    return 2.0 * weight * _size(xp, out) * _size(xp, sizes)


def conv(xp: Any, weight: Any, attrs: Any, shapes: Any, ranks: Any, out: Any) -> Any:
    """Count 2 |out| (in features / groups) |kernel|.

    Products with padding and inserted zeros are counted, too.
    """
    layout = xp.asarray(ops.LAYOUTS)[xp.clip(attrs[13], 0, len(ops.LAYOUTS) - 1)]
    features = shapes[1][layout[0]].astype(xp.float32)
    return 2.0 * weight * _size(xp, out) * _size(xp, shapes[1]) / xp.maximum(features, 1.0)


WORK_RULES: Mapping[str, WorkRule] = MappingProxyType(
    {
        "nothing": nothing,
        "elementwise": elementwise,
        "reduce": reduce,
        "window": window,
        "dot": dot,
        "conv": conv,
    }
)
WORK_FAMILIES: tuple[str, ...] = tuple(WORK_RULES)

# The shape rule determines the family, except for softmax and scans, which keep their argument's
# shape but do compute.
_BY_SHAPE: Mapping[str, str] = MappingProxyType(
    {
        "elementwise": "elementwise",
        "reduce": "reduce",
        "window": "window",
        "dot": "dot",
        "conv": "conv",
    }
)
SCANS = ("softmax", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


def families(specs: Iterable[ops.OpSpec]) -> Mapping[str, str]:
    """Return the family of each operator by name."""
    return MappingProxyType(
        {spec.name: _BY_SHAPE.get(spec.shape, "nothing") for spec in specs}
        | dict.fromkeys(SCANS, "elementwise")
        | dict.fromkeys(("copy", "cast"), "nothing")
    )


FAMILY = families(ops.OPS.values())

# These operators move no bytes: sources are in memory already, tuples and their parts are pointers,
# a reshape is another view, and a call's body is counted as a separate graph.
NO_BYTES = ("hole", *ops.SOURCES, "pack", "proj", "reshape", "call")


def flops(xp: Any, family: str, weight: Any, attrs: Any, shapes: Any, ranks: Any, out: Any) -> Any:
    """Return the flops of one node of a family; see the module docstring for the arguments."""
    return WORK_RULES[family](xp, weight, attrs, shapes, ranks, out)


def bytes_moved(xp: Any, shapes: Any, widths: Any, out: Any, out_width: Any, sliced: Any) -> Any:
    """Return the bytes of one node without fusion: arguments read and result written.

    Args:
      shapes: [A, R] padded by ones.
      widths: [A] bytes per element of the arguments, 0 for absent ones.
      out: [R] shape of the result, of `out_width` bytes per element.
      sliced: whether at most as many elements are read as are written.
    """
    written = _size(xp, out)
    sizes = xp.prod(shapes.astype(xp.float32), axis=1)
    read = xp.sum(xp.where(sliced, xp.minimum(sizes, written), sizes) * widths)
    return read + written * out_width


def node_work(node: Node, args: Sequence[Node]) -> tuple[float, float]:
    """Return flops and bytes of a node on the host, given the nodes of its arguments."""
    shapes = np.ones((ops.MAX_ARGS, ops.MAX_RANK), np.int64)
    ranks = np.zeros(ops.MAX_ARGS, np.int64)
    widths = np.zeros(ops.MAX_ARGS, np.float32)
    for i, arg in enumerate(args):
        shapes[i], ranks[i] = padded(arg.shape), len(arg.shape)
        widths[i] = ops.DTYPE_BYTES[ops.DTYPE_CODE[arg.dtype]]
    out = np.asarray(padded(node.shape))
    weight = np.float32(WEIGHTS[node.op])
    work = flops(np, FAMILY[node.op], weight, np.asarray(node.attrs), shapes, ranks, out)
    if node.op in NO_BYTES:
        return float(work), 0.0
    width = np.float32(ops.DTYPE_BYTES[ops.DTYPE_CODE[node.dtype]])
    return float(work), float(bytes_moved(np, shapes, widths, out, width, node.op == "slice"))


def traced_work(
    op: jax.Array,
    attrs: jax.Array,
    arg_shapes: jax.Array,
    arg_ranks: jax.Array,
    arg_dtypes: jax.Array,
    shape: jax.Array,
    dtype: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return flops and bytes of one node, float32; zeros for a hole. For use in jit and vmap.

    Args:
      attrs: [K].
      arg_shapes: [A, R] padded by ones; arg_ranks, arg_dtypes: [A], a dtype of 0 where there is
        no argument.
      shape: [R], of the result.
    """
    weights = jnp.asarray([WEIGHTS[n] for n in ops.OP_NAMES], jnp.float32)
    families = jnp.asarray([WORK_FAMILIES.index(FAMILY[n]) for n in ops.OP_NAMES], jnp.int32)
    moves = jnp.asarray([n not in NO_BYTES for n in ops.OP_NAMES])
    bytes_of = jnp.asarray(ops.DTYPE_BYTES, jnp.float32)
    rules = [
        lambda *a, rule=rule: jnp.asarray(rule(jnp, *a), jnp.float32)
        for rule in WORK_RULES.values()
    ]
    work = jax.lax.switch(families[op], rules, weights[op], attrs, arg_shapes, arg_ranks, shape)
    widths = jnp.where(arg_dtypes > 0, bytes_of[arg_dtypes], 0.0)
    sliced = op == ops.OPS["slice"].code
    moved = bytes_moved(jnp, arg_shapes, widths, shape, bytes_of[dtype], sliced)
    return work, jnp.where(moves[op], moved, 0.0)
