"""A budget of error: how large it is, and the inputs on which it is spent and then checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from xrl_jax.accept.coarse import COARSE, coarse_error, coarse_results
from xrl_jax.accept.reference import reference
from xrl_jax.accept.samples import N_USUAL, samples
from xrl_jax.precision.inputs import drawn_inputs
from xrl_jax.program.program import Program

_CHOSEN_ON, _CHECKED_ON = 16, 16  # least number of inputs for choices, and for the check


@dataclass(frozen=True)
class ErrorBudget:
    """A budget of error.

    Attributes:
      tolerance: the largest error of a result, relative to the largest element of its array.
      chosen_on: flat argument lists on which precisions are chosen.
      unusual: others, with values as large as the domain allows: precisions are chosen such that
        the error there is at most that of bfloat16, or within the tolerance.
      checked_on: others, on which the result is checked.
      given: how many of all were given by the user; the others are drawn.
    """

    tolerance: float
    chosen_on: list[list[Any]]
    unusual: list[list[Any]]
    checked_on: list[list[Any]]
    given: int

    @property
    def origin(self) -> str:
        """Where the inputs come from, as a sentence for reports."""
        drawn = len(self.chosen_on) + len(self.checked_on) - self.given
        return (
            f"narrower types: chosen on {len(self.chosen_on)} inputs and checked on "
            f"{len(self.checked_on)} others; {self.given} were given, {drawn} drawn"
        )


def check_tolerance(tolerance: Any, calibration: Sequence[Any]) -> None:
    """Raise ValueError if this is no tolerance, or if there are inputs but no tolerance."""
    if tolerance is None:
        if calibration:
            raise ValueError("calibration is for a tolerance: give tolerance=1e-2, for example")
        return
    if isinstance(tolerance, str) and tolerance in COARSE:
        return
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not (is_number and 0 < float(tolerance) < math.inf):
        raise ValueError(
            f"tolerance is {tolerance!r}: give a positive relative error such as 1e-2, or one of "
            f"{', '.join(map(repr, COARSE))} for an error as in that type"
        )


def error_budget(
    program: Program,
    leaves: Sequence[Any],
    tolerance: float | str,
    batches: Sequence[Sequence[Any]] = (),
) -> ErrorBudget:
    """Return the budget for a tolerance.

    Args:
      program: the original.
      leaves: its flat example arguments.
      tolerance: a relative error, or a type of `COARSE`: the error of the program in that type.
      batches: typical inputs as flat argument lists; if there are none, the example is typical.

    Raises:
      ValueError: the program overflows in that type.
    """
    known = [list(x) for x in batches] or [list(leaves)]
    n = min(_CHOSEN_ON, -(-len(known) // 2))
    again = samples(program, leaves)
    chosen_on, checked_on = [*known[:n], *again[1:N_USUAL]], known[n:]
    chosen_on += drawn_inputs(program, known, max(_CHOSEN_ON - len(chosen_on), 0), seed=1)
    checked_on += drawn_inputs(program, known, max(_CHECKED_ON - len(checked_on), 0), seed=2)
    if isinstance(tolerance, str):
        tolerance = _error_in(program, tolerance, chosen_on)
    unusual = [x for x in again[N_USUAL:] if all(map(_is_finite, x))]
    return ErrorBudget(float(tolerance), chosen_on, unusual, checked_on, len(batches))


def _is_finite(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.inexact) or bool(jnp.isfinite(x).all())


def _error_in(program: Program, kind: str, inputs: Sequence[Sequence[Any]]) -> float:
    """Return the error of the program in a type of `COARSE` on these inputs."""
    exact, coarse = reference(program, errors=False), coarse_results(program, kind)
    worst = max(coarse_error(coarse(x), exact(x)) for x in inputs)
    if not math.isfinite(worst):
        raise ValueError(f"tolerance={kind!r}: the function overflows in that type; give a number")
    return worst
