"""A partition as a graph of values, each with its operator and arguments, for rewriting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xrl_jax.libraries.onednn.spec import Instruction, Op, Partition, Reshape, Shape, Transpose


@dataclass(eq=False)
class Value:
    """An input of the partition (`made_by` is its index) or the result of an operator on `args`."""

    made_by: Op | int
    args: list[Value]
    shape: Shape
    known: bool  # depends on weights only


Uses = dict[Value, int]  # the number of uses of each value
Users = dict[Value, list[Value | None]]  # None stands for an output of the partition


def result_of(op: Op, args: list[Value], shape: Shape) -> Value:
    return Value(op, args, shape, all(a.known for a in args))


def strip_moves(v: Value, uses: Uses) -> tuple[Value, list[Value]]:
    """Strip reshapes and transposes off the value, as long as each has a single use.

    Returns:
      the value below them, and the values stripped, the last step (`v` itself) first.
    """
    between: list[Value] = []
    while isinstance(v.made_by, (Reshape, Transpose)) and uses.get(v) == 1:
        between.append(v)
        v = v.args[0]
    return v, between


def apply_moves(v: Value, between: Sequence[Value], uses: Uses) -> Value:
    """Apply the steps that `strip_moves` returned, last one first, to a value; count its uses."""
    uses[v] = uses.get(v, 0) + 1
    for step in reversed(between):
        by = step.made_by
        v = transposed(v, by.order) if isinstance(by, Transpose) else reshaped(v, step.shape)
        uses[v] = uses.get(v, 0) + 1
    return v


def undo_moves(v: Value, between: Sequence[Value], uses: Uses) -> Value:
    """Undo the steps that `strip_moves` returned, last one first, on a value; count its uses."""
    for step in between:
        by, before = step.made_by, v
        if isinstance(by, Transpose):
            v = transposed(v, inverse(by.order))
        else:
            v = reshaped(v, step.args[0].shape)
        if v is not before:
            uses[v] = uses.get(v, 0) + 1
    return v


def inverse(order: Shape) -> Shape:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def transposed(v: Value, order: Shape) -> Value:
    by = v.made_by
    if isinstance(by, Transpose):
        order, (v,) = tuple(by.order[a] for a in order), v.args
    if order == tuple(range(len(order))):
        return v
    return result_of(Transpose(order), [v], tuple(v.shape[a] for a in order))


def reshaped(v: Value, shape: Shape) -> Value:
    while isinstance(v.made_by, Reshape):
        (v,) = v.args
    return v if v.shape == shape else result_of(Reshape(shape), [v], shape)


def depends(v: Value, other: Value) -> bool:
    """Return whether `v` is `other` or computed from it."""
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


def to_partition(part: Partition, outputs: list[Value]) -> Partition:
    """Return the partition of these outputs, with its operators in depth-first order."""
    place: dict[Value, int] = {}
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
