"""The functions that an optimised function runs, on flat arguments: the program in two parts, the
original outside of the program's domain, and the original's derivative.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import take_current_trace

from xrl_jax.backends.arguments import of_leaves
from xrl_jax.backends.hoist import Hoisted, split
from xrl_jax.backends.layouts import in_wanted_layouts
from xrl_jax.program.program import Program, evaluate
from xrl_jax.runtime.settings import own_settings, under_own_settings

Flat = Callable[..., list[Any]]


class Runnable(Protocol):
    """Functions of flat arguments.

    Attributes:
      hoisted: the optimised program in two parts.
      outside: the function to run outside of the domain; None if there is none.
      original: the function that provides the derivative; None if the program provides its own.
    """

    hoisted: Any  # Hoisted
    outside: Any  # Flat or None
    original: Any  # Flat or None

    def whole(self, *leaves: Any) -> list[Any]:
        """Run the optimised program, nothing hoisted (traceable)."""
        ...

    def unprepared(self, *leaves: Any) -> list[Any]:
        """Run the program that is fastest where weights are traced (traceable)."""
        ...

    def with_derivative(self, flat: Flat) -> Flat:
        """Return `flat` with the derivative of the original."""
        ...


class ProgramRunnable:
    """A program and the function it was traced from.

    Args:
      program: the optimised program.
      fn: the original function; None if there is none, the derivative is then the program's.
      max_bytes: bound for the memory that prepared weights may add; None for no bound.
      traced_program: the program to run where weights are traced, so that no work on them is done
        beforehand; None for `program`.
      original: the traced function, which runs outside of the domain if there is no `fn`.
    """

    def __init__(
        self,
        program: Program,
        fn: Callable[..., Any] | None,
        *,
        max_bytes: int | None = None,
        traced_program: Program | None = None,
        original: Program | None = None,
    ) -> None:
        self._program, self._fn, self._max_bytes = program, fn, max_bytes
        self._traced_program, self._traced_original = traced_program, original
        self._lock = threading.RLock()

    def whole(self, *leaves: Any) -> list[Any]:
        return evaluate(self._program, 0, leaves)

    def unprepared(self, *leaves: Any) -> list[Any]:
        return evaluate(self._traced_program or self._program, 0, leaves)

    @functools.cached_property
    def hoisted(self) -> Hoisted:
        program = self._program
        with self._lock, take_current_trace(), own_settings():
            hoisted = split(
                self.whole, program.in_avals, program.weights, max_bytes=self._max_bytes
            )
        prepare, call = under_own_settings(hoisted.prepare), under_own_settings(hoisted.call)
        hoisted = replace(hoisted, prepare=prepare, call=call)
        inputs = zip(program.in_avals, program.weights, strict=True)
        return in_wanted_layouts(hoisted, [a for a, is_weight in inputs if not is_weight])

    @functools.cached_property
    def original(self) -> Flat | None:
        if self._fn is None:
            return None
        structured = of_leaves(self._fn, self._program.in_tree)
        return lambda *leaves: jax.tree.leaves(structured(*leaves))

    @functools.cached_property
    def outside(self) -> Flat | None:
        program = self._traced_original
        if self._fn is not None or program is None:
            return self.original
        return lambda *leaves: evaluate(program, 0, leaves)

    def with_derivative(self, flat: Flat) -> Flat:
        original = self.original
        return flat if original is None else _with_derivative(flat, original)


def _with_derivative(flat: Flat, original: Flat) -> Flat:
    fast = jax.custom_jvp(flat)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        active = [
            i
            for i, (p, t) in enumerate(zip(primals, tangents, strict=True))
            if not isinstance(t, SymbolicZero) and jnp.issubdtype(jnp.result_type(p), jnp.inexact)
        ]

        def of_active(*varied: Any) -> list[Any]:
            leaves = list(primals)
            for i, x in zip(active, varied, strict=True):
                leaves[i] = x
            return original(*leaves)

        return jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])

    fast.defjvp(jvp, symbolic_zeros=True)
    return fast
