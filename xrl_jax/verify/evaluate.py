"""A small evaluator of tensor graphs over any domain of `domains`, in NumPy.

Operators that move elements work on arrays of any dtype, including the residue pairs of the field;
arithmetic is left to the domain. An elementwise operator without an entry in the tables is
uninterpreted: a keyed hash of its arguments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node
from xrl_jax.verify.domains import INCREASING, Field, Floats, Integers, Value, rounded

Domain = Field | Integers | Floats


class CannotEvaluateError(ValueError):
    """A node has no meaning in the domain."""


def evaluate(
    nodes: Sequence[Node], outputs: Sequence[int], sources: Mapping[int, Value], domain: Domain
) -> list[Value]:
    """Return the values of the outputs.

    Args:
      nodes: in topological order.
      sources: for every node with a `ref`, keyed by it, its value; for a node with arguments, a
        function of the arguments' values.

    Raises:
      CannotEvaluateError: an operator is neither elementwise nor in the tables below.
    """
    values: list[Value] = []
    with np.errstate(all="ignore"):
        for node in nodes:
            if node.ref >= 0:
                source = sources[node.ref]
                values.append(source(*(values[a] for a in node.args)) if node.args else source)
            elif node.op == "const":
                values.append(domain.const(node.value))
            else:
                args = [values[a] for a in node.args]
                value = _apply(node, args, [nodes[a].dtype for a in node.args], domain)
                if isinstance(domain, Floats):
                    value = np.asarray(value, domain.dtype)
                values.append(np.broadcast_to(value, node.shape))
    return [values[o] for o in outputs]


def _apply(node: Node, args: list[Value], dtypes: list[str], domain: Domain) -> Value:
    op = node.op
    if op in _ARITHMETIC:
        if op == "div" and "float" not in node.dtype and "complex" not in node.dtype:
            return domain.uninterpreted("integer division", tuple(args))
        return getattr(domain, op)(*args)
    if op in _MOVEMENT:
        return _MOVEMENT[op](node, args, domain)
    if op in _SPECIAL:
        return _SPECIAL[op](node, args, dtypes, domain)
    if node.spec.shape != "elementwise":
        raise CannotEvaluateError(f"{op} cannot be evaluated in this domain")
    name = op if not node.spec.fields else f"{op}{node.attrs}"
    if op in INCREASING:
        return domain.monotone(op, args[0])
    return domain.uninterpreted(name, tuple(args))


_ARITHMETIC = ("add", "sub", "mul", "div", "neg", "exp")

# --- order


def _extreme(domain: Domain, a: Value, b: Value, sign: int) -> Value:
    a, b = np.broadcast_arrays(a, b)
    if isinstance(domain, Floats):
        return np.maximum(a, b) if sign > 0 else np.minimum(a, b)
    first = domain.rank(a) >= domain.rank(b) if sign > 0 else domain.rank(a) <= domain.rank(b)
    return np.where(first, a, b)


def _reduce_extreme(domain: Domain, x: Value, axes: tuple[int, ...], sign: int) -> Value:
    kept = [d for d in range(x.ndim) if d not in axes]
    rows = np.transpose(x, (*axes, *kept))
    rows = rows.reshape(math.prod(x.shape[d] for d in axes), *(x.shape[d] for d in kept))
    total = np.broadcast_to(domain.const(-math.inf * sign), rows.shape[1:])
    for row in rows:
        total = _extreme(domain, total, row, sign)
    return total


def _fold(domain: Domain, op: str, parts: Sequence[Value]) -> Value:
    total = parts[0]
    for part in parts[1:]:
        total = (
            domain.add(total, part)
            if op.endswith("sum")
            else _extreme(domain, total, part, 1 if op.endswith("max") else -1)
        )
    return total


def _compare(node: Node, args: list[Value], dtypes: list[str], domain: Domain) -> Value:
    a, b = (domain.rank(x) for x in args)
    if node.op in ("eq", "ne") and not isinstance(domain, Floats):
        left, right = np.broadcast_arrays(*args)
        same = left == right
        return domain.truth(same if node.op == "eq" else ~same)
    test = {"eq": a == b, "ne": a != b, "ge": a >= b, "gt": a > b, "le": a <= b, "lt": a < b}
    return domain.truth(test[node.op])


def _select(node: Node, args: list[Value], dtypes: list[str], domain: Domain) -> Value:
    which, no, yes = np.broadcast_arrays(*args)
    return np.where(domain.is_true(which), yes, no)


def _logic(node: Node, args: list[Value], dtypes: list[str], domain: Domain) -> Value:
    if dtypes[0] != "bool":
        if node.op in ("and", "or", "xor"):  # commutative, otherwise uninterpreted
            args = [_extreme(domain, args[0], args[1], -1), _extreme(domain, args[0], args[1], 1)]
        return domain.uninterpreted(node.op, tuple(args))
    bits = [domain.is_true(a) for a in args]
    match node.op:
        case "not":
            return domain.truth(~bits[0])
        case "and":
            return domain.truth(bits[0] & bits[1])
        case "or":
            return domain.truth(bits[0] | bits[1])
        case _:
            return domain.truth(bits[0] ^ bits[1])


# --- functions


def _integer_pow(domain: Domain, x: Value, n: int) -> Value:
    total = np.broadcast_to(domain.const(1.0), x.shape)
    for _ in range(abs(n)):
        total = domain.mul(total, x)
    return domain.div(np.broadcast_to(domain.const(1.0), x.shape), total) if n < 0 else total


def _pow(node: Node, args: list[Value], dtypes: list[str], domain: Domain) -> Value:
    if isinstance(domain, Floats):
        # With full arrays: for a scalar exponent, NumPy computes a root of -inf as NaN.
        return np.power(*map(np.array, np.broadcast_arrays(*args)))
    flat = np.unique(args[1])
    for n in range(-4, 5):  # small integer exponents
        if flat.size == 1 and flat[0] == domain.const(float(n)):
            return _integer_pow(domain, args[0], n)
    return domain.uninterpreted("pow", tuple(args))


def _logistic(node: Node, args: list[Value], dtypes: list[str], domain: Domain) -> Value:
    if isinstance(domain, Integers):
        return domain.monotone("logistic", args[0])
    one = domain.const(1.0)
    return domain.div(one, domain.add(one, domain.exp(domain.neg(args[0]))))


def _tanh(node: Node, args: list[Value], dtypes: list[str], domain: Domain) -> Value:
    if not isinstance(domain, Field):
        return domain.monotone("tanh", args[0])
    up, down = domain.exp(args[0]), domain.exp(domain.neg(args[0]))
    return domain.div(domain.sub(up, down), domain.add(up, down))


def _cast(node: Node, args: list[Value], dtypes: list[str], domain: Domain) -> Value:
    if node.dtype == dtypes[0]:
        return args[0]
    if isinstance(domain, Floats):
        return rounded(args[0], node.dtype)
    return domain.uninterpreted(f"cast {dtypes[0]} {node.dtype}", (args[0],))


def _softmax(node: Node, args: list[Value], dtypes: list[str], domain: Domain) -> Value:
    axes = node.axes
    kept = tuple(1 if d in axes else n for d, n in enumerate(node.shape))
    x = args[0]
    if isinstance(domain, Floats):
        x = x - np.max(x, axis=axes, keepdims=True, initial=-math.inf)
    weights = domain.exp(x)
    return domain.div(weights, domain.sum(weights, axes).reshape(kept))


# --- movement


def _broadcast(node: Node, args: list[Value], domain: Domain) -> Value:
    dims = node.dims("dims", args[0].ndim)
    wide = [1] * len(node.shape)
    for i, d in enumerate(dims):
        wide[d] = args[0].shape[i]
    return np.broadcast_to(np.reshape(args[0], wide), node.shape)


def _slice(node: Node, args: list[Value], domain: Domain) -> Value:
    rank = args[0].ndim
    start, limit, stride = (node.dims(f, rank) for f in ("start", "limit", "stride"))
    return args[0][tuple(slice(*s) for s in zip(start, limit, stride, strict=True))]


def padded(
    x: Value, low: Sequence[int], high: Sequence[int], interior: Sequence[int], fill: Value
) -> Value:
    """Pad like `lax.pad`; low and high may be negative."""
    spread = [n + max(n - 1, 0) * i for n, i in zip(x.shape, interior, strict=True)]
    middle = np.array(np.broadcast_to(np.asarray(fill, x.dtype), spread))
    middle[tuple(slice(None, None, i + 1) for i in interior)] = x
    sizes = [n + max(a, 0) + max(b, 0) for n, a, b in zip(spread, low, high, strict=True)]
    out = np.array(np.broadcast_to(np.asarray(fill, x.dtype), sizes))
    out[tuple(slice(max(a, 0), max(a, 0) + n) for n, a in zip(spread, low, strict=True))] = middle
    return out[
        tuple(slice(max(-a, 0), n - max(-b, 0)) for n, a, b in zip(sizes, low, high, strict=True))
    ]


def _pad(node: Node, args: list[Value], domain: Domain) -> Value:
    rank = args[0].ndim
    low, high, interior = (node.dims(f, rank) for f in ("low", "high", "interior"))
    return padded(args[0], low, high, interior, args[1])


def _reduce(node: Node, args: list[Value], domain: Domain) -> Value:
    axes = node.axes
    if node.op == "reduce_sum":
        return domain.sum(args[0], axes)
    return _reduce_extreme(domain, args[0], axes, 1 if node.op == "reduce_max" else -1)


def _window(node: Node, args: list[Value], domain: Domain) -> Value:
    x = args[0]
    window, stride, low, high = (node.dims(f, x.ndim) for f in ("window", "stride", "low", "high"))
    fill = {"window_sum": 0.0, "window_max": -math.inf, "window_min": math.inf}[node.op]
    x = padded(x, low, high, (0,) * x.ndim, domain.const(fill))
    parts = []
    for at in itertools.product(*(range(w) for w in window)):
        where = zip(at, node.shape, stride, strict=True)
        parts.append(x[tuple(slice(a, a + (n - 1) * s + 1 if n else a, s) for a, n, s in where)])
    return _fold(domain, node.op, parts)


# --- contractions


def _dot(node: Node, args: list[Value], domain: Domain) -> Value:
    lc, rc, lb, rb = (
        ops.unpack_dims(node.scalar_attr(f))
        for f in ("lhs_contract", "rhs_contract", "lhs_batch", "rhs_batch")
    )
    x, y = args
    xf = [d for d in range(x.ndim) if d not in lc + lb]
    yf = [d for d in range(y.ndim) if d not in rc + rb]
    b, m, k = (math.prod(x.shape[d] for d in dims) for dims in (lb, xf, lc))
    n = math.prod(y.shape[d] for d in yf)
    x = np.transpose(x, (*lb, *xf, *lc)).reshape(b, m, k)
    y = np.transpose(y, (*rb, *yf, *rc)).reshape(b, n, k)
    return domain.contract(x, y).reshape(node.shape)


def _conv(node: Node, args: list[Value], domain: Domain) -> Value:
    left, right, out = (
        tuple(d for d in ops.LAYOUTS[node.scalar_attr(f)] if d >= 0)
        for f in ("lhs_layout", "rhs_layout", "out_layout")
    )
    n = len(left) - 2
    stride, low, high, spread, dilation = (
        node.dims(f, n) for f in ("stride", "low", "high", "lhs_dilation", "rhs_dilation")
    )
    groups, batches = node.scalar_attr("groups"), node.scalar_attr("batch_groups")
    x, w = np.transpose(args[0], left), np.transpose(args[1], right)
    if batches > 1:  # each part of the batch has its own part of the kernels
        xs, ws = np.split(x, batches), np.split(w, batches)
    else:
        xs, ws = np.split(x, groups, axis=1), np.split(w, groups)
    sizes = [node.shape[d] for d in out]
    zero = domain.const(0.0)
    results = []
    for a, k in zip(xs, ws, strict=True):
        a = padded(a, (0, 0, *low), (0, 0, *high), (0, 0, *(s - 1 for s in spread)), zero)
        total = np.broadcast_to(zero, (a.shape[0], k.shape[0], *sizes[2:])).astype(domain.dtype)
        for at in itertools.product(*(range(s) for s in k.shape[2:])):
            if 0 in sizes:
                break
            where = zip(at, dilation, sizes[2:], stride, strict=True)
            part = a[
                (
                    slice(None),
                    slice(None),
                    *(slice(i * d, i * d + (m - 1) * s + 1, s) for i, d, m, s in where),
                )
            ]
            product = domain.contract(
                k[(slice(None), slice(None), *at)],
                np.moveaxis(part, 1, -1).reshape(a.shape[0], math.prod(sizes[2:]), a.shape[1]),
            )
            total = domain.add(total, product.reshape(total.shape))
        results.append(total)
    y = np.concatenate(results, axis=1)
    order = [0] * (n + 2)
    for role, position in enumerate(out):
        order[position] = role
    return np.transpose(y, order)


def _cumulative(node: Node, args: list[Value], domain: Domain) -> Value:
    axis = node.scalar_attr("axis")
    x = np.moveaxis(args[0], axis, 0)
    x = x[::-1] if node.scalar_attr("reverse") else x
    rows = [x[0]] if len(x) else []
    for row in x[1:]:
        rows.append(_fold(domain, node.op, [rows[-1], row]))
    y = np.stack(rows) if rows else x
    return np.moveaxis(y[::-1] if node.scalar_attr("reverse") else y, 0, axis)


_MOVEMENT: Mapping[str, Callable[..., Any]] = {
    "transpose": lambda node, args, _: np.transpose(args[0], node.dims("perm", args[0].ndim)),
    "reshape": lambda node, args, _: np.reshape(args[0], node.shape),
    "concat": lambda node, args, _: np.concatenate(args, axis=node.scalar_attr("axis")),
    "rev": lambda node, args, _: np.flip(args[0], node.axes),
    "broadcast": _broadcast, "slice": _slice, "pad": _pad, "dot": _dot, "conv": _conv,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), _reduce),
    **dict.fromkeys(("window_sum", "window_max", "window_min"), _window),
    **dict.fromkeys(("cumsum", "cummax", "cummin"), _cumulative),
}  # fmt: skip
_SPECIAL: Mapping[str, Callable[..., Any]] = {
    "max": lambda n, a, t, d: _extreme(d, a[0], a[1], 1),
    "min": lambda n, a, t, d: _extreme(d, a[0], a[1], -1),
    "clamp": lambda n, a, t, d: _extreme(d, _extreme(d, a[1], a[0], 1), a[2], -1),
    **dict.fromkeys(("eq", "ne", "ge", "gt", "le", "lt"), _compare),
    **dict.fromkeys(("and", "or", "xor", "not"), _logic),
    "select": _select,
    "square": lambda n, a, t, d: d.mul(a[0], a[0]),
    "integer_pow": lambda n, a, t, d: _integer_pow(d, a[0], n.scalar_attr("exponent")),
    "pow": _pow,
    "rsqrt": lambda n, a, t, d: d.div(d.const(1.0), d.monotone("sqrt", a[0])),
    "sqrt": lambda n, a, t, d: d.monotone("sqrt", a[0]),
    "logistic": _logistic,
    "tanh": _tanh,
    "abs": lambda n, a, t, d: (
        np.abs(a[0]) if isinstance(d, Integers) else d.uninterpreted("abs", (a[0],))
    ),
    "copy": lambda n, a, t, d: a[0],
    "cast": _cast,
    "softmax": _softmax,
}
