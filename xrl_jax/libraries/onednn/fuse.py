"""Sums, bounds and factors of a partition into what they follow, and what moves less than it says:
slices of slices, products turned round.

`epilogue` does so among the nodes of one graph. Here all graphs of a program are one, so what
follows the call of a folded body is seen too.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from xrl_jax.libraries.onednn.spec import (
    Binary,
    Clip,
    Concat,
    Dot,
    Epilogue,
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

_LEAST_SCALE = 1e-20


@dataclass(eq=False)
class _Value:
    """An input (its index) or an operator's result, with the values it is made from."""

    made_by: Op | int
    args: list[_Value]
    shape: Shape
    known: bool  # made of weights alone


_Uses = dict[_Value, int]
_Users = dict[_Value, list[_Value | None]]  # None for who gets an output


def fused(part: Partition, known: Sequence[bool] = ()) -> Partition:
    """The same partition with fewer operators; inputs and outputs stay as they are.

    Args:
      known: for each input, whether it is made of weights alone; by default none is.
    """
    known = known or [False] * len(part.inputs)
    values = [
        _Value(i, [], shape, k) for i, (shape, k) in enumerate(zip(part.inputs, known, strict=True))
    ]
    for i in part.code:
        values.append(_made(i.op, [values[a] for a in i.args], i.shape))
    outputs = [values[o] for o in part.outputs]
    packed = {v for v, is_packed in zip(values, part.packed, strict=False) if is_packed}
    uses: _Uses = {}
    for used in [*(a for v in values for a in v.args), *outputs]:
        uses[used] = uses.get(used, 0) + 1
    now: dict[_Value, _Value] = {}  # what a value has become
    for v in values:
        v.args = [now.get(a, a) for a in v.args]
        became = _absorbed(v, uses, packed)
        if became is not None:
            now[v] = became
            uses[became] = uses.get(v, 0)
    return _listed(part, _with_biases_of_slices([now.get(o, o) for o in outputs]))


def _made(op: Op, args: list[_Value], shape: Shape) -> _Value:
    return _Value(op, args, shape, all(a.known for a in args))


def _absorbed(v: _Value, uses: _Uses, packed: Container[_Value]) -> _Value | None:
    """The value as part of what it is made from and nothing else uses, or made in a better way;
    None where it stays.
    """
    op = v.made_by
    if isinstance(op, Slice):
        return _as_one_slice(v, op)
    if isinstance(op, Scale):
        return _scaled(v, op, uses)
    if isinstance(op, Transpose):
        return _product_of_swapped(v, op, uses, packed)
    if isinstance(op, Kernel):
        return _with_bias_of_addend(v, op, uses) if op.after.addend else None
    if isinstance(op, Clip):
        return _clipped(v, op, uses)
    return _added(v, uses) if op == Binary("add") else None


def _as_one_slice(v: _Value, op: Slice) -> _Value | None:
    """A slice of a slice."""
    (whole,) = v.args
    outer = whole.made_by
    if not isinstance(outer, Slice):
        return None
    start = tuple(a + s * b for a, s, b in zip(outer.start, outer.step, op.start, strict=True))
    step = tuple(a * b for a, b in zip(outer.step, op.step, strict=True))
    stop = tuple(a + s * (n - 1) + 1 for a, s, n in zip(start, step, v.shape, strict=True))
    return _made(Slice(start, stop, step), whole.args, v.shape)


def _scaled(v: _Value, op: Scale, uses: _Uses) -> _Value | None:
    """A sum of windows times a number that brings none of them near infinity."""
    (pool,) = v.args
    if not isinstance(pool.made_by, Pool) or pool.made_by.kind != "sum" or uses[pool] != 1:
        return None
    scale = pool.made_by.scale * op.by
    if not all(_LEAST_SCALE <= abs(x) <= 1 for x in (op.by, scale)):
        return None
    return _made(replace(pool.made_by, scale=scale), pool.args, v.shape)


def _product_of_swapped(
    v: _Value, op: Transpose, uses: _Uses, packed: Container[_Value]
) -> _Value | None:
    """(a b')' = b a', which needs not be turned round in memory."""
    n = len(op.order)
    product, between = _unshaped(v.args[0], uses)
    dot = product.made_by
    if not isinstance(dot, Dot) or dot.after != Epilogue() or uses.get(product) != 1:
        return None
    if dot.left_turned == dot.right_turned or product.args[1] in packed:
        return None
    swaps = op.order == (*range(n - 2), n - 1, n - 2)
    keeps = all(
        isinstance(step.made_by, Reshape) and step.shape[-2:] == product.shape[-2:]
        for step in between
    )
    if not swaps or not keeps:
        return None
    shape = (*product.shape[:-2], product.shape[-1], product.shape[-2])
    made = _made(dot, product.args[::-1], shape)
    uses[made] = 1
    return _reshaped(made, v.shape)


