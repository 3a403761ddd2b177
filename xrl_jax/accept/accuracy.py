"""Errors of a program against its values in double precision, compared with the original's errors.

Two kinds of error are judged. The first is the largest error of an array, relative to the array's
largest value; it may be a few times the original's. The second is the error of every element on its
own; it may be a few times the original's error there, or as large as rounding explains at that
element (`reference`). So an error that spreads to where nothing large was summed is detected,
however large the rest of the array is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.accept.reference import Reference, on_host, reference
from xrl_jax.program.program import Program

TIMES_ORIGINAL = (
    4.0  # the default tolerance: the result may err this many times as much as the original
)
_ULPS = 8.0  # units in the last place that are allowed even if the original is exact
# Standard errors by which one element may be off: the largest of a million normal errors is 5, the
# rest is for XLA's fast functions and for sums in another order.
_STANDARD_ERRORS = 64.0
_USUAL = 99.0  # percentile of the original's own errors, in standard errors


@dataclass(frozen=True)
class Accuracy:
    """Errors over all results and samples.

    Attributes:
      error: of the optimised function: max |x - reference| / max |reference| for each array, the
        largest of them.
      original_error: the same of the original function.
      tolerance: the largest `error` allowed.
      element: the largest error of an element / the error allowed for that element; at most 1.
      narrow: names of equations that the reference had to run in the program's own precision.
      ok: whether errors are within tolerance, integers and booleans agree with the original except
        where a rounding error decides them, and NaN and infinities are where the original or the
        reference has them.
      reason: what failed, "" if ok.
    """

    error: float
    original_error: float
    tolerance: float
    element: float
    narrow: tuple[str, ...]
    ok: bool
    reason: str = ""


@dataclass
class _Worst:
    """The largest errors so far."""

    error: float = 0.0
    original_error: float = 0.0
    unit: float = 0.0
    element: float = 0.0
    where: str = ""
    narrow: set[str] = field(default_factory=set)
    reason: str = ""

    def add(self, other: _Worst, narrow: Sequence[str]) -> None:
        """Add the errors on another sample."""
        if other.element > self.element:
            self.element, self.where = other.element, other.where
        self.error = max(self.error, other.error)
        self.original_error = max(self.original_error, other.original_error)
        self.unit = max(self.unit, other.unit)
        self.reason = self.reason or other.reason
        self.narrow |= set(narrow)


def relative_error(got: Any, reference: Any) -> float:
    """Return max |got - reference| / max |reference| where the reference is finite; inf where NaN
    or infinities differ.
    """
    a, b = _wide(got), _wide(reference)
    finite = np.isfinite(b)
    if misplaced(a, b).any():
        return float("inf")
    if not finite.any():
        return 0.0
    scale = float(np.max(np.abs(b[finite])))
    worst = float(np.max(np.abs(a[finite] - b[finite])))
    return worst / scale if scale > 0 else (0.0 if worst == 0 else float("inf"))


def misplaced(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return which elements are NaN or infinite in one array and not the same in the other."""
    with np.errstate(invalid="ignore"):
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    return ~same & ~(np.isfinite(got) & np.isfinite(expected))


def element_error(
    got: np.ndarray, before: np.ndarray, exact: np.ndarray, standard_error: np.ndarray, unit: float
) -> tuple[float, int]:
    """Return the largest ratio of an element's error to the error allowed for it, and the flat
    index of that element.

    Args:
      got: results of the optimised function, in double precision.
      before: results of the original, in double precision.
      exact: the reference.
      standard_error: the standard rounding error of every element.
      unit: a unit in the last place of 1, in the results' dtype.
    """
    with np.errstate(all="ignore"):
        least = _ULPS * (unit * np.abs(exact) + np.finfo(np.float32).tiny)
        old_error, new_error = np.abs(before - exact), np.abs(got - exact)
        usual = old_error / np.maximum(standard_error, least / _ULPS)
        known = np.isfinite(usual)
        times = TIMES_ORIGINAL * np.percentile(usual[known], _USUAL) if known.any() else 0.0
        by_rounding = max(_STANDARD_ERRORS, times) * standard_error
        allowed = np.maximum(by_rounding, TIMES_ORIGINAL * old_error)
        ratio = new_error / np.maximum(allowed, least)
    ratio = np.where(np.isfinite(ratio), ratio, 0.0).reshape(-1)
    at = int(np.argmax(ratio))
    return float(ratio[at]), at


