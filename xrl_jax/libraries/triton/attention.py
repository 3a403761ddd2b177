"""Finds attention in a jaxpr: a product (the scores), operators on each of its rows, and a product
of their result with values.

Any spelling is found: heads first or last, masks and scales in any place, heads that share keys,
either product written the other way round. What counts is that the second product sums over the
columns of the first, and that nothing else reads what is between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal

from xrl_jax.libraries.triton import strided, tile
from xrl_jax.libraries.triton.following import axes_of, others_fit
from xrl_jax.libraries.triton.naming import Sizes
from xrl_jax.libraries.triton.operands import Jaxpr, Operand
from xrl_jax.libraries.triton.product import MOST_ELEMENTS, Part, is_possible, parts, product_p
from xrl_jax.libraries.triton.strided import Axis

# Operators that move all elements.
_PERMUTATIONS = ("reshape", "squeeze", "expand_dims", "transpose")
_MOST_FEATURES = 256  # of a key or a value


@dataclass(frozen=True)
class Attention:
    """A found attention: rows [M] by columns [N] of scores for each element of a batch.

    Attributes:
      scores, product: equations of the two products.
      between: the equations between them, in order.
      queries, keys, values: operands of the products.
      query_part, key_part, value_part: their axes.
      others: further operands of the equations between, by variable.
      axes: of every variable between, as positions in the scores [batch, M, N].
      batch_order, row_order: the batch and the rows of the second product, as positions in the
        scores: it may count them in another order.
      rows: variable of what the second product multiplies with the values.
      columns_first: whether the columns of the scores come before their rows.
      rows_first: whether the rows of the second product come before its features.
      result: variable of the result, in which elements of that product may have moved.
      result_axes: of the result, as positions in that product [batch, M, features].
      replaced: all equations that the kernel takes the place of.
    """

    scores: Any
    product: Any
    between: tuple[Any, ...]
    queries: Operand
    keys: Operand
    values: Operand
    query_part: Part
    key_part: Part
    value_part: Part
    others: Mapping[Any, Operand]
    axes: Mapping[Any, tuple[Axis, ...]]
    sizes: Sizes
    batch_order: Axis
    row_order: Axis
    rows: Any
    columns_first: bool
    rows_first: bool
    result: Any
    result_axes: tuple[Axis, ...]
    replaced: tuple[Any, ...]

    @property
    def arguments(self) -> list[Any]:
        """The variables of all arrays that the kernel reads."""
        operands = (self.queries, self.keys, self.values, *self.others.values())
        return list(dict.fromkeys(root for operand in operands for root in operand.roots))

    @property
    def dtype(self) -> Any:
        """The dtype of queries and keys as they are multiplied."""
        return self.scores.invars[0].aval.dtype


def find(jaxpr: Jaxpr, product: Any) -> Attention | None:
    """Return the attention that ends in this product; None if there is none."""
    for side in (0, 1):
        found = _found(jaxpr, product, side)
        if found is not None:
            return found
    return None


def _found(jaxpr: Jaxpr, product: Any, side: int) -> Attention | None:
    """Return the attention whose rows are this operand of the product."""
    rows = product.invars[side]
    if isinstance(rows, Literal) or not is_possible(product):
        return None
    scores = _scores(jaxpr, rows)
    if scores is None or not is_possible(scores):
        return None
    shape = scores.outvars[0].aval.shape
    left, right = parts(scores)
    n_batch, n_left = len(left.batch), len(left.free)
    groups = shape[:n_batch], shape[n_batch : n_batch + n_left], shape[n_batch + n_left :]
    batch, first, second = map(math.prod, groups)
    weights, values = (parts(product)[s] for s in (side, 1 - side))
    # The positions in the scores of a row, a column and a batch: strides of its flat elements.
    batches = _run(batch, first * second)
    firsts, seconds = _run(first, second), _run(second, 1)
    between = _between(jaxpr, scores, rows)
    if between is None:
        return None
    equations, others = between
    for columns_first in (False, True):
        row_axis, column_axis = (seconds, firsts) if columns_first else (firsts, seconds)
        axes = axes_of(scores, equations, column_axis)
        if axes is None:
            continue
        at = axes[rows]

        def along(indices: Sequence[int], at: Sequence[Axis] = at) -> Axis:
            return strided.joined([at[i] for i in indices])

        batch_order, row_order = along(weights.batch), along(weights.free)
        covered = _sorted(batch_order) == batches and _sorted(row_order) == row_axis
        if not covered or along(weights.summed) != column_axis:
            continue
        queries, keys = (1, 0) if columns_first else (0, 1)
        sizes = Sizes(
            batch,
            strided.size_of(row_axis),
            strided.size_of(column_axis),
            _count(scores.invars[0], left.summed),
            _count(product.invars[1 - side], values.free),
        )
        result, result_axes, moves = _result(jaxpr, product)
        found = Attention(
            scores,
            product,
            equations,
            jaxpr.operand(scores.invars[queries]),
            jaxpr.operand(scores.invars[keys]),
            jaxpr.operand(product.invars[1 - side]),
            (left, right)[queries],
            (left, right)[keys],
            values,
            {v: o for v in others if (o := jaxpr.view(v)) is not None},
            axes,
            sizes,
            batch_order,
            row_order,
            rows,
            columns_first,
            side == 0,
            result,
            result_axes,
            (scores, *equations, product, *moves),
        )
        return found if _fits(found) else None
    return None


def _run(size: int, stride: int) -> Axis:
    return strided.joined([(strided.Piece(size, stride),)])


def _sorted(axis: Axis) -> Axis:
    """Return an axis with its pieces in the order in which they are in memory."""
    return strided.joined([tuple(sorted(axis, key=lambda p: -p.stride))])


def _count(variable: Any, axes: Sequence[int]) -> int:
    return math.prod(variable.aval.shape[d] for d in axes)


def _scores(jaxpr: Jaxpr, rows: Any) -> Any | None:
    """Return the one product that a value is computed from by operators on tiles."""
    found: dict[Any, Any] = {}  # products by their results
    seen, open_ = set(), [rows]
    while open_:
        v = open_.pop()
        made = jaxpr.producer.get(v)
        if v in seen or made is None:
            continue
        seen.add(v)
        if made.primitive is product_p:
            found[v] = made
        elif tile.is_possible(made):
            open_ += [a for a in made.invars if not isinstance(a, Literal)]
    return next(iter(found.values())) if len(found) == 1 else None


def _between(jaxpr: Jaxpr, scores: Any, rows: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Return the equations that lead from the scores to a value, and their other operands; None if
    anything else reads what they make.
    """
    start = scores.outvars[0]
    inside, open_ = {start}, [start]
    taken: dict[int, Any] = {}
    while open_:
        v = open_.pop()
        if v is rows:
            continue
        if v in jaxpr.returned:
            return None
        for user in jaxpr.users.get(v, ()):
            if not tile.is_possible(user):
                return None
            taken[id(user)] = user
            (made,) = user.outvars
            if made not in inside:
                inside.add(made)
                open_.append(made)
    if rows not in inside or rows in jaxpr.returned or len(jaxpr.users[rows]) != 1:
        return None
    order = tuple(sorted(taken.values(), key=lambda e: jaxpr.order[id(e)]))
    read = dict.fromkeys(v for e in order for v in e.invars if not isinstance(v, Literal))
    return order, [v for v in read if v not in inside]


