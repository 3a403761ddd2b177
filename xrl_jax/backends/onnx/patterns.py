"""Recognises ONNX operators in the patterns of operations to which JAX lowers them.

Each recogniser inspects one operation, the last of its pattern, and returns an ONNX operator that
is equal for every input (up to rounding), or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrl_jax.backends.onnx.flat import Flat, Op, without_repeats
from xrl_jax.backends.onnx.match import CLOSE, Matcher, View
from xrl_jax.graph import ops
from xrl_jax.libraries.xla.plain import conv_layouts


@dataclass(frozen=True)
class Pattern:
    """One ONNX operator in place of a pattern.

    Attributes:
      op_type: the operator.
      inputs: indices of operations, or constants.
      attributes: the operator's attributes.
      axis: the axis of the channels, for BatchNormalization.
      of: the convolution or pooling inside the pattern, for Conv and AveragePool.
    """

    op_type: str
    inputs: tuple[int | np.ndarray, ...]
    attributes: dict[str, Any]
    axis: int = 1
    of: int = -1

    @property
    def args(self) -> tuple[int, ...]:
        return tuple(i for i in self.inputs if isinstance(i, int))


def recognise(flat: Flat) -> dict[int, Pattern]:
    """Return the patterns in a graph, by the index of their last operation."""
    match = Matcher(flat)
    found = {}
    for i, op in enumerate(flat.ops):
        for recogniser in RECOGNISERS.get(op.name, ()):
            pattern = recogniser(match, i)
            if pattern is not None:
                found[i] = pattern
                break
    return found


def softmax(match: Matcher, i: int) -> Pattern | None:
    """Recognise exp(y) / sum(exp(y)), where y may be x - max(x)."""
    e, _ = match.ops[i].args
    found = match.reduction(match.args(match.full_view(i))[1], "reduce_sum")
    if found is None or found[0] != e or len(found[1]) != 1 or match.ops[e].name != "exp":
        return None
    axis = found[1][0]
    return Pattern("Softmax", (_shifted(match, match.ops[e].args[0], axis),), {"axis": axis})


def log_softmax(match: Matcher, i: int) -> Pattern | None:
    """Recognise y - log(sum(exp(y))), where y may be x - max(x)."""
    y, _ = match.ops[i].args
    log = match.strip_broadcasts(match.args(match.full_view(i))[1])
    if match.ops[log.op].name != "log":
        return None
    found = match.reduction(match.args(log)[0], "reduce_sum")
    if found is None or len(found[1]) != 1:
        return None
    e = match.ops[found[0]]
    if e.name != "exp" or e.args[0] != y:
        return None
    axis = found[1][0]
    return Pattern("LogSoftmax", (_shifted(match, y, axis),), {"axis": axis})


def _shifted(match: Matcher, y: int, axis: int) -> int:
    """Return x if y is x - max(x), else y."""
    op = match.ops[y]
    if op.name == "sub":
        top = match.args(match.full_view(y))[1]
        if match.reduction(top, "reduce_max") == (op.args[0], (axis,)):
            return op.args[0]
    return y


def layer_norm(match: Matcher, i: int) -> Pattern | None:
    """Recognise (x - mean) / sqrt(variance + epsilon) [* scale] [+ bias] over the last axes."""
    view, rank = match.full_view(i), len(match.ops[i].shape)
    bias: np.ndarray | None = None
    if match.ops[i].name == "add":
        left, right = match.args(view)
        for inner, other in ((left, right), (right, left)):
            bias = match.constant(other, rank)
            if bias is not None:
                view = inner
                break
        else:
            return None
    deviation, norm = None, None
    scale = np.ones((1,) * rank, np.float32)
    for factor, exponent in match.factors(view):
        constant = match.constant(factor, rank)
        centred = match.deviation(factor.op) if factor == match.full_view(factor.op) else None
        if constant is not None:
            scale = scale * constant if exponent > 0 else scale / constant
        elif centred is not None and exponent > 0 and deviation is None:
            deviation = centred
        elif norm is None:
            norm = _inverse_deviation(match, factor, exponent)
        else:
            return None
    if deviation is None or norm is None or norm[0] != deviation:
        return None
    (x, axes), epsilon = norm
    first = rank - len(axes)
    inner = match.ops[x].shape[first:]
    if axes != tuple(range(first, rank)) or any(n != 1 for n in scale.shape[:first]):
        return None
    if bias is not None and any(n != 1 for n in bias.shape[:first]):
        return None
    dtype = match.ops[x].dtype
    weights = [
        np.broadcast_to(w.reshape(w.shape[first:]), inner).astype(dtype)
        for w in (scale, bias)
        if w is not None
    ]
    return Pattern("LayerNormalization", (x, *weights), {"axis": first - rank, "epsilon": epsilon})


def _inverse_deviation(
    match: Matcher, view: View, exponent: int
) -> tuple[tuple[int, tuple[int, ...]], float] | None:
    """Return ((x, axes), epsilon) if view**exponent is 1 / sqrt(variance of x + epsilon)."""
    view = match.strip_broadcasts(view)
    if match.ops[view.op].name != ("rsqrt" if exponent > 0 else "sqrt"):
        return None
    view = match.strip_broadcasts(match.args(view)[0])
    added = match.with_constant(view, "add")
    inner, epsilon = added if added else (view, 0.0)
    found = match.variance(inner)
    return (found, epsilon) if found else None


def gelu(match: Matcher, i: int) -> Pattern | None:
    """Recognise x/2 * (1 + erf(x / sqrt(2))), also with erfc, or the approximation by tanh."""
    view = match.full_view(i)
    for gate, _ in match.factors(view):
        for x, approximate in _gates(match, gate.op):
            rest, parts = match.factors(view, stop=x), [(gate, 1), (match.full_view(x), 1)]
            if any(part not in rest for part in parts):
                continue
            for part in parts:
                rest.remove(part)
            numbers = [match.uniform_value(f.op) for f, _ in rest]
            if all(numbers) and math.isclose(
                math.prod(n**k for n, (_, k) in zip(numbers, rest, strict=True) if n),
                0.5,
                rel_tol=CLOSE,
            ):
                return Pattern("Gelu", (x,), {"approximate": approximate})
    return None


def _gates(match: Matcher, i: int) -> list[tuple[int, str]]:
    """Return (x, approximation) for every x of which the operation is Gelu's gate (0 to 2)."""
    op = match.ops[i]
    if op.name == "erfc":
        chain = match.chain_of(op.args[0])
        return [(x, "none") for x, k in chain if math.isclose(k, -math.sqrt(0.5), rel_tol=CLOSE)]
    added = match.with_constant(match.full_view(i), "add")
    if added is None or added[1] != 1:
        return []
    inner = match.ops[added[0].op]
    if inner.name == "erf":
        chain = match.chain_of(inner.args[0])
        return [(x, "none") for x, k in chain if math.isclose(k, math.sqrt(0.5), rel_tol=CLOSE)]
    if inner.name == "tanh":
        for sum_, k in match.chain_of(inner.args[0]):
            if match.ops[sum_].name == "add" and math.isclose(
                k, math.sqrt(2 / math.pi), rel_tol=CLOSE
            ):
                left, right = match.ops[sum_].args
                return [
                    (x, "tanh")
                    for x, other in ((left, right), (right, left))
                    if any(
                        math.isclose(k, 0.044715, rel_tol=CLOSE) and _is_cube(match, c, x)
                        for c, k in match.chain_of(other)
                    )
                ]
    return []


