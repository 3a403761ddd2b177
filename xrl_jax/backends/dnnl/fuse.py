"""Sums, bounds and factors of a partition into what they follow, and slices of slices.

`epilogue` does so among the nodes of one graph. Here all graphs of a program are one, so what
follows the call of a folded body is seen too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from xrl_jax.backends.dnnl.spec import (
    Binary,
    Clip,
    Dot,
    Instruction,
    Kernel,
    Op,
    Partition,
    Pool,
    Reshape,
    Scale,
    Shape,
    Slice,
    Transpose,
)


@dataclass(eq=False)
class _Value:
    """An input (its index) or an operator's result, with the values it is made from."""

    made_by: Op | int
    args: list[_Value]
    shape: Shape


def fused(part: Partition) -> Partition:
    """The same partition with fewer operators; inputs and outputs stay as they are."""
    values = [_Value(i, [], shape) for i, shape in enumerate(part.inputs)]
    for i in part.code:
        values.append(_Value(i.op, [values[a] for a in i.args], i.shape))
    outputs = [values[o] for o in part.outputs]
    uses: dict[_Value, int] = {}
    for used in [*(a for v in values for a in v.args), *outputs]:
        uses[used] = uses.get(used, 0) + 1
    now: dict[_Value, _Value] = {}  # what a value has become
    for v in values:
        v.args = [now.get(a, a) for a in v.args]
        became = _absorbed(v, uses)
        if became is not None:
            now[v] = became
            uses[became] = uses.get(v, 0)
    return _listed(part, [now.get(o, o) for o in outputs])


def _absorbed(v: _Value, uses: dict[_Value, int]) -> _Value | None:
    """The value as part of what it is made from and nothing else uses, or as a slice of what that
    is a slice of; None where it cannot be.
    """
    if isinstance(v.made_by, Slice):
        (whole,) = v.args
        outer = whole.made_by
        if not isinstance(outer, Slice):
            return None
        return _Value(_of_slice(outer, v.made_by, v.shape), whole.args, v.shape)
    if isinstance(v.made_by, Scale):
        (pool,) = v.args
        if not isinstance(pool.made_by, Pool) or pool.made_by.kind != "sum" or uses[pool] != 1:
            return None
        scaled = replace(pool.made_by, scale=pool.made_by.scale * v.made_by.by)
        return _Value(scaled, pool.args, v.shape)
    if v.made_by != Binary("add") and not isinstance(v.made_by, Clip):
        return None
    for at in reversed(range(len(v.args))):
        kernel, addend = v.args[at], v.args[1 - at] if len(v.args) == 2 else None
        between: list[_Value] = []  # the kernel's result in other shapes, the last one first
        while isinstance(kernel.made_by, (Reshape, Transpose)) and uses.get(kernel) == 1:
            between.append(kernel)
            kernel = kernel.args[0]
        op = kernel.made_by
        if not isinstance(op, Kernel) or uses.get(kernel) != 1 or v.args[at].shape != v.shape:
            continue
        clip = op.after.clip
        if isinstance(v.made_by, Clip):
            clip = v.made_by if clip is None else clip.then(v.made_by)
            after, args = replace(op.after, clip=clip), kernel.args
        elif addend is None or clip is not None or _depends(addend, kernel):
            continue
        elif addend.shape == v.shape and not op.after.addend:
            after = replace(op.after, addend=True)
            args = [*kernel.args, _before(between, addend, uses)]
        elif _is_bias(addend.shape, between, kernel.shape):
            after = replace(op.after, bias=True)
            flat = kernel.shape[-1:]
            one = (1,) * (len(kernel.shape) - 1) + flat
            bias = _reshaped(addend, one if isinstance(op, Dot) else flat)
            x, w, *more = kernel.args
            if op.after.bias:  # two of them are one, of so few numbers that adding them is free
                first, *more = more
                bias = _Value(Binary("add"), [first, bias], bias.shape)
            args = [x, w, bias, *more]
        else:
            continue
        made = _Value(replace(op, after=after), args, kernel.shape)
        for step in reversed(between):
            uses[made], by = 1, step.made_by
            turns = isinstance(by, Transpose)
            made = _turned(made, by.order) if turns else _reshaped(made, step.shape)
        uses[made] = 1
        return made
    return None


def _of_slice(outer: Slice, inner: Slice, shape: Shape) -> Slice:
    """A slice, of this shape, of a slice."""
    start = tuple(a + s * b for a, s, b in zip(outer.start, outer.step, inner.start, strict=True))
    step = tuple(a * b for a, b in zip(outer.step, inner.step, strict=True))
    stop = tuple(a + s * (n - 1) + 1 for a, s, n in zip(start, step, shape, strict=True))
    return Slice(start, stop, step)


def _is_bias(shape: Shape, between: Sequence[_Value], kernel: Shape) -> bool:
    """Whether an array of this shape, added to a kernel's result in another shape, is one number
    for each feature.
    """
    size = math.prod(shape)
    if size not in shape:
        return False
    axis = max(a for a, n in enumerate(shape) if n == size)  # that it differs along
    for step in between:
        by, before = step.made_by, step.args[0].shape
        if isinstance(by, Transpose):
            axis = by.order[axis]
            continue
        beyond = math.prod(step.shape[axis + 1 :])
        same = [
            a for a, n in enumerate(before) if n == size and math.prod(before[a + 1 :]) == beyond
        ]
        if not same:
            return False
        axis = same[-1]
    return axis == len(kernel) - 1 and kernel[-1] == size


def _before(between: Sequence[_Value], v: _Value, uses: dict[_Value, int]) -> _Value:
    """What becomes this value by the same changes of shape."""
    for step in between:
        by = step.made_by
        turns = isinstance(by, Transpose)
        v = _turned(v, _inverse(by.order)) if turns else _reshaped(v, step.args[0].shape)
        uses[v] = uses.get(v, 0) + 1
    return v


def _inverse(order: Shape) -> Shape:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _turned(v: _Value, order: Shape) -> _Value:
    by = v.made_by
    if isinstance(by, Transpose):
        order, (v,) = tuple(by.order[a] for a in order), v.args
    if order == tuple(range(len(order))):
        return v
    return _Value(Transpose(order), [v], tuple(v.shape[a] for a in order))


def _reshaped(v: _Value, shape: Shape) -> _Value:
    while isinstance(v.made_by, Reshape):
        (v,) = v.args
    return v if v.shape == shape else _Value(Reshape(shape), [v], shape)


def _depends(v: _Value, other: _Value) -> bool:
    """Whether a value is made from another."""
    seen: set[int] = set()
    stack = [v]
    while stack:
        top = stack.pop()
        if top is other:
            return True
        if id(top) not in seen:
            seen.add(id(top))
            stack += top.args
    return False


def _listed(part: Partition, outputs: list[_Value]) -> Partition:
    """The partition of these outputs, operators as soon as their arguments are there."""
    place: dict[_Value, int] = {}
    code: list[Instruction] = []
    stack = [(o, False) for o in reversed(outputs)]
    while stack:
        v, ready = stack.pop()
        if v in place:
            continue
        if isinstance(v.made_by, int):
            place[v] = v.made_by
        elif ready:
            code.append(Instruction(v.made_by, tuple(place[a] for a in v.args), v.shape))
            place[v] = len(part.inputs) + len(code) - 1
        else:
            stack.append((v, True))
            stack += [(a, False) for a in reversed(v.args)]
    return Partition(part.inputs, part.packed, tuple(code), tuple(place[o] for o in outputs))
