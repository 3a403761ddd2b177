"""A second list of steps for a partition, which preserves NaN, for calls that meet one.

The library's clipping turns NaN into a number, and its maxima ignore it. Here generated code clips
after the kernels and computes maxima and minima. Everything is computed again from the arguments,
with the weights as they are packed for the fast steps.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

from xrl_jax.libraries.onednn.builder import Executable, Value
from xrl_jax.libraries.onednn.c_api import Desc, Library, Prim
from xrl_jax.libraries.onednn.keeping import WindowMax
from xrl_jax.libraries.onednn.native import Later, Place, Step
from xrl_jax.libraries.onednn.plan import Planner, plan, planned
from xrl_jax.libraries.onednn.products import Packing
from xrl_jax.libraries.onednn.spec import (
    Binary,
    Clip,
    Conv,
    Dot,
    Instruction,
    Loop,
    Partition,
    Pool,
    Scale,
    Shape,
)
from xrl_jax.libraries.onednn.stream import uses_strips
from xrl_jax.libraries.onednn.strides import result_strides


def loses_nan(partition: Partition) -> bool:
    """Whether the library computes an operator of the partition that turns NaN into a number."""
    return any(_loses_nan(partition, i) for i in partition.code)


def _loses_nan(partition: Partition, i: Instruction) -> bool:
    match i.op:
        case Conv() if i.op.in_integers:
            return True  # it has no levels for values that are not finite
        case Conv(after=after) | Dot(after=after):
            return after.clip is not None and not uses_strips(partition, i)
        case Binary(kind) | Pool(kind):
            return kind in ("max", "min")
    return isinstance(i.op, Clip)


@functools.cache
def careful_plan(lib: Library, partition: Partition) -> tuple[tuple[Step, ...], int]:
    """Return steps that preserve NaN, and the bytes of memory between them.

    The library's primitives are created when they are first executed.

    Raises:
      UnimplementedError: the library has no good kernel for one of the operators.
    """
    weights = plan(lib, partition).weights
    strides = result_strides(partition)
    nan_safe = planned(_Careful(lib, partition=partition, strides=strides, as_packed=weights))
    return nan_safe.steps, nan_safe.arena


@dataclass
class _Careful(Planner):
    """Plans steps that preserve NaN.

    Attributes:
      as_packed: how weights are packed, by the index of the input.
    """

    as_packed: dict[int, Packing] = field(kw_only=True)

    def primitive(self, prim: Prim) -> Executable:
        return Later(prim)

    def packed(self, weight: int, w: Value, wanted: Desc) -> Value:
        ((_, given),) = self.as_packed[weight].moves
        return self.to_layout(Value(given, w.place), wanted)

    def lower(self, instruction: Instruction, args: list[Value], output: Place | None) -> Value:
        op, shape = instruction.op, instruction.shape
        if not _loses_nan(self.partition, instruction):
            return super().lower(instruction, args, output)
        match op:
            case Conv() if op.in_integers:
                return self.unrounded(op, instruction, args, output)
            case Conv(after=after) | Dot(after=after):
                assert after.clip is not None
                free = replace(op, after=replace(after, clip=None))
                y = super().lower(replace(instruction, op=free), args, output)
                return self.clipped(after.clip, y, self.lib.desc(shape))
            case Clip():
                x = args[0] if output is None else self.to_layout(args[0], self.lib.desc(shape))
                return self.clipped(op, x, self.lib.desc(shape), self.result(x.desc, output))
            case Pool():
                return self.window_max(op, self.shape_of(instruction.args[0]), args[0], output)
        rows = math.prod(shape[:-1])
        inputs = tuple(self.shape_of(a) for a in instruction.args)
        loop = Loop(rows, shape[-1], inputs, (Instruction(op, (0, 1), shape),))
        return self.loop(loop, shape, args, output)

    def unrounded(self, op: Conv, i: Instruction, args: list[Value], output: Place | None) -> Value:
        """Compute a convolution in integers in float32 instead."""
        x, _, _, kernel, *more = args
        own = replace(
            i, op=replace(op, right="float32", unsigned=False), args=(i.args[0], *i.args[3:])
        )
        return self.lower(own, [x, kernel, *more], output)

    def window_max(self, op: Pool, shape: Shape, x: Value, output: Place | None) -> Value:
        """Compute the largest values of windows, along one axis after the other."""
        x = self.to_layout(x, self.lib.desc(shape))
        sizes = list(shape)
        axes = [
            a for a, (n, s) in enumerate(zip(op.window, op.stride, strict=True)) if (n, s) != (1, 1)
        ]
        for a in axes:
            n, (low, high) = sizes[a], op.padding[a]
            window, stride = op.window[a], op.stride[a]
            m = (n + low + high - window) // stride + 1
            outer, inner = math.prod(sizes[:a]), math.prod(sizes[a + 1 :])
            sizes[a] = m
            is_last = a == axes[-1] and op.scale == 1
            y = self.result(self.lib.desc(sizes), output if is_last else None)
            what = WindowMax(outer, n, inner, m, window, stride, low)
            self.append(what, [(0, v.desc, v.place) for v in (x, y)])
            x = y
        return x if op.scale == 1 else self.elementwise(Scale(op.scale), sizes, x, output)
