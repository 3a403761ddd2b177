"""Fusion within a partition: sums, clipping and factors are merged into the operators before them,
slices of slices into one slice, and transposes of products into the products.

`lower.chains` does so among the nodes of one graph. Here all graphs of a program are one, so the
consumers of a folded body's call are fused, too.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import NamedTuple

from xrl_jax.libraries.onednn.joined import product_of_parts
from xrl_jax.libraries.onednn.spec import (
    Binary,
    Clip,
    Concat,
    Dot,
    Epilogue,
    Kernel,
    Partition,
    Pool,
    Reshape,
    Scale,
    Shape,
    Slice,
    Transpose,
)
from xrl_jax.libraries.onednn.values import (
    Users,
    Uses,
    Value,
    apply_moves,
    depends,
    inverse,
    reshaped,
    result_of,
    strip_moves,
    to_partition,
    undo_moves,
)

_LEAST_SCALE = 1e-20


def fused(part: Partition, known: Sequence[bool] = ()) -> Partition:
    """Return an equivalent partition with fewer operators and the same inputs and outputs.

    Args:
      known: for each input, whether it depends on weights only; by default none does.
    """
    known = known or [False] * len(part.inputs)
    values = [
        Value(i, [], shape, k) for i, (shape, k) in enumerate(zip(part.inputs, known, strict=True))
    ]
    for i in part.code:
        values.append(result_of(i.op, [values[a] for a in i.args], i.shape))
    outputs = [values[o] for o in part.outputs]
    packed = {v for v, is_packed in zip(values, part.packed, strict=False) if is_packed}
    uses: Uses = {}
    for used in [*(a for v in values for a in v.args), *outputs]:
        uses[used] = uses.get(used, 0) + 1
    replacement: dict[Value, Value] = {}  # of each value that has one
    for v in values:
        v.args = [replacement.get(a, a) for a in v.args]
        became = _absorbed(v, uses, packed)
        if became is not None:
            replacement[v] = became
            uses[became] = uses.get(v, 0)
    return to_partition(part, _with_biases_of_slices([replacement.get(o, o) for o in outputs]))


def _absorbed(v: Value, uses: Uses, packed: Container[Value]) -> Value | None:
    """Return the value merged into an operator that has no other user, or computed in a better way;
    None if it stays unchanged.
    """
    op = v.made_by
    if isinstance(op, Slice):
        return _as_one_slice(v, op)
    if isinstance(op, Scale):
        return _scaled(v, op, uses)
    if isinstance(op, Transpose):
        return _product_of_swapped(v, op, uses, packed)
    if isinstance(op, Kernel):
        if op.after.addend:
            return _with_bias_of_addend(v, op, uses)
        return product_of_parts(v, op, uses) if isinstance(op, Dot) else None
    if isinstance(op, Clip):
        return _clipped(v, op, uses)
    return _added(v, uses) if op == Binary("add") else None


def _as_one_slice(v: Value, op: Slice) -> Value | None:
    """Merge a slice of a slice into one slice."""
    (whole,) = v.args
    outer = whole.made_by
    if not isinstance(outer, Slice):
        return None
    start = tuple(a + s * b for a, s, b in zip(outer.start, outer.step, op.start, strict=True))
    step = tuple(a * b for a, b in zip(outer.step, op.step, strict=True))
    stop = tuple(a + s * (n - 1) + 1 for a, s, n in zip(start, step, v.shape, strict=True))
    return result_of(Slice(start, stop, step), whole.args, v.shape)


def _scaled(v: Value, op: Scale, uses: Uses) -> Value | None:
    """Merge a factor into the window sums that it scales, if it brings none near infinity."""
    (pool,) = v.args
    if not isinstance(pool.made_by, Pool) or pool.made_by.kind != "sum" or uses[pool] != 1:
        return None
    scale = pool.made_by.scale * op.by
    if not all(_LEAST_SCALE <= abs(x) <= 1 for x in (op.by, scale)):
        return None
    return result_of(replace(pool.made_by, scale=scale), pool.args, v.shape)


def _product_of_swapped(
    v: Value, op: Transpose, uses: Uses, packed: Container[Value]
) -> Value | None:
    """Replace (a b')' by b a', which needs no transpose in memory."""
    n = len(op.order)
    product, between = strip_moves(v.args[0], uses)
    dot = product.made_by
    if not isinstance(dot, Dot) or dot.after != Epilogue() or uses.get(product) != 1:
        return None
    if dot.left_transposed == dot.right_transposed or product.args[1] in packed:
        return None
    swaps = op.order == (*range(n - 2), n - 1, n - 2)
    keeps = all(
        isinstance(step.made_by, Reshape) and step.shape[-2:] == product.shape[-2:]
        for step in between
    )
    if not swaps or not keeps:
        return None
    shape = (*product.shape[:-2], product.shape[-1], product.shape[-2])
    made = result_of(dot, product.args[::-1], shape)
    uses[made] = 1
    return reshaped(made, v.shape)


def _with_bias_of_addend(v: Value, op: Kernel, uses: Uses) -> Value | None:
    """Split an addend that is the sum of an array and a bias into the kernel's bias and addend."""
    *first, addend = v.args
    total, between = strip_moves(addend, uses)
    if total.made_by != Binary("add") or uses.get(total) != 1:
        return None
    steps = [_Change.forth(step) for step in reversed(between)]
    for bias, array in (total.args, total.args[::-1]):
        if array.shape == total.shape and _is_bias(bias.shape, steps, v.shape):
            args = [*_with_bias(op, first, bias, v.shape), apply_moves(array, between, uses)]
            return result_of(replace(op, after=replace(op.after, bias=True)), args, v.shape)
    return None


def _clipped(v: Value, op: Clip, uses: Uses) -> Value | None:
    """Merge clipping into the kernel whose result it clips."""
    kernel, between = strip_moves(v.args[0], uses)
    by = kernel.made_by
    if not isinstance(by, Kernel) or uses.get(kernel) != 1:
        return None
    clip = op if by.after.clip is None else by.after.clip.then(op)
    made = result_of(replace(by, after=replace(by.after, clip=clip)), kernel.args, kernel.shape)
    return apply_moves(made, between, uses)


def _added(v: Value, uses: Uses) -> Value | None:
    """Merge a sum with a kernel's result into the kernel; of two kernels, into the later one."""
    for addend, result in (v.args, v.args[::-1]):
        kernel, between = strip_moves(result, uses)
        op = kernel.made_by
        if not isinstance(op, Kernel) or uses.get(kernel) != 1 or result.shape != v.shape:
            continue
        if op.after.clip is not None or depends(addend, kernel):
            continue
        steps = [_Change.back(step) for step in between]
        if addend.shape == v.shape and not op.after.addend:
            after = replace(op.after, addend=True)
            args = [*kernel.args, undo_moves(addend, between, uses)]
        elif addend.shape == v.shape and addend.known and kernel.args[-1].known:
            # Both depend on weights only, so their sum is computed outside the call (`lift`).
            after, last = op.after, kernel.args[-1]
            both = result_of(Binary("add"), [last, undo_moves(addend, between, uses)], last.shape)
            args = [*kernel.args[:-1], both]
        elif _is_bias(addend.shape, steps, kernel.shape):
            after = replace(op.after, bias=True)
            n = op.n_operands + op.after.bias
            first, more = kernel.args[:n], kernel.args[n:]
            args = [*_with_bias(op, first, addend, kernel.shape), *more]
        else:
            continue
        op = replace(op, after=after)
        made = result_of(op, args, kernel.shape)
        better = _with_bias_of_addend(made, op, uses) if after.addend else None
        return apply_moves(better or made, between, uses)
    return None


def _with_bias(op: Kernel, args: list[Value], bias: Value, shape: Shape) -> list[Value]:
    """Return a kernel's arguments, which may include a bias, with one more bias. Two biases become
    their sum, which has so few elements that it costs nothing.
    """
    own, first = args[: op.n_operands], args[op.n_operands :]
    flat = shape[-1:]
    bias = reshaped(bias, (1,) * (len(shape) - 1) + flat if isinstance(op, Dot) else flat)
    if first:
        bias = result_of(Binary("add"), [first[0], bias], bias.shape)
    return [*own, bias]


def _with_biases_of_slices(outputs: list[Value]) -> list[Value]:
    """Merge biases into a kernel whose result is cut into slices of its features, each with a bias,
    as queries, keys and values from one product are. The kernel's bias is their concatenation.
    Return the new outputs.
    """
    users: Users = {o: [None] for o in outputs}
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
    became: dict[Value, Value] = {}
    for v in values:
        op = v.made_by
        if not isinstance(op, Kernel) or op.after.addend or op.after.clip is not None:
            continue
        found = _slices_with_biases(v, users)
        if found:
            flat = [reshaped(bias, part.shape[-1:]) for part, _, bias in found]
            whole = flat[0] if len(flat) == 1 else result_of(Concat(0), flat, v.shape[-1:])
            v.args = _with_bias(op, v.args, whole, v.shape)
            v.made_by = replace(op, after=replace(op.after, bias=True))
            became |= {total: part for part, total, _ in found}
    for v in values:
        v.args = [became.get(a, a) for a in v.args]
    return [became.get(o, o) for o in outputs]


def _slices_with_biases(v: Value, users: Users) -> list[tuple[Value, Value, Value]]:
    """Return the slices of a kernel's result in order, each with its sum with a bias, and the bias;
    nothing if the slices do not cover the result.
    """
    whole = v
    while (reader := _only(users, whole)) is not None and isinstance(reader.made_by, Reshape):
        whole = reader
    parts = users.get(whole, [])
    found: list[tuple[Value, Value, Value]] = []
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


def _only(users: Users, v: Value) -> Value | None:
    """Return the sole user of the value; None if there is none."""
    found = users.get(v, [])
    return found[0] if len(found) == 1 else None


def _first_feature(v: Value) -> int:
    return v.made_by.start[-1] if isinstance(v.made_by, Slice) else -1


class _Change(NamedTuple):
    """A change of shape: a transpose or a reshape."""

    before: Shape
    after: Shape
    axes: Shape | None  # the new position of each axis; None in a reshape

    @staticmethod
    def forth(step: Value) -> _Change:
        """Return the change by the reshape or transpose that gives this value."""
        by = step.made_by
        axes = inverse(by.order) if isinstance(by, Transpose) else None
        return _Change(step.args[0].shape, step.shape, axes)

    @staticmethod
    def back(step: Value) -> _Change:
        """Return the inverse of the change by the reshape or transpose that gives this value."""
        by = step.made_by
        axes = by.order if isinstance(by, Transpose) else None
        return _Change(step.shape, step.args[0].shape, axes)


def _is_bias(shape: Shape, changes: Sequence[_Change], result: Shape) -> bool:
    """Whether an array of this shape has one element for each feature of a kernel's result.

    The array is added to a value that becomes the kernel's result by these changes of shape.
    """
    size = math.prod(shape)
    if size not in shape:
        return False
    axis = max(a for a, n in enumerate(shape) if n == size)  # the axis along which it varies
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