def _with_bias_of_addend(v: _Value, op: Kernel, uses: _Uses) -> _Value | None:
    """A kernel's result and the sum of an array and a bias, as the kernel's own bias and addend."""
    *first, addend = v.args
    total, between = _unshaped(addend, uses)
    if total.made_by != Binary("add") or uses.get(total) != 1:
        return None
    steps = [_Change.forth(step) for step in reversed(between)]
    for bias, array in (total.args, total.args[::-1]):
        if array.shape == total.shape and _is_bias(bias.shape, steps, v.shape):
            args = [*_with_bias(op, first, bias, v.shape), _shaped(array, between, uses)]
            return _made(replace(op, after=replace(op.after, bias=True)), args, v.shape)
    return None


def _clipped(v: _Value, op: Clip, uses: _Uses) -> _Value | None:
    """Bounds of a kernel's result."""
    kernel, between = _unshaped(v.args[0], uses)
    by = kernel.made_by
    if not isinstance(by, Kernel) or uses.get(kernel) != 1:
        return None
    clip = op if by.after.clip is None else by.after.clip.then(op)
    made = _made(replace(by, after=replace(by.after, clip=clip)), kernel.args, kernel.shape)
    return _shaped(made, between, uses)


def _added(v: _Value, uses: _Uses) -> _Value | None:
    """A kernel's result and a bias or an array; of two kernels the later one takes the sum."""
    for addend, result in (v.args, v.args[::-1]):
        kernel, between = _unshaped(result, uses)
        op = kernel.made_by
        if not isinstance(op, Kernel) or uses.get(kernel) != 1 or result.shape != v.shape:
            continue
        if op.after.clip is not None or _depends(addend, kernel):
            continue
        steps = [_Change.back(step) for step in between]
        if addend.shape == v.shape and not op.after.addend:
            after = replace(op.after, addend=True)
            args = [*kernel.args, _unturned(addend, between, uses)]
        elif addend.shape == v.shape and addend.known and kernel.args[-1].known:
            # Both are weights, so that their sum is none of the call's (`lift`).
            after, last = op.after, kernel.args[-1]
            both = _made(Binary("add"), [last, _unturned(addend, between, uses)], last.shape)
            args = [*kernel.args[:-1], both]
        elif _is_bias(addend.shape, steps, kernel.shape):
            after = replace(op.after, bias=True)
            n = 3 if op.after.bias else 2
            first, more = kernel.args[:n], kernel.args[n:]
            args = [*_with_bias(op, first, addend, kernel.shape), *more]
        else:
            continue
        op = replace(op, after=after)
        made = _made(op, args, kernel.shape)
        better = _with_bias_of_addend(made, op, uses) if after.addend else None
        return _shaped(better or made, between, uses)
    return None


def _with_bias(op: Kernel, args: list[_Value], bias: _Value, shape: Shape) -> list[_Value]:
    """A kernel's arguments, a bias among them or not, with one more; two are one, which is the sum
    of so few numbers that it costs nothing.
    """
    x, w, *first = args
    flat = shape[-1:]
    bias = _reshaped(bias, (1,) * (len(shape) - 1) + flat if isinstance(op, Dot) else flat)
    if first:
        bias = _made(Binary("add"), [first[0], bias], bias.shape)
    return [x, w, bias]


def _with_biases_of_slices(outputs: list[_Value]) -> list[_Value]:
    """Where a kernel's result is cut into slices of its features, each with a bias, as queries,
    keys and values from one product are: the kernel's own bias, side by side. The outputs then.
    """
    users: _Users = {o: [None] for o in outputs}
    values, stack = [], [*outputs]
    seen = set(stack)
    while stack:
        v = stack.pop()
        values.append(v)
        for a in v.args:
            users.setdefault(a, []).append(v)
            if a not in seen:
                seen.add(a)
                stack.append(a)
    became: dict[_Value, _Value] = {}
    for v in values:
        op = v.made_by
        if not isinstance(op, Kernel) or op.after.addend or op.after.clip is not None:
            continue
        found = _slices_with_biases(v, users)
        if found:
            flat = [_reshaped(bias, part.shape[-1:]) for part, _, bias in found]
            whole = flat[0] if len(flat) == 1 else _made(Concat(0), flat, v.shape[-1:])
            v.args = _with_bias(op, v.args, whole, v.shape)
            v.made_by = replace(op, after=replace(op.after, bias=True))
            became |= {total: part for part, total, _ in found}
    for v in values:
        v.args = [became.get(a, a) for a in v.args]
    return [became.get(o, o) for o in outputs]