def _is_cube(match: Matcher, i: int, x: int) -> bool:
    op = match.ops[i]
    if op.name == "integer_pow":
        return op.node.scalar_attr("exponent") == 3 and op.args[0] == x
    return op.name == "mul" and any(
        a == x and match.squared(b) == x for a, b in (op.args, op.args[::-1])
    )


def mean(match: Matcher, i: int) -> Pattern | None:
    """Recognise a sum divided by the number of its terms, with reduced axes kept or not."""
    op = match.ops[i]
    found = match.mean(View(i, (None,) * len(op.shape)))
    if found is None:
        return None
    x, axes = found
    shape = match.ops[x].shape
    kept = tuple(1 if d in axes else n for d, n in enumerate(shape))
    dropped = tuple(n for d, n in enumerate(shape) if d not in axes)
    if op.shape not in (kept, dropped):
        return None
    if len(shape) == 4 and axes == (2, 3):
        return Pattern("GlobalAveragePool", (x,), {})
    return Pattern("ReduceMean", (x,), {"axes": axes, "keepdims": int(op.shape == kept)})


def average_pool(match: Matcher, i: int) -> Pattern | None:
    """Recognise a sum over windows divided by their size, or by their number of values."""
    op = match.ops[i]
    for pool, divisor in (op.args, op.args[::-1]) if op.name == "mul" else (op.args,):
        value = match.ops[divisor].value
        window = match.ops[pool]
        if window.name != "window_sum" or value is None or window.dtype != "float32":
            continue
        size = math.prod(window.node.dims("window", len(op.shape)))
        counts = 1 / without_repeats(value) if op.name == "mul" else without_repeats(value)
        if np.allclose(counts, size, rtol=CLOSE):
            return Pattern("AveragePool", window.args, {"count_include_pad": 1}, of=pool)
        if np.allclose(counts, _counts(match, window), rtol=CLOSE):
            return Pattern("AveragePool", window.args, {"count_include_pad": 0}, of=pool)
    return None


