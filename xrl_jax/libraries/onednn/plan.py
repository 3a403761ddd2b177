"""Planning of a partition as a list of steps, with layouts chosen and memory assigned."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from xrl_jax.libraries.onednn.builder import Location, Part, Value, assign_offsets, block_of
from xrl_jax.libraries.onednn.c_api import (
    DST,
    MULTIPLE_SRC,
    SRC,
    SRC_1,
    Library,
    UnimplementedError,
)
from xrl_jax.libraries.onednn.native import Place, Step
from xrl_jax.libraries.onednn.products import Packing, Products
from xrl_jax.libraries.onednn.result_types import result_types
from xrl_jax.libraries.onednn.spec import (
    Attention,
    Binary,
    Clip,
    Concat,
    Conv,
    Dot,
    Instruction,
    Loop,
    Map,
    Partition,
    Pool,
    Reduce,
    Repeat,
    Reshape,
    Scale,
    Slice,
    Transpose,
    Widen,
    Winograd,
)
from xrl_jax.libraries.onednn.strides import result_strides


class Plan(NamedTuple):
    """The steps of a partition.

    Attributes:
      steps: the steps in order of execution.
      arena: bytes of memory for values between the steps.
      weights: how weights are packed, by the index of the input.
    """

    steps: tuple[Step, ...]
    arena: int
    weights: dict[int, Packing]


@dataclass
class Planner(Products):
    """Builder of the steps of all operators of a partition."""

    def add(self, instruction: Instruction, output: Place | None) -> Value:
        """Append the steps of an instruction; return its value, in `output` if that is given.

        Where the library has no kernel for the layouts at hand, the result is copied to `output`;
        failing that, the arguments are converted to row-major.
        """
        given = [self.values[a] for a in instruction.args]
        n_steps = len(self.steps)
        tries = [(plain, into) for plain in (False, True) for into in dict.fromkeys((output, None))]
        reason = UnimplementedError()
        for plain, into in tries:
            args = given
            if plain:
                args = [self.plain(v, a) for v, a in zip(given, instruction.args, strict=True)]
            try:
                y = self.lower(instruction, args, into)
            except UnimplementedError as error:
                reason = error
                self.forget_steps(n_steps)
                continue
            if output is None or into is not None:
                return y
            return self.copied(y, output, instruction.shape)
        raise reason

    def plain(self, value: Value, number: int) -> Value:
        """Return the value with this index in row-major layout, unless it is packed or narrow."""
        if self.partition.is_packed(number) or number in self.partition.narrow:
            return value
        return self.to_layout(value, self.lib.desc(self.shape_of(number)))

    def lower(self, instruction: Instruction, args: list[Value], output: Place | None) -> Value:
        """Append the steps of an instruction on these arguments; return its value."""
        op, shape = instruction.op, instruction.shape
        match op:
            case Conv():
                return self.convolution(op, instruction, args, output)
            case Dot():
                return self.dot(op, instruction, args, output)
            case Attention():
                into = None if op.transposed else output
                strides = None if into else self.strides.get(len(self.values))
                shapes = [self.shape_of(a) for a in instruction.args]
                y = self.attention(op, shapes, args, strides, into)
                return self.copied(y, output, shape) if output and not into else y
            case Winograd():
                return self.winograd(op, instruction, args, output)
            case Pool():
                return self.pool(op, args[0], self.shape_of(instruction.args[0]), shape, output)
            case Concat():
                dst = None if output is None else self.lib.desc(shape)
                prim = self.lib.concat([v.desc for v in args], op.axis, dst)
                y = self.result(self.lib.of(prim, "dst"), output)
                self.run(prim, [*((MULTIPLE_SRC + i, v) for i, v in enumerate(args)), (DST, y)])
                return y
            case Binary():
                return self.binary(op, instruction, args, output)
            case Clip() | Scale():
                return self.elementwise(op, shape, args[0], output)
            case Loop():
                return self.loop(op, shape, args, output)
            case Map() | Reduce() | Repeat():
                raise UnimplementedError(f"{op} outside of a loop")
            case Reshape():
                y = self.reshaped(args[0], self.shape_of(instruction.args[0]), shape)
            case Slice():
                y = self.slice(op, args[0], self.shape_of(instruction.args[0]), shape)
            case Widen():
                return self.widened(op, args[0], self.shape_of(instruction.args[0]), output)
            case Transpose():
                y = self.transposed(args[0], op.order)
        return y if output is None else self.copied(y, output, shape)

    def binary(self, op: Binary, i: Instruction, args: list[Value], output: Place | None) -> Value:
        n = len(i.shape)
        a, b = args
        if self.shape_of(i.args[1]) == i.shape:
            b = self.to_layout(b, a.desc)
        dst = a.desc if output is None else self.lib.desc(i.shape)
        # The library broadcasts an array along its second axis, not along its last.
        same, first = tuple(range(n)), (0, n - 1, *range(1, n - 1))[:n]
        for order in dict.fromkeys((same, first)):
            x, z, y = (self.lib.permuted(d, order) for d in (a.desc, b.desc, dst))
            try:
                prim = self.lib.binary(op.kind, x, z, y)
            except UnimplementedError:
                continue
            result = self.result(y, output)
            self.run(prim, [(SRC, Value(x, a.place)), (SRC_1, Value(z, b.place)), (DST, result)])
            return Value(dst, result.place)
        raise UnimplementedError(f"{op.kind} of {i.shape} and {self.shape_of(i.args[1])}")


@functools.cache
def plan(lib: Library, partition: Partition) -> Plan:
    """Return the plan of a partition.

    Raises:
      UnimplementedError: the library has no good kernel for one of the operators.
    """
    strides, types = result_strides(partition), result_types(partition)
    return planned(Planner(lib, partition=partition, strides=strides, types=types))


def planned(b: Planner) -> Plan:
    """Return the plan of a planner's partition; the planner must have no steps yet.

    Raises:
      UnimplementedError: the library has no good kernel for one of the operators.
    """
    partition = b.partition
    for i, shape in enumerate(partition.inputs):
        desc = b.lib.desc(shape, dtype=partition.narrow.get(i, "float32"))
        b.values.append(Value(desc, Place.argument(i)))
    outputs = {v: Place.result(j) for j, v in enumerate(partition.outputs)}
    for instruction in partition.code:
        b.values.append(b.add(instruction, outputs.get(len(b.values))))
    for j, v in enumerate(partition.outputs):
        if b.values[v].place != Place.result(j):  # an input, or the same value as another result
            b.copied(b.values[v], Place.result(j), partition.shape(v))
    places = [place for _, args in b.steps for _, _, place in args]
    parts = [block_of(x) for x in places if not isinstance(x, Place)]
    blocks = list({id(x): x for x in parts}.values())
    offsets, arena = assign_offsets(blocks)
    starts = {id(x): at for x, at in zip(blocks, offsets, strict=True)}

    def final(place: Location) -> Place:
        if isinstance(place, Place):
            return place
        inner = place.offset if isinstance(place, Part) else 0
        return Place.arena(starts[id(block_of(place))] + inner)

    steps = tuple(Step(p, tuple((a, d, final(x)) for a, d, x in args)) for p, args in b.steps)
    return Plan(steps, arena, b.weights)
