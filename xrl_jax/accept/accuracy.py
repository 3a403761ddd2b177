"""How far a program is from its values in double precision, beside how far the original is.

Two things are judged. The largest error of an array, relative to the array's largest value: it may
be a few times the original's. And every element by itself: it may err by a few times what the
original errs there, or by what rounding explains at that element (`reference`); so an error that
spreads to where nothing large was summed is seen, however large the rest of the array is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.accept.reference import Reference, on_host, reference
from xrl_jax.program.program import Program

TIMES_ORIGINAL = (
    4.0  # the default tolerance: the result may err this many times as much as the original
)
_ULPS = 8.0  # an original that is exact still grants this many units in the last place
# Standard errors that one element may be off: the largest of a million normal errors is 5, XLA's
# fast functions and sums in another order take the rest.
_STANDARD_ERRORS = 64.0
_USUAL = 99.0  # percentile of the original's own errors, in standard errors


@dataclass(frozen=True)
class Accuracy:
    """Errors over all results and samples.

    Attributes:
      error: of the optimised function: max |x - reference| / max |reference| for each array, the
        largest of them.
      original_error: of the original function.
      tolerance: what `error` may be.
      element: the largest error of an element beside what is allowed for that element; at most 1.
      narrow: names of equations that the reference had to run in the program's own precision.
      ok: within tolerance; integers and booleans agree with the original but where a rounding error
        decides them, NaN and infinities are where the original's are.
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
    """The largest figures so far."""

    error: float = 0.0
    own: float = 0.0
    unit: float = 0.0
    element: float = 0.0
    where: str = ""
    narrow: set[str] = field(default_factory=set)
    reason: str = ""


def relative_error(got: Any, reference: Any) -> float:
    """max |got - reference| / max |reference| where the reference is finite; inf where NaN or
    infinities differ.
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
    """Which elements are NaN or infinite in one of the arrays and not the same in the other."""
    with np.errstate(invalid="ignore"):
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    return ~same & ~(np.isfinite(got) & np.isfinite(expected))


def element_error(
    got: np.ndarray, before: np.ndarray, exact: np.ndarray, bar: np.ndarray, unit: float
) -> tuple[float, int]:
    """The largest error of an element over what is allowed for it, and which element that is.

    Args:
      got: results of the optimised function, wide.
      before: of the original, wide.
      exact: the reference.
      bar: the standard rounding error of every element.
      unit: a unit in the last place of 1.
    """
    with np.errstate(all="ignore"):
        least = _ULPS * (unit * np.abs(exact) + np.finfo(np.float32).tiny)
        own, ours = np.abs(before - exact), np.abs(got - exact)
        usual = own / np.maximum(bar, least / _ULPS)
        known = np.isfinite(usual)
        times = TIMES_ORIGINAL * np.percentile(usual[known], _USUAL) if known.any() else 0.0
        allowed = np.maximum(max(_STANDARD_ERRORS, times) * bar, TIMES_ORIGINAL * own)
        ratio = ours / np.maximum(allowed, least)
    ratio = np.where(np.isfinite(ratio), ratio, 0.0).reshape(-1)
    at = int(np.argmax(ratio))
    return float(ratio[at]), at


def references(program: Program, samples: Sequence[Sequence[Any]]) -> Callable[[], list[Reference]]:
    """What the program gives in double precision on these argument lists, worked out when it is
    first asked for.
    """

    @functools.cache
    def found() -> list[Reference]:
        in_float64 = reference(program)
        return [in_float64(args) for args in samples]

    return found


def assess(
    original: Callable[..., Any],
    optimised: Callable[..., Any],
    exact: Callable[[], Sequence[Reference]],
    samples: Sequence[Sequence[Any]],
    *,
    tolerance: float | None = None,
    ran: Callable[[], Any] = lambda: None,
) -> Accuracy:
    """Compare an optimised function with the original.

    Args:
      original, optimised: functions of the same flat arguments with the same results.
      exact: the original in double precision on the samples; see `references`.
      samples: argument lists to compare on.
      tolerance: relative error allowed; None for `TIMES_ORIGINAL` times the original's own, and for
        elements to be judged by themselves.
      ran: called once both functions have run on all samples, before the reference does, whose
        weights take twice the memory.
    """
    results = [
        [[on_host(r) for r in jax.tree.leaves(fn(*args))] for fn in (original, optimised)]
        for args in samples
    ]
    ran()
    worst = _Worst()
    for found, (before, after) in zip(exact(), results, strict=True):
        worst.narrow |= set(found.narrow)
        for i, pair in enumerate(zip(before, after, strict=True)):
            _compare(worst, i, *pair, found)
    allowed = tolerance
    if allowed is None:
        allowed = max(TIMES_ORIGINAL * worst.own, _ULPS * worst.unit)
    reason = worst.reason
    if not worst.error <= allowed:
        reason = f"the result errs by {worst.error:.2e} against float64, allowed are {allowed:.2e}"
    if not reason and tolerance is None and worst.element > 1.0:
        reason = worst.where
    narrow = tuple(sorted(worst.narrow))
    return Accuracy(worst.error, worst.own, allowed, worst.element, narrow, not reason, reason)


def _compare(
    worst: _Worst, i: int, before: np.ndarray, after: np.ndarray, reference: Reference
) -> None:
    """Take one more result into the figures."""
    exact, bar = reference.exact[i], reference.error[i]
    if after.dtype != before.dtype or after.shape != before.shape:
        problem = (
            f"result {i} is {after.dtype}{list(after.shape)}, "
            f"the original gives {before.dtype}{list(before.shape)}"
        )
    elif not jnp.issubdtype(before.dtype, jnp.inexact):
        in_doubt = bar if bar.dtype == bool and bar.shape == before.shape else False
        differs = (before != after) & ~np.asarray(in_doubt)
        problem = (
            f"result {i} ({before.dtype}) differs from the original's" if differs.any() else ""
        )
    elif not before.size:
        return
    else:
        b, a = _wide(before), _wide(after)
        # As the original has them or as the reference has: XLA:CPU loses some NaN in maxima.
        wrong = int(np.sum(misplaced(a, b) & misplaced(a, exact)))
        problem = f"result {i} has NaN or infinity in {wrong} other places than the original's"
        problem = problem if wrong else ""
        finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(exact)
        against = np.where(finite, exact, 0)
        a, b = np.where(finite, a, 0), np.where(finite, b, 0)
        worst.error = max(worst.error, relative_error(a, against))
        worst.own = max(worst.own, relative_error(b, against))
        unit = float(jnp.finfo(before.dtype).eps)
        worst.unit = max(worst.unit, unit)
        element, at = element_error(a, b, against, np.where(finite, bar, np.inf), unit)
        if element > worst.element:
            worst.element = element
            index = tuple(int(n) for n in np.unravel_index(at, b.shape))
            worst.where = (
                f"element {list(index)} of result {i} is {a[index]:.9g}, in float64 "
                f"{against[index]:.9g}: {element:.2g} times the error that is allowed there"
            )
    worst.reason = worst.reason or problem


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
