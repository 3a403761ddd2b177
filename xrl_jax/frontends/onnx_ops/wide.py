"""Finds nodes whose results may differ because JAX, without x64, has 32 bits where ONNX has 64.

Values known while tracing (shapes, axes, indices computed from them) are computed in 64 bits in
any case. Any other node is a culprit if

- it reads a known integer that does not fit 32 bits,
- it computes an integer that may exceed 32 bits, according to interval arithmetic. Integers of
  unknown range (inputs, rounded floats) are assumed to be indices and counts within 2**15, so that
  adding offsets or masks is harmless, but multiplying by large constants is not,
- it computes on doubles. Moving, selecting or comparing them does not count.

Values that enter or leave the body of a Loop or Scan, or leave a branch of an If, are not
followed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xrl_jax.frontends.onnx_ops.base import Node, Value, canonical, is_host

Interval = tuple[int, int]

UNKNOWN: Interval = (-(2**15), 2**15)
# Operators whose results consist of elements of the first input, or zeros.
MOVES = frozenset(
    "Compress DepthToSpace Dropout Expand Flatten Gather GatherElements GatherND Identity MaxPool "
    "Pad ReduceMax ReduceMin Reshape Slice SpaceToDepth Split Squeeze Tile TopK Transpose Trilu "
    "Unsqueeze".split()
)
# Operators whose results consist of elements of the inputs.
CHOOSES = frozenset("Clip Concat Max Min ScatterElements ScatterND Where".split())
COMPARES = frozenset("Equal Greater GreaterOrEqual Less LessOrEqual".split())
CASTS = frozenset("BitCast Cast CastLike".split())
CONTROL = frozenset("If Loop Scan".split())
# The index of the result that holds positions along an axis.
POSITIONS = {"ArgMax": 0, "ArgMin": 0, "NonZero": 0, "TopK": 1}
MOST_NAMED = 3


def hull(*values: int) -> Interval:
    return min(values), max(values)


def corners(function: Callable[[int, int], int], a: Interval, b: Interval) -> Interval:
    return hull(*(function(x, y) for x in a for y in b))


def largest(a: Interval) -> int:
    return max(abs(a[0]), abs(a[1]))


def divided(a: Interval, b: Interval) -> Interval:
    return corners(lambda x, y: x // y, a, b) if b[0] > 0 else (-largest(a), largest(a))


def remainder(node: Node, a: Interval, b: Interval) -> Interval:
    if node.get("fmod", 0):
        return -largest(a), largest(a)
    return hull(0, *b)


def raised(a: Interval, exponent: int) -> Interval:
    most = largest(a) ** min(max(exponent, 0), 64)
    return (0 if a[0] >= 0 else -most), max(most, 1)


def shifted(node: Node, a: Interval, b: Interval) -> Interval:
    if node.get("direction", "") == "RIGHT":
        return hull(0, *a)
    return corners(lambda x, y: x << min(max(y, 0), 64), a, b)


def summed(a: Interval, count: int) -> Interval:
    return hull(*a, a[0] * count, a[1] * count)


def bounded(node: Node, ranges: Sequence[Interval | None]) -> Interval:
    """Return the interval of Clip, Max or Min."""
    if node.key == "Clip":
        low, high = [*ranges[1:], None, None][:2]
        first = ranges[0] or UNKNOWN
        first = first if low is None else (max(first[0], low[0]), max(first[1], low[1]))
        return first if high is None else (min(first[0], high[0]), min(first[1], high[1]))
    choose = max if node.key == "Max" else min
    lows, highs = zip(*(r or UNKNOWN for r in ranges), strict=True)
    return choose(lows), choose(highs)


def interval_of(
    node: Node, inputs: Sequence[Value | None], ranges: Sequence[Interval | None], size: int
) -> Interval | None:
    """Return the interval of a node's first result, which has `size` elements; None if unknown."""
    op, first = node.key, inputs[0]
    if first is None:
        return None
    a = ranges[0] or UNKNOWN
    b = (ranges[1] if len(ranges) > 1 else None) or UNKNOWN
    if op in MOVES:
        return hull(0, *a)
    if op in ("Clip", "Max", "Min"):
        return bounded(node, ranges)
    if op in CHOOSES:
        return hull(*(end for r in ranges if r is not None for end in r))
    if op == "Sum":
        known = [r or UNKNOWN for r in ranges]
        return sum(r[0] for r in known), sum(r[1] for r in known)
    made: dict[str, Callable[[], Interval]] = {
        "Abs": lambda: (0, largest(a)),
        "Add": lambda: (a[0] + b[0], a[1] + b[1]),
        "BitShift": lambda: shifted(node, a, b),
        "CumSum": lambda: summed(a, max(first.shape, default=1)),
        "Div": lambda: divided(a, b),
        "MatMul": lambda: summed(corners(lambda x, y: x * y, a, b), first.shape[-1]),
        "Mod": lambda: remainder(node, a, b),
        "Mul": lambda: corners(lambda x, y: x * y, a, b),
        "Neg": lambda: (-a[1], -a[0]),
        "Pow": lambda: raised(a, b[1]),
        "ReduceProd": lambda: raised(a, first.size // max(size, 1)),
        "ReduceSum": lambda: summed(a, first.size // max(size, 1)),
        "Sub": lambda: (a[0] - b[1], a[1] - b[0]),
    }
    return made[op]() if op in made else None


def cast_interval(dtype: np.dtype, known: Interval | None) -> Interval:
    """Return the interval of a 64-bit integer that was cast from a value of this type."""
    if known is not None:
        return known
    if dtype == np.bool_:
        return 0, 1
    if dtype.kind in "iu" and dtype.itemsize == 1:
        return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    return UNKNOWN


class Watch:
    """Tracks the 64-bit values of a model, by name, while the model is traced."""

    def __init__(self) -> None:
        self.ranges: dict[str, Interval] = {}
        self.doubles: set[str] = set()
        self.culprits: dict[str, None] = {}

    def record_input(self, name: str, dtype: Any) -> None:
        """Record an input or weight, with the type that the model declares."""
        self._note(name, np.dtype(dtype), UNKNOWN)

    def record_node(
        self, node: Node, inputs: Sequence[Value | None], results: Sequence[Value | None]
    ) -> None:
        """Record a node that was translated."""
        for name in node.outputs:
            self.ranges.pop(name, None)
            self.doubles.discard(name)
        traced = [value for value in results if value is not None and not is_host(value)]
        if not traced or node.key in CONTROL:
            return
        named = [
            (name, value)
            for name, value in zip(node.inputs, inputs, strict=True)
            if value is not None
        ]
        if node.key in CASTS:
            self._record_cast(node, inputs)
            return
        self._record_doubles(node, named, traced)
        self._record_integers(node, inputs, results)

    def warn(self) -> None:
        """Emit one warning that names the first culprits, if there are any."""
        if not self.culprits:
            return
        names = list(self.culprits)
        more = f", and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        warnings.warn(
            "the model computes in 64 bits, but JAX here in 32, so results may differ: "
            f"{', '.join(names[:MOST_NAMED])}{more}. "
            "Set JAX_ENABLE_X64=1 before the model is loaded",
            stacklevel=3,
        )

    def _note(self, name: str, dtype: np.dtype, interval: Interval) -> None:
        if canonical(dtype) == dtype:
            return
        if dtype.kind in "iu":
            self.ranges[name] = interval
        else:
            self.doubles.add(name)

    def _range(self, name: str, value: Value | None) -> Interval | None:
        if value is None or not is_host(value):
            return self.ranges.get(name)
        if value.dtype.kind in "iu" and value.dtype.itemsize == 8 and value.size:
            return int(np.min(value)), int(np.max(value))
        return None

    def _is_double(self, name: str, value: Value) -> bool:
        if not is_host(value):
            return name in self.doubles
        return value.dtype.kind in "fc" and canonical(value.dtype) != value.dtype

    def _record_cast(self, node: Node, inputs: Sequence[Value | None]) -> None:
        from onnx import helper

        value, name = inputs[0], node.inputs[0]
        if value is None:
            return
        if node.key == "CastLike":
            like, like_name = inputs[1], node.inputs[1]
            if like is None:
                return
            if is_host(like):
                to = np.dtype(like.dtype)
            elif like_name in self.doubles:
                to = np.dtype(np.float64)
            else:
                to = np.dtype(np.int64 if like_name in self.ranges else like.dtype)
        else:
            to = np.dtype(helper.tensor_dtype_to_np_dtype(node.attributes["to"]))
        known = self._range(name, value)
        self._note(node.outputs[0], to, cast_interval(np.dtype(value.dtype), known))

    def _record_doubles(
        self, node: Node, named: Sequence[tuple[str, Value]], traced: Sequence[Value]
    ) -> None:
        read = named[:1] if node.key in MOVES else named
        if not any(self._is_double(name, value) for name, value in read):
            return
        if not any(jnp.issubdtype(value.dtype, jnp.inexact) for value in traced):
            return
        self.doubles.update(name for name in node.outputs if name)
        if node.key not in MOVES | CHOOSES:
            self.culprits[f"{node} computes on doubles"] = None

    def _record_integers(
        self, node: Node, inputs: Sequence[Value | None], results: Sequence[Value | None]
    ) -> None:
        place = POSITIONS.get(node.key)
        if place is not None and place < len(node.outputs) and inputs[0] is not None:
            self.ranges[node.outputs[place]] = (0, max(inputs[0].shape, default=1))
        ranges = [self._range(n, x) for n, x in zip(node.inputs, inputs, strict=True)]
        read = ranges[:1] if node.key in MOVES else ranges
        if not any(r is not None for r in read) or results[0] is None:
            return
        interval = interval_of(node, inputs, ranges, math.prod(results[0].shape))
        if interval is None and node.key not in COMPARES:
            return
        for name, value, known in zip(node.inputs, inputs, read, strict=False):
            if value is not None and is_host(value) and known is not None:
                limits = np.iinfo(canonical(value.dtype))
                beyond = [end for end in known if not limits.min <= end <= limits.max]
                if beyond:
                    self.culprits[f"'{name}' of {node} holds {beyond[0]}"] = None
        if interval is None or is_host(results[0]) or results[0].dtype.kind not in "iu":
            return
        limits = np.iinfo(results[0].dtype)
        if limits.min <= interval[0] and interval[1] <= limits.max:
            outputs = node.outputs[:1] if node.key == "TopK" else node.outputs
            self.ranges.update((name, interval) for name in outputs if name)
            return
        self.culprits[f"{node} may exceed 32 bits"] = None
        self.ranges[node.outputs[0]] = UNKNOWN
