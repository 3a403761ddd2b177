"""Replaces callbacks (debug prints, `io_callback`, `pure_callback`) while a function is optimised.

Timing runs a function thousands of times, but its prints, logs and other host calls are meant for
the user's own calls. Stand-ins therefore replace the callbacks: the stand-in of a callback without
results does nothing; that of an `io_callback` calls it once, and that of a `pure_callback` once for
each set of operands. Compiled code calls the stand-ins in the same way as the callbacks, so that
timings stay comparable. `with_callbacks` restores the callbacks in the program the user gets.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xrl_jax.frontends.trace import trace
from xrl_jax.graph.bindings import Call, Equation
from xrl_jax.program.arguments import flatten_as
from xrl_jax.program.program import Program

_SILENT = ("debug_callback", "debug_print")
_CALLBACKS = (*_SILENT, "io_callback", "pure_callback")
_MOST_ANSWERS = 64  # of one callback; beyond that its last one is repeated

Change = Callable[[Any], Any]  # maps an equation with `primitive` and `params`


class Answers:
    """The values that callbacks have returned, shared by all traces of one function."""

    def __init__(self) -> None:
        self._found: dict[int, dict[Any, list[np.ndarray]]] = {}
        self._lock = threading.RLock()  # XLA calls back from its own threads

    def get(self, number: int, key: Any, compute: Callable[[], Sequence[Any]]) -> list[np.ndarray]:
        """Return callback `number`'s answer for this key, by `compute` if there is none yet."""
        with self._lock:
            found = self._found.setdefault(number, {})
            if key not in found:
                if len(found) >= _MOST_ANSWERS:
                    return next(reversed(found.values()))
                found[key] = [np.asarray(x) for x in compute()]
            return found[key]


class StandIn:
    """A function that is called in place of a callback.

    Attributes:
      number: the position of the callback among those of the function.
      primitive, params: those of the callback's own equation.
    """

    def __init__(self, number: int, equation: Any, answers: Answers) -> None:
        self.number = number
        self.primitive, self.params = equation.primitive, dict(equation.params)
        self._answers = answers

    def __repr__(self) -> str:  # part of the key of a program, also in later processes
        return f"callback {self.number}"

    def __call__(self, *operands: Any) -> list[np.ndarray]:
        types = self.params.get("result_avals", ())
        if not types:
            return []
        key = None
        if self.primitive.name == "pure_callback":
            arrays = [np.asarray(x) for x in operands]
            key = tuple((a.shape, str(a.dtype), a.tobytes()) for a in arrays)
        answer = self._answers.get(self.number, key, lambda: self.params["callback"](*operands))
        return [x.astype(t.dtype) for x, t in zip(answer, types, strict=True)]


def has_callbacks(program: Program) -> bool:
    """Return whether a run of the program calls back to the host."""
    found: list[Any] = []

    def look(equation: Any) -> Any:
        found.extend([equation] * (equation.primitive.name in _CALLBACKS))
        return equation

    _changed_bindings(program, look)
    return bool(found)


def without_callbacks(fn: Callable[..., Any], in_tree: Any) -> Callable[..., Any]:
    """Return `fn` with stand-ins for its callbacks, traceable, for arguments of this structure."""
    answers = Answers()

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, _ = flatten_as(in_tree, args, kwargs)
        closed, out_tree = trace(fn, leaves, in_tree)
        quiet = _changed(closed, _to_stand_ins(answers), {})
        return jax.tree.unflatten(out_tree, jaxpr_as_fun(quiet)(*leaves))

    return run


def program_without_callbacks(program: Program) -> Program:
    """Return the program with stand-ins for its callbacks, and no `fn`, which has the originals."""
    return replace(_changed_bindings(program, _to_stand_ins(Answers())), fn=None)


def with_callbacks(program: Program) -> Program:
    """Return the program with each stand-in replaced by its original callback."""

    def back(equation: Any) -> Any:
        stand_in = equation.params.get("callback")
        if not isinstance(stand_in, StandIn):
            return equation
        return _with_primitive(equation, stand_in.primitive, stand_in.params)

    return _changed_bindings(program, back)


def _to_stand_ins(answers: Answers) -> Change:
    numbers = iter(range(1 << 30))

    def change(equation: Any) -> Any:
        if equation.primitive.name not in _CALLBACKS:
            return equation
        stand_in = StandIn(next(numbers), equation, answers)
        primitive, params = equation.primitive, dict(equation.params)
        if primitive.name == "debug_print":  # has no `callback` parameter: made a debug_callback
            primitive, params = _debug_callback(params["ordered"])
        return _with_primitive(equation, primitive, {**params, "callback": stand_in})

    return change


@functools.cache
def _debug_callback(ordered: bool) -> tuple[Any, dict[str, Any]]:
    """Return the primitive and the parameters of `jax.debug.callback`."""
    jaxpr = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None, ordered=ordered))().jaxpr
    (equation,) = jaxpr.eqns
    return equation.primitive, equation.params


def _with_primitive(equation: Any, primitive: Any, params: dict[str, Any]) -> Any:
    """Return an equation of a jaxpr or a program with another primitive and other parameters."""
    if isinstance(equation, Equation):
        return replace(equation, primitive=primitive, params=params)
    return equation.replace(primitive=primitive, params=params)


def _changed_bindings(program: Program, change: Change) -> Program:
    """Return the program with `change` applied to all equations, also those nested in others."""
    seen: dict[int, Any] = {}

    def changed(binding: Any) -> Any:
        if isinstance(binding, Call) and binding.equation is not None:
            return replace(binding, equation=_changed_equation(binding.equation, change, seen))
        if isinstance(binding, Equation):
            return _changed_equation(binding, change, seen)
        return binding

    return replace(program, bindings=tuple(map(changed, program.bindings)))


def _changed_equation(equation: Any, change: Change, seen: dict[int, Any]) -> Any:
    params = {k: _changed(v, change, seen) for k, v in equation.params.items()}
    if any(v is not equation.params[k] for k, v in params.items()):
        equation = _with_primitive(equation, equation.primitive, params)
    return change(equation)


def _changed(value: Any, change: Change, seen: dict[int, Any]) -> Any:
    """Apply `change` to the equations of a jaxpr, or of all jaxprs in a tuple or list.

    Returns the value itself where nothing changes.

    Args:
      seen: the result for each jaxpr, by id, so that shared jaxprs stay shared.
    """
    if isinstance(value, ClosedJaxpr):
        jaxpr = _changed(value.jaxpr, change, seen)
        return value if jaxpr is value.jaxpr else value.replace(jaxpr=jaxpr)
    if type(value) in (tuple, list):
        items = [_changed(v, change, seen) for v in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if not hasattr(value, "eqns"):
        return value
    if id(value) not in seen:
        equations = [_changed_equation(e, change, seen) for e in value.eqns]
        same = all(a is b for a, b in zip(equations, value.eqns, strict=True))
        seen[id(value)] = value if same else value.replace(eqns=equations)
    return seen[id(value)]