def references(
    program: Program, samples: Sequence[Sequence[Any]], *, errors: bool = True
) -> Callable[[], list[Reference]]:
    """Return a function that gives the program's results in double precision on these argument
    lists; they are computed at its first call.

    Args:
      errors: whether the errors of single elements are needed; see `reference`.
    """

    @functools.cache
    def found() -> list[Reference]:
        in_float64 = reference(program, errors=errors)
        return [in_float64(args) for args in samples]

    return found


def assess(
    original: Callable[..., Any],
    optimised: Callable[..., Any],
    exact: Callable[[], Sequence[Reference]],
    samples: Sequence[Sequence[Any]],
    *,
    tolerance: float | None = None,
    unusual: Mapping[int, Callable[[], float]] = MappingProxyType({}),
    after_runs: Callable[[], Any] = lambda: None,
) -> Accuracy:
    """Compare an optimised function with the original.

    Args:
      original, optimised: functions of the same flat arguments with the same results.
      exact: the original in double precision on the samples; see `references`.
      samples: argument lists to compare on.
      tolerance: relative error allowed; None to allow `TIMES_ORIGINAL` times the original's, and to
        judge each element on its own as well.
      unusual: by index, the samples on which an error above the tolerance is allowed as well: one
        up to the number that is returned, or up to `TIMES_ORIGINAL` times the original's. Such
        errors do not count in the result.
      after_runs: called after both functions have run on all samples and before the reference runs,
        whose weights take twice the memory.
    """
    results = [
        [[on_host(r) for r in jax.tree.leaves(fn(*args))] for fn in (original, optimised)]
        for args in samples
    ]
    after_runs()
    worst = _Worst()
    for n, (found, (before, after)) in enumerate(zip(exact(), results, strict=True)):
        own = _Worst()
        for i, pair in enumerate(zip(before, after, strict=True)):
            _compare(own, i, *pair, found)
        if n in unusual and tolerance is not None:
            usual = max(tolerance, TIMES_ORIGINAL * own.original_error)
            if own.error <= usual or own.error <= unusual[n]():
                own.error = own.original_error = 0.0
        worst.add(own, found.narrow)
    allowed = tolerance
    if allowed is None:
        allowed = max(TIMES_ORIGINAL * worst.original_error, _ULPS * worst.unit)
    reason = worst.reason
    if not worst.error <= allowed:
        reason = (
            f"the result's error against float64 is {worst.error:.2e}, allowed is {allowed:.2e}"
        )
    if not reason and tolerance is None and worst.element > 1.0:
        reason = worst.where
    narrow = tuple(sorted(worst.narrow))
    return Accuracy(
        worst.error, worst.original_error, allowed, worst.element, narrow, not reason, reason
    )


def _compare(
    worst: _Worst, i: int, before: np.ndarray, after: np.ndarray, reference: Reference
) -> None:
    """Update the largest errors with one more result."""
    exact, error = reference.exact[i], reference.error[i]
    if after.dtype != before.dtype or after.shape != before.shape:
        problem = (
            f"result {i} is {after.dtype}{list(after.shape)}, "
            f"the original gives {before.dtype}{list(before.shape)}"
        )
    elif not jnp.issubdtype(before.dtype, jnp.inexact):
        in_doubt = error if error.dtype == bool and error.shape == before.shape else False
        differs = (before != after) & ~np.asarray(in_doubt)
        problem = (
            f"result {i} ({before.dtype}) differs from the original's" if differs.any() else ""
        )
    elif not before.size:
        return
    else:
        b, a = _wide(before), _wide(after)
        # Either the original or the reference must agree: XLA:CPU loses some NaN in maxima.
        wrong = int(np.sum(misplaced(a, b) & misplaced(a, exact)))
        problem = f"result {i} differs from the original's in NaN or infinity, in {wrong} places"
        problem = problem if wrong else ""
        finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(exact)
        against = np.where(finite, exact, 0)
        a, b = np.where(finite, a, 0), np.where(finite, b, 0)
        worst.error = max(worst.error, relative_error(a, against))
        worst.original_error = max(worst.original_error, relative_error(b, against))
        unit = float(jnp.finfo(before.dtype).eps)
        worst.unit = max(worst.unit, unit)
        element, at = element_error(a, b, against, np.where(finite, error, np.inf), unit)
        if element > worst.element:
            worst.element = element
            index = tuple(int(n) for n in np.unravel_index(at, b.shape))
            worst.where = (
                f"element {list(index)} of result {i} is {a[index]:.9g}, in float64 "
                f"{against[index]:.9g}: {element:.2g} times the error allowed there"
            )
    worst.reason = worst.reason or problem


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
