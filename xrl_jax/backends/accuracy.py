"""How far a program is from a float64 reference, beside how far the original is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TIMES_ORIGINAL = (
    4.0  # the default tolerance: the result may err this many times as much as the original
)
_ULPS = 8.0  # an original that is exact still grants this many units in the last place


@dataclass(frozen=True)
class Accuracy:
    """Relative errors over all results and samples: max |x - reference| / max |reference| for each
    array, the largest of them.

    Attributes:
      error: of the optimised function.
      original_error: of the original function.
      tolerance: what `error` may be.
      reference: "float64", or "original" where the function cannot be run in float64 (then
        `original_error` is 0).
      ok: within tolerance; integers, booleans, NaN and infinities agree with the original.
      reason: what failed, "" if ok.
    """

    error: float
    original_error: float
    tolerance: float
    reference: str
    ok: bool
    reason: str = ""


def relative_error(got: Any, reference: Any) -> float:
    """max |got - reference| / max |reference| where the reference is finite; inf where NaN or
    infinities differ.
    """
    a, b = np.asarray(got), np.asarray(reference)
    wide = np.complex128 if np.iscomplexobj(b) or np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    beyond = ~finite & ~np.isnan(b)
    if not np.array_equal(a[beyond], b[beyond]):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = float(np.max(np.abs(b[finite])))
    worst = float(np.max(np.abs(a[finite] - b[finite])))
    return worst / scale if scale > 0 else (0.0 if worst == 0 else float("inf"))


def in_float64(fn: Callable[..., Any], args: Sequence[Any]) -> list[Any] | None:
    """Flat results of `fn` on arguments widened to float64 (complex128), on the host; None where it
    cannot be run so.
    """
    widen: dict[Any, Any] = {
        jnp.dtype(d): jnp.dtype("float64") for d in ("float16", "bfloat16", "float32")
    }
    widen[jnp.dtype("complex64")] = jnp.dtype("complex128")

    def wide(x: Any) -> Any:
        if not hasattr(x, "dtype") or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        host = np.asarray(x)
        # To the device at once: two copies of all weights are none of one array.
        return jax.device_put(host.astype(widen.get(jnp.dtype(host.dtype), host.dtype)))

    try:
        with jax.enable_x64(True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = jax.jit(fn)(*jax.tree.map(wide, list(args)))
            return [_host(r) for r in jax.tree.leaves(results)]
    except Exception:
        # The function fixes a dtype somewhere: the caller says so in `Accuracy.reference`.
        return None


def _host(x: Any) -> Any:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x)


def assess(
    original: Callable[..., Any],
    optimised: Callable[..., Any],
    reference: Callable[..., Any],
    samples: Sequence[Sequence[Any]],
    *,
    tolerance: float | None = None,
    ran: Callable[[], Any] = lambda: None,
) -> Accuracy:
    """Compare an optimised function with the original.

    Args:
      original, optimised: functions of the same arguments with the same results.
      reference: the original, to be run in float64.
      samples: argument lists to compare on.
      tolerance: relative error allowed; None for `TIMES_ORIGINAL` times the original's own.
      ran: called once both functions have run on all samples, before the reference does, whose
        weights take twice the memory.
    """
    results = [
        [[_host(r) for r in jax.tree.leaves(fn(*args))] for fn in (original, optimised)]
        for args in samples
    ]
    ran()
    error = own = 0.0
    kind, reason = "float64", ""
    unit = 0.0
    for args, (before, after) in zip(samples, results, strict=True):
        exact = in_float64(reference, args)
        if exact is None or [e.shape for e in exact] != [b.shape for b in before]:
            kind, exact = "original", before
        for i, (b, a, e) in enumerate(zip(before, after, exact, strict=True)):
            if a.dtype != b.dtype or a.shape != b.shape:
                reason = reason or (
                    f"result {i} is {a.dtype}{list(a.shape)}, "
                    f"the original gives {b.dtype}{list(b.shape)}"
                )
            elif not jnp.issubdtype(b.dtype, jnp.inexact):
                if not np.array_equal(a, b):
                    reason = reason or f"result {i} ({b.dtype}) differs from the original's"
            elif b.size:
                against = e if np.array_equal(np.isfinite(e), np.isfinite(b)) else b.astype(e.dtype)
                error, own = (
                    max(error, relative_error(a, against)),
                    max(own, relative_error(b, against)),
                )
                unit = max(unit, float(jnp.finfo(b.dtype).eps))
    allowed = max(TIMES_ORIGINAL * own, _ULPS * unit) if tolerance is None else tolerance
    if not reason and not error <= allowed:
        reason = f"the result errs by {error:.2e} against {kind}, allowed are {allowed:.2e}"
    return Accuracy(error, own, allowed, kind, not reason, reason)