def _counts(match: Matcher, window: Op) -> np.ndarray:
    """Count the values in each window without padding, with size 1 along axes of equal counts."""
    counts = np.ones((1,) * len(window.shape))
    shape = match.ops[window.args[0]].shape
    fields = [window.node.dims(f, len(shape)) for f in ("window", "stride", "low")]
    for d, (n, out, size, stride, low) in enumerate(zip(shape, window.shape, *fields, strict=True)):
        first = np.arange(out) * stride - low
        inside = np.minimum(first + size, n) - np.maximum(first, 0)
        along = inside[:1] if (inside == inside[0]).all() else inside
        counts = counts * along.reshape([-1 if a == d else 1 for a in range(len(shape))])
    return counts


def channelwise(match: Matcher, i: int) -> Pattern | None:
    """Recognise a * x + b with constants per channel: the bias of a convolution, or batch norm.

    The operations between x and the last one must have no other user. The channels are the second
    axis, or the feature axis of the output if x is a convolution.
    """
    rank, dtype = len(match.ops[i].shape), match.ops[i].dtype
    if rank < 3 or dtype not in ops.FLOAT_DTYPES:
        return None
    view, axis = match.full_view(i), None
    slope, shift = np.ones((1,) * rank), np.zeros((1,) * rank)
    while match.uses[view.op] == 1 or view.op == i:
        op, parts = match.ops[view.op], match.args(view)
        if op.name == "neg":
            slope, view = -slope, parts[0]
            continue
        if op.name not in ("add", "sub", "mul", "div"):
            break
        constants = [match.constant(p, rank) for p in parts]
        at = 0 if constants[1] is not None else 1  # the variable's position
        number = constants[1 - at]
        wide = [] if number is None else [d for d, n in enumerate(number.shape) if n != 1]
        if number is None or len({axis, *wide} - {None}) > 1 or (op.name == "div" and at == 1):
            break
        axis, view, number = wide[0] if wide else axis, parts[at], number.astype(np.float64)
        if op.name == "mul":
            slope = slope * number
        elif op.name == "div":
            slope = slope / number
        elif op.name == "add":
            shift = shift + slope * number
        elif at == 0:
            shift = shift - slope * number
        else:  # number - variable
            slope, shift = -slope, shift + slope * number
    if axis is None:
        return None
    channels, x = match.ops[i].shape[axis], view.op
    slope, shift = (np.broadcast_to(a.ravel(), (channels,)).astype(dtype) for a in (slope, shift))
    of_conv = match.ops[x].name == "conv" and axis == conv_layouts(match.ops[x].node)[2][1]
    if of_conv and match.uses[x] == 1 and (slope == 1).all():
        return Pattern("Conv", (*match.ops[x].args, shift), {}, of=x)
    if (slope == 1).all() or not shift.any() or not (of_conv or axis == 1):
        return None
    zeros, ones = np.zeros(channels, dtype), np.ones(channels, dtype)
    inputs = (x, slope, shift, zeros, ones)
    return Pattern("BatchNormalization", inputs, {"epsilon": 0.0}, axis)


def clip(match: Matcher, i: int) -> Pattern | None:
    """Recognise min(max(x, low), high) with scalars, in any order, and max(x, 0) as Relu."""
    view, low, high = match.full_view(i), None, None
    dtype = match.ops[i].dtype
    if match.ops[i].name == "clamp":
        lower, x, upper = match.ops[i].args
        low, high = match.uniform_value(lower), match.uniform_value(upper)
        if low is None or high is None:
            return None
        return Pattern("Clip", (x, np.asarray(low, dtype), np.asarray(high, dtype)), {})
    outer = match.ops[i].name
    while (step := match.with_constant(view, "min", "max")) is not None:
        name = match.ops[view.op].name
        if view.op != i and (name == outer or (low is not None and high is not None)):
            break
        view = step[0]
        low, high = (step[1], high) if name == "max" else (low, step[1])
    if low == 0 and high is None and dtype.startswith(("float", "bfloat")):
        return Pattern("Relu", (view.op,), {})
    if low is None or high is None or low > high:
        return None
    return Pattern("Clip", (view.op, np.asarray(low, dtype), np.asarray(high, dtype)), {})


Recogniser = Callable[[Matcher, int], Pattern | None]
RECOGNISERS: dict[str, Sequence[Recogniser]] = {
    "div": (softmax, mean, average_pool, layer_norm, channelwise),
    "mul": (gelu, mean, average_pool, layer_norm, channelwise),
    "add": (layer_norm, channelwise),
    "sub": (log_softmax, channelwise),
    "neg": (channelwise,),
    "max": (clip,),
    "min": (clip,),
    "clamp": (clip,),
}