def _result(jaxpr: Jaxpr, product: Any) -> tuple[Any, tuple[Axis, ...], list[Any]]:
    """Return what a product's result is moved to before it is read, its axes as positions in the
    product, and the equations that move it.
    """
    (out,), moves = product.outvars, []
    view = strided.row_major(out.aval.shape)
    while out not in jaxpr.returned and len(users := jaxpr.users.get(out, [])) == 1:
        (user,) = users
        moved = strided.viewed(view, user) if user.primitive.name in _PERMUTATIONS else None
        if moved is None:
            break
        view, (out,) = moved, user.outvars
        moves.append(user)
    return out, view.axes, moves


def _fits(found: Attention) -> bool:
    """Return whether one multiprocessor can hold what a kernel needs, and it is known what the
    elements of all operands belong to.
    """
    if not others_fit(found.between, found.others, found.axes):
        return False
    operands = (found.queries, found.keys, found.values)
    if any(isinstance(operand.root, Literal) for operand in operands):
        return False
    arrays = [v for o in (*operands, *found.others.values()) for v in o.roots]
    if any(math.prod(v.aval.shape) >= MOST_ELEMENTS for v in (*arrays, found.result)):
        return False
    return min(found.sizes) > 0 and max(found.sizes.summed, found.sizes.features) <= _MOST_FEATURES
