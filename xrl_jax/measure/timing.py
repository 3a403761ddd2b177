"""Timings of functions and their ratios, with confidence intervals.

Medians and order statistics are used throughout, since the noise has one long tail.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_LEVEL = 0.95  # of intervals
STATUSES = ("ok", "failed", "timeout", "killed")


@dataclasses.dataclass(frozen=True)
class Timing:
    """The measurement of one function; all times in seconds per call.

    A failed timing has status "failed" (an error was raised), "timeout" or "killed" (the process
    died), the reason in `error`, and infinite `seconds`, so that no search prefers it.
    """

    seconds: float  # median
    low: float  # [low, high]: a 95 % interval of the median
    high: float
    repeats: int = 0  # samples behind the median
    compile_seconds: float = 0.0
    hlo_hash: str = ""  # `hlo_hash` of the optimised HLO, "" where it is unknown
    status: str = "ok"
    error: str = ""
    relative: float | None = None  # seconds / seconds of the reference, interleaved with it
    reference: str = ""  # key of that reference
    # The machine's load, if there was no reference: seconds that the worker's reference kernel,
    # interleaved, took for one multiplication and addition. Timings are normalised by it.
    reference_seconds: float | None = None
    # How many kernels of each kind a call launches, where that is known (`gpu.predict.summary`).
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @classmethod
    def without(cls, status: str, error: str, **fields: Any) -> Timing:
        """Return the timing of something that could not be timed."""
        return cls(math.inf, math.inf, math.inf, status=status, error=error, **fields)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, fit for strict JSON: infinite times become None."""
        values = dataclasses.asdict(self)
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Timing:
        """Return the timing that `as_dict` made `values` of. Unknown names are ignored; raises
        ValueError if the rest is not a timing.
        """
        try:
            status = str(values["status"])
            if status not in STATUSES:
                raise ValueError(f"status {status!r} must be one of {STATUSES}")
            relative, reference_seconds = values.get("relative"), values.get("reference_seconds")
            return cls(
                **{name: _finite_or_inf(values[name]) for name in ("seconds", "low", "high")},
                repeats=int(values.get("repeats", 0)),
                compile_seconds=float(values.get("compile_seconds", 0.0)),
                hlo_hash=str(values.get("hlo_hash", "")),
                status=status,
                error=str(values.get("error", "")),
                relative=None if relative is None else float(relative),
                reference=str(values.get("reference", "")),
                reference_seconds=None if reference_seconds is None else float(reference_seconds),
                kernels={str(k): int(n) for k, n in values.get("kernels", {}).items()},
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a timing: {error!r}") from error


def _finite_or_inf(value: Any) -> float:
    return math.inf if value is None else float(value)


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of `samples` and a distribution-free 95 % interval for the true median.

    The number of samples below the median is Binomial(n, 1/2), so [x_(k), x_(n+1-k)] contains it
    with probability 1 - 2 P(B < k); k is the largest that keeps 95 %. For fewer than six samples
    the interval is their whole range. Source: Conover, Practical Nonparametric Statistics, 3.2.
    """
    ordered = np.sort(np.asarray(samples, np.float64))
    n = ordered.size
    if n == 0:
        raise ValueError("median_interval needs at least one sample")
    k, below = 0, 0.0
    while k < n // 2:
        log_mass = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        below += math.exp(log_mass - n * math.log(2.0))  # P(B <= k)
        if below > (1.0 - _LEVEL) / 2.0:
            break
        k += 1
    k = max(k, 1)
    return float(np.median(ordered)), float(ordered[k - 1]), float(ordered[n - k])


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How many times longer one function takes than another, with a 95 % interval [low, high]."""

    value: float
    low: float
    high: float


def paired_ratio(
    numerator: Sequence[float],
    denominator: Sequence[float],
    *,
    rng: np.random.Generator,
    resamples: int = 2000,
) -> Ratio:
    """Return the ratio of two times from samples of the same rounds: exp(median(log a_i / b_i)).

    The logarithm makes paired_ratio(a, b) the exact inverse of paired_ratio(b, a). The interval is
    the percentile bootstrap over rounds (Efron and Tibshirani, An Introduction to the Bootstrap,
    13.3).
    """
    a, b = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    if a.shape != b.shape or a.ndim != 1 or a.size == 0:
        raise ValueError(
            f"paired samples must be non-empty lists of equal length, got {a.shape} and {b.shape}"
        )
    logs = np.log(a) - np.log(b)
    # In slices, so that many rounds do not need resamples x rounds values in memory at once.
    step = max(1, 1_000_000 // logs.size)
    medians = np.concatenate(
        [
            np.median(
                logs[rng.integers(0, logs.size, (min(step, resamples - start), logs.size))], axis=1
            )
            for start in range(0, resamples, step)
        ]
    )
    low, high = np.quantile(medians, [(1.0 - _LEVEL) / 2.0, (1.0 + _LEVEL) / 2.0])
    value = float(np.median(logs))
    return Ratio(math.exp(value), math.exp(min(low, value)), math.exp(max(high, value)))


def timing_of(samples: Sequence[float], **fields: Any) -> Timing:
    """Return the Timing of `samples` (seconds per call)."""
    seconds, low, high = median_interval(samples)
    return Timing(seconds, low, high, repeats=len(samples), **fields)


def error_text(error: BaseException, *, limit: int = 2000) -> str:
    """Return the error's type and message, cut to `limit` characters."""
    return f"{type(error).__name__}: {error}"[:limit]