def _slices_with_biases(v: _Value, users: _Users) -> list[tuple[_Value, _Value, _Value]]:
    """Slices of a kernel's result, in order, their sums with weights, and these; none where they do
    not make up the whole.
    """
    whole = v
    while (reader := _only(users, whole)) is not None and isinstance(reader.made_by, Reshape):
        whole = reader
    parts = users.get(whole, [])
    found: list[tuple[_Value, _Value, _Value]] = []
    end = 0
    for part in sorted((p for p in parts if p is not None), key=_first_feature):
        op, total = part.made_by, _only(users, part)
        if not isinstance(op, Slice) or part.shape[:-1] != whole.shape[:-1] or total is None:
            return []
        others = [a for a in total.args if a is not part]
        if total.made_by != Binary("add") or len(others) != 1 or not others[0].known:
            return []
        if (op.start[-1], op.step[-1]) != (end, 1) or not _is_bias(others[0].shape, [], part.shape):
            return []
        found.append((part, total, others[0]))
        end = op.stop[-1]
    covers = len(found) == len(parts) and end == whole.shape[-1] == v.shape[-1]
    return found if covers else []


def _only(users: _Users, v: _Value) -> _Value | None:
    """What alone uses the value."""
    found = users.get(v, [])
    return found[0] if len(found) == 1 else None


def _first_feature(v: _Value) -> int:
    return v.made_by.start[-1] if isinstance(v.made_by, Slice) else -1


class _Change(NamedTuple):
    """Of a shape to another: axes in another order, or others of as many numbers."""

    before: Shape
    after: Shape
    axes: Shape | None  # where each axis comes to lie; None where numbers keep their order

    @staticmethod
    def forth(step: _Value) -> _Change:
        """What a value is made by."""
        by = step.made_by
        axes = _inverse(by.order) if isinstance(by, Transpose) else None
        return _Change(step.args[0].shape, step.shape, axes)

    @staticmethod
    def back(step: _Value) -> _Change:
        """What undoes what a value is made by."""
        by = step.made_by
        axes = by.order if isinstance(by, Transpose) else None
        return _Change(step.shape, step.args[0].shape, axes)


def _is_bias(shape: Shape, changes: Sequence[_Change], result: Shape) -> bool:
    """Whether an array of this shape, added to what becomes a kernel's result by these changes, is
    one number for each feature.
    """
    size = math.prod(shape)
    if size not in shape:
        return False
    axis = max(a for a, n in enumerate(shape) if n == size)  # that it differs along
    for before, after, axes in changes:
        if axes is not None:
            axis = axes[axis]
            continue
        beyond = math.prod(before[axis + 1 :])
        same = [a for a, n in enumerate(after) if n == size and math.prod(after[a + 1 :]) == beyond]
        if not same:
            return False
        axis = same[-1]
    return axis == len(result) - 1 and result[-1] == size


def _unshaped(v: _Value, uses: _Uses) -> tuple[_Value, list[_Value]]:
    """What the value is in another shape, and the steps from there, the last one first; what is
    used elsewhere, too, is not passed.
    """
    between: list[_Value] = []
    while isinstance(v.made_by, (Reshape, Transpose)) and uses.get(v) == 1:
        between.append(v)
        v = v.args[0]
    return v, between


def _shaped(v: _Value, between: Sequence[_Value], uses: _Uses) -> _Value:
    """What becomes of the value by these steps, the last one first."""
    uses[v] = uses.get(v, 0) + 1
    for step in reversed(between):
        by = step.made_by
        v = _turned(v, by.order) if isinstance(by, Transpose) else _reshaped(v, step.shape)
        uses[v] = uses.get(v, 0) + 1
    return v


def _unturned(v: _Value, between: Sequence[_Value], uses: _Uses) -> _Value:
    """What becomes this value by these steps, the last one first."""
    for step in between:
        by, before = step.made_by, v
        if isinstance(by, Transpose):
            v = _turned(v, _inverse(by.order))
        else:
            v = _reshaped(v, step.args[0].shape)
        if v is not before:
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
    return _made(Transpose(order), [v], tuple(v.shape[a] for a in order))


def _reshaped(v: _Value, shape: Shape) -> _Value:
    while isinstance(v.made_by, Reshape):
        (v,) = v.args
    return v if v.shape == shape else _made(Reshape(shape), [v], shape)


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
