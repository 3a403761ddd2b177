"""Products of few rows with a concatenation, as products with its parts.

A decoder multiplies a query with all keys so far: those of its cache, and a new one. Joining them
copies the cache, which takes longer than the product.
"""

from __future__ import annotations

import math

from xrl_jax.libraries.onednn.spec import Concat, Dot, Epilogue, Reshape, Shape, Slice
from xrl_jax.libraries.onednn.values import Uses, Value, reshaped, result_of

_MOST_ROWS = 16  # of the left operand; with more, the products take longer than the copy
_LEAST = 1 << 12  # elements of a concatenation that is worth it


def product_of_parts(v: Value, op: Dot, uses: Uses) -> Value | None:
    """Return a product with a concatenation that has no other use as the concatenation, or the
    sum, of products with its parts; None if it is none.
    """
    left, right, *more = v.args
    if op.after != Epilogue() or more or right.known or uses.get(right) != 1:
        return None
    rows, parts = v.shape[-2], _parts(right, uses)
    if parts is None or rows > _MOST_ROWS or math.prod(right.shape) < _LEAST:
        return None
    axis, values = parts
    rank = len(right.shape)
    sums_over = rank - 1 if op.right_transposed else rank - 2
    if axis < rank - 2:
        return None
    if axis != sums_over:
        made = [result_of(op, [left, x], (*v.shape[:-1], x.shape[axis])) for x in values]
        _count(made, uses)
        return result_of(Concat(rank - 1), made, v.shape)
    along = rank - 2 if op.left_transposed else rank - 1
    total, start = None, 0
    for x in values:
        stop = start + x.shape[axis]
        terms = _slice(left, along, start, stop)
        _count([terms, x], uses)
        if total is None:
            total = result_of(op, [terms, x], v.shape)
        else:
            uses[total] = 1
            added = Dot(op.left_transposed, op.right_transposed, Epilogue(addend=True), op.right)
            total = result_of(added, [terms, x, total], v.shape)
        start = stop
    return total


def _count(values: list[Value], uses: Uses) -> None:
    for x in values:
        uses[x] = uses.get(x, 0) + 1


def _parts(right: Value, uses: Uses) -> tuple[int, list[Value]] | None:
    """Return the axis along which an array is concatenated, and its parts; None if it is not.

    Axes before that one may be merged or split after the concatenation.
    """
    shape, joined = right.shape, right
    while isinstance(joined.made_by, Reshape) and uses.get(joined) == 1:
        (joined,) = joined.args
    if not isinstance(joined.made_by, Concat) or uses.get(joined) != 1:
        return None
    behind = joined.shape[joined.made_by.axis :]  # the sizes from the axis on
    axis = len(shape) - len(behind)
    if axis < 0 or shape[axis:] != behind:
        return None

    def part(x: Value) -> Value:
        size = x.shape[len(x.shape) - len(behind)]
        return reshaped(x, (*shape[:axis], size, *shape[axis + 1 :]))

    return axis, [part(x) for x in joined.args]


def _slice(x: Value, axis: int, start: int, stop: int) -> Value:
    before: Shape = (0,) * axis
    after = x.shape[axis + 1 :]
    op = Slice(
        (*before, start, *(0 for _ in after)),
        (*x.shape[:axis], stop, *after),
        (1,) * len(x.shape),
    )
    return result_of(op, [x], (*x.shape[:axis], stop - start, *after))
