"""Operands of products as kernels read them: views of arrays that are there already, and the scales
and biases that are applied on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jax.extend.core import Literal

from xrl_jax.graph.equations import variables
from xrl_jax.libraries.triton import strided, tile
from xrl_jax.libraries.triton.strided import View

# Elementwise operators that a kernel applies to what it reads, and how many times smaller than the
# operand the others have to be.
_CHEAP = "add sub mul div neg max min convert_element_type select_n copy".split()
_SMALLER = 4


class Step(NamedTuple):
    """An elementwise equation that a kernel applies to an operand as it reads it.

    Attributes:
      others: the equation's other operands, such as a bias, by variable.
    """

    equation: Any
    others: Mapping[Any, Operand]


@dataclass(frozen=True)
class Operand:
    """An operand as a view of a row-major array.

    Attributes:
      root: variable of the array, or a literal, which has no axes.
      view: of its elements, with the operand's axes.
      steps: what is done to these elements, in order.
    """

    root: Any
    view: View
    steps: tuple[Step, ...] = ()

    @property
    def roots(self) -> list[Any]:
        """The variables of all arrays that are read."""
        found = [self.root, *(o.root for step in self.steps for o in step.others.values())]
        return variables(found)


class Jaxpr:
    """A jaxpr with the equation that makes each variable, and those that read it."""

    def __init__(self, jaxpr: Any) -> None:
        self.order = {id(e): n for n, e in enumerate(jaxpr.eqns)}
        self.producer = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.users: dict[Any, list[Any]] = {}
        for e in jaxpr.eqns:
            for v in e.invars:
                if not isinstance(v, Literal):
                    self.users.setdefault(v, []).append(e)
        self.returned = {v for v in jaxpr.outvars if not isinstance(v, Literal)}

    def give(self, variable: Any) -> None:
        """Regard a variable as one that no equation makes, as a kernel will make it."""
        self.producer.pop(variable, None)

    def keep(self, variables: Iterable[Any]) -> None:
        """Regard variables as results: a kernel reads them."""
        self.returned.update(variables)

    def view(
        self, variable: Any, shape: Sequence[int] | None = None, moves: Sequence[Any] = ()
    ) -> Operand | None:
        """Return a variable as a view of the earliest array that it is a view of; None if there is
        none. A scalar is the same wherever it is read.

        Args:
          shape: to which the variable is broadcast first.
          moves: equations that then move its elements.
        """
        literal = self._literal(variable)
        if literal is not None or not variable.aval.shape:
            return Operand(variable if literal is None else literal, View(()))
        found, own = None, list[Any]()
        to = variable.aval.shape if shape is None else shape
        while True:
            view = strided.moved(strided.row_major(variable.aval.shape), own)
            if view is not None:
                view = strided.moved(strided.broadcast(view, to), moves)
            found = found if view is None else Operand(variable, view)
            source = self._source(variable)
            if source is None:
                return found
            own.insert(0, self.producer[variable])
            variable = source

    def _literal(self, variable: Any) -> Literal | None:
        """Return the literal that a variable repeats; None if it does not."""
        made = self.producer.get(variable)
        if made is None or made.primitive.name not in tile.MOVES:
            return None
        source = made.invars[0]
        return source if isinstance(source, Literal) else self._literal(source)

    def _source(self, variable: Any) -> Any | None:
        """Return what a variable is a view of; None for nothing."""
        made = self.producer.get(variable)
        if made is None or len(made.invars) != 1 or isinstance(made.invars[0], Literal):
            return None
        (source,) = made.invars
        view = strided.viewed(strided.row_major(source.aval.shape), made)
        return None if view is None else source

    def operand(self, variable: Any) -> Operand:
        """Return the operand of a product as a view, with what is done to its elements: scales and
        biases, but no work that would be repeated for every tile that reads it.
        """
        found = self.view(variable)
        assert found is not None
        moves: list[Any] = []
        steps: tuple[Step, ...] = ()
        while True:
            while (source := self._source(variable)) is not None:
                moves.insert(0, self.producer[variable])
                variable = source
            made = self.producer.get(variable)
            users = self.users.get(variable, ())
            if made is None or len(users) != 1 or variable in self.returned:
                return found
            if made.primitive.name not in _CHEAP or not tile.is_possible(made):
                return found
            views = {v: self.view(v, variable.aval.shape, moves) for v in variables(made.invars)}
            sizes = {v: _size(v if o is None else o.root) for v, o in views.items()}
            variable = max(sizes, key=sizes.__getitem__)
            main = views.pop(variable)
            others = {v: o for v, o in views.items() if o is not None}
            few = all(_SMALLER * _size(o.root) <= _size(variable) for o in others.values())
            if not few or len(others) < len(views):
                return found
            steps = (Step(made, others), *steps)
            found = found if main is None else replace(main, steps=steps)


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)
