"""Finds what follows a product in a jaxpr and can be computed in its kernel, its epilogue: a bias,
an activation, a residual.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend.core import Literal

from xrl_jax.graph.equations import variables
from xrl_jax.libraries.triton import tile
from xrl_jax.libraries.triton.following import axes_of, others_fit
from xrl_jax.libraries.triton.operands import Jaxpr, Operand
from xrl_jax.libraries.triton.product import MOST_ELEMENTS, Part, is_possible, parts
from xrl_jax.libraries.triton.strided import Axis


class Sizes(NamedTuple):
    """The sizes of a product: [rows, summed] times [summed, columns]."""

    rows: int
    columns: int
    summed: int


@dataclass(frozen=True)
class ProductAndEpilogue:
    """A found product of two matrices with its epilogue.

    Attributes:
      product: equation of the product.
      after: the equations of the epilogue, in order.
      left, right: operands of the product.
      left_part, right_part: their axes.
      others: further operands of the epilogue, by variable.
      axes: of every value of the epilogue, as positions in the product.
      result: variable of the result.
    """

    product: Any
    after: tuple[Any, ...]
    left: Operand
    right: Operand
    left_part: Part
    right_part: Part
    others: Mapping[Any, Operand]
    axes: Mapping[Any, tuple[Axis, ...]]
    sizes: Sizes
    result: Any

    @property
    def replaced(self) -> tuple[Any, ...]:
        """All equations that the kernel takes the place of, in order."""
        return (self.product, *self.after)

    @property
    def result_axes(self) -> tuple[Axis, ...]:
        """The axes of the result, as positions in the product."""
        return self.axes[self.result]

    @property
    def arguments(self) -> list[Any]:
        """The variables of all arrays that the kernel reads."""
        operands = (self.left, self.right, *self.others.values())
        return list(dict.fromkeys(root for operand in operands for root in operand.roots))


def find_epilogue(jaxpr: Jaxpr, product: Any) -> ProductAndEpilogue | None:
    """Return a marked product with the longest epilogue; None if no kernel can compute it."""
    if not is_possible(product):
        return None
    left, right = parts(product)
    shapes = [v.aval.shape for v in product.invars]
    rows, columns = (
        math.prod(shape[d] for d in part.free)
        for shape, part in zip(shapes, (left, right), strict=True)
    )
    sizes = Sizes(rows, columns, math.prod(shapes[0][d] for d in left.summed))
    if left.batch or min(sizes) < 1:
        return None
    left_operand, right_operand = map(jaxpr.operand, product.invars)
    operands = left_operand, right_operand
    for after in _epilogues(jaxpr, product):
        found = _with_epilogue(jaxpr, product, after, operands, (left, right), sizes)
        if found is not None:
            return found
    return None


def _epilogues(jaxpr: Jaxpr, product: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the equations after a product whose only result is that of the last, longest first."""
    (out,) = product.outvars
    taken, cuts = list[Any](), [()]
    known: set[int] = set()  # identities of those taken
    inside = {out}  # values made so far

    def other_users(v: Any) -> list[Any]:
        return [u for u in jaxpr.users.get(v, ()) if id(u) not in known]

    while True:
        following = [u for v in inside for u in other_users(v)]
        following.sort(key=lambda e: jaxpr.order[id(e)])
        if not following or not _is_elementwise(following[0], out):
            break
        taken.append(following[0])
        known.add(id(following[0]))
        (made,) = following[0].outvars
        inside.add(made)
        if not any(v in jaxpr.returned or other_users(v) for v in inside - {made}):
            cuts.append(tuple(taken))
    yield from reversed(cuts)


def _is_elementwise(equation: Any, product: Any) -> bool:
    """Return whether an equation makes a value with as many elements as the product."""
    if not tile.is_possible(equation) or equation.primitive.name in tile.REDUCTIONS:
        return False
    size = math.prod(equation.outvars[0].aval.shape)
    return size == math.prod(product.aval.shape)


def _with_epilogue(
    jaxpr: Jaxpr,
    product: Any,
    after: Sequence[Any],
    operands: tuple[Operand, Operand],
    sides: tuple[Part, Part],
    sizes: Sizes,
) -> ProductAndEpilogue | None:
    """Return the product with this epilogue, if it is known where all elements are."""
    axes = axes_of(product, after)
    if axes is None:
        return None
    read = dict.fromkeys(v for e in after for v in variables(e.invars) if v not in axes)
    others = {v: o for v in read if (o := jaxpr.view(v)) is not None}
    if len(others) < len(read) or not others_fit(after, others, axes):
        return None
    if any(isinstance(o.root, Literal) for o in operands):
        return None
    result = after[-1].outvars[0] if after else product.outvars[0]
    (left, right), (left_part, right_part) = operands, sides
    found = ProductAndEpilogue(
        product, tuple(after), left, right, left_part, right_part, others, axes, sizes, result
    )
    each_once = all(p.stride for axis in found.result_axes for p in axis)
    arrays = [*found.arguments, result]
    fits = all(math.prod(v.aval.shape) < MOST_ELEMENTS for v in arrays)
    return found if each_once and fits else None
