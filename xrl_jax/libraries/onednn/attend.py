"""Fuses a product (the scores), a loop over its rows and a product of the loop's result into one
operator: attention.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from xrl_jax.libraries.onednn.attention import MOST_STRIP_ELEMENTS, strip_elements
from xrl_jax.libraries.onednn.lift import subpartition
from xrl_jax.libraries.onednn.spec import (
    Attention,
    Binary,
    Dot,
    Epilogue,
    Instruction,
    Loop,
    Partition,
    Reshape,
    Transpose,
    swap,
)

_LEAST_ROWS = 8  # of the left operand; with fewer, copying the right operands does not pay


def with_attention(part: Partition) -> Partition:
    """Return the partition with `Attention` in place of the operators that it fuses."""
    uses = Counter([*part.outputs, *(a for i in part.code for a in i.args)])
    code = tuple(_attention(part, last, uses) or last for last in part.code)
    return subpartition(replace(part, code=code), part.outputs, keep_inputs=True)[0]


def _attention(part: Partition, last: Instruction, uses: Mapping[int, int]) -> Instruction | None:
    """Return the product as attention, or None if neither operand is a loop's result on scores that
    has no other use. If it is the right operand, p' in v' p' = (p v)', attention computes p v.
    """
    op = last.op
    if not isinstance(op, Dot) or op.after != Epilogue() or part.is_packed(last.args[1]):
        return None
    left, right = last.args
    *batch, m, d = last.shape
    for weights, is_transposed, values, shape in (
        (_producer(part, left, uses), op.left_transposed, right, (*batch, m, d)),
        (_producer(part, right, uses), not op.right_transposed, left, (*batch, d, m)),
    ):
        if weights is None or weights.is_transposed != is_transposed:
            continue
        values_transposed = op.right_transposed if values == right else not op.left_transposed
        product = Instruction(Dot(False, values_transposed), (weights.value, values), shape)
        found = _of_loop(part, product, uses)
        if found is not None:
            assert isinstance(found.op, Attention)
            return replace(found, op=replace(found.op, transposed=values == left), shape=last.shape)
    return None


def _of_loop(part: Partition, last: Instruction, uses: Mapping[int, int]) -> Instruction | None:
    """Return a product as attention if its left operand is a loop's result on scores, else None."""
    made = part.code[last.args[0] - len(part.inputs)]
    if not isinstance(made.op, Loop):
        return None
    for at, a in enumerate(made.args):
        found = _producer(part, a, uses)
        if found is None or found.is_transposed:
            continue
        scores = part.code[found.value - len(part.inputs)]
        if isinstance(scores.op, Dot):
            joined = _joined(part, scores, made, at, last)
            if joined is not None:
                return joined
    return None


class _Producer(NamedTuple):
    """The source of a value that reshapes and swaps of the last two axes make from it.

    Attributes:
      is_transposed: whether these axes are swapped in the end.
    """

    value: int
    is_transposed: bool


def _producer(part: Partition, value: int, uses: Mapping[int, int]) -> _Producer | None:
    """Trace a value back through reshapes and swaps of its last two axes.

    Return None if that leads to an input, a value has another use, or the axes are both swapped and
    reshaped.
    """
    n, swaps, is_reshaped = len(part.inputs), 0, False
    while value >= n and uses[value] == 1:
        made = part.code[value - n]
        if isinstance(made.op, Transpose) and made.op.order == swap(len(made.shape)):
            swaps += 1
        elif isinstance(made.op, Reshape):
            is_reshaped |= part.shape(made.args[0])[-2:] != made.shape[-2:]
        else:
            return None if swaps and is_reshaped else _Producer(value, swaps % 2 == 1)
        (value,) = made.args
    return None


def _joined(
    part: Partition, scores: Instruction, between: Instruction, at: int, last: Instruction
) -> Instruction | None:
    """Return the three as one instruction, or None if they do not fit: the loop has to go over the
    rows of the scores, and its result has to have their size.
    """
    first, loop, second = scores.op, between.op, last.op
    assert isinstance(first, Dot) and isinstance(loop, Loop) and isinstance(second, Dot)
    *batch, rows, columns = scores.shape
    if last.shape[:-1] != (*batch, rows):
        return None
    whole = math.prod(batch) * rows, columns
    sizes = math.prod(loop.inputs[at]), math.prod(loop.code[-1].shape)
    if (loop.rows, loop.columns) != whole or set(sizes) != {math.prod(scores.shape)}:
        return None
    if rows < _LEAST_ROWS or part.is_packed(scores.args[1]):
        return None
    k = math.prod(part.shape(scores.args[0])[-2:]) // rows
    if strip_elements(k, columns, last.shape[-1]) > MOST_STRIP_ELEMENTS:
        return None
    others = list(between.args[:at] + between.args[at + 1 :])
    if first.after.bias or first.after.clip is not None:
        return None
    if first.after.addend:
        loop = _with_addend(loop, at)
        others.append(scores.args[2])
        first = replace(first, after=Epilogue())
    op = Attention(first, loop, at, second)
    return replace(last, op=op, args=(*scores.args[:2], *others, last.args[1]))


def _with_addend(loop: Loop, at: int) -> Loop:
    """Return the loop on the sum of argument `at` and a further argument, which comes last."""
    n, shape = len(loop.inputs), loop.inputs[at]
    total = n + 1

    def moved(value: int) -> int:
        if value == at:
            return total
        return value if value < n else value + 2

    code = [replace(i, args=tuple(map(moved, i.args))) for i in loop.code]
    added = Instruction(Binary("add"), (at, n), shape)
    return replace(loop, inputs=(*loop.inputs, shape), code=(added, *code))
