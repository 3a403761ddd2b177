"""Formatting of numbers with units, for reports, progress lines and plots."""

from __future__ import annotations

import math

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BYTES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def three_digits(value: float) -> str:
    """Format with three significant digits and no exponent; above 999 as a whole number."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def seconds_text(seconds: float) -> str:
    """Format a duration in a suitable unit: 0.0123 is "12.3 ms"."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds == 0:
        return "0 s"
    size, unit = next((u for u in _TIMES if abs(seconds) >= u[0]), _TIMES[-1])
    return f"{three_digits(seconds / size)} {unit}"


def interval_text(low: float, high: float) -> str:
    """Format two durations in one unit: "12.1 to 12.9 ms"."""
    if not math.isfinite(low + high):
        return "unknown"
    size, unit = next((u for u in _TIMES if abs(high) >= u[0]), _TIMES[-1])
    return f"{three_digits(low / size)} to {three_digits(high / size)} {unit}"


def bytes_text(count: int) -> str:
    """Format a size in binary units: 4,928,307 is "4.70 MiB"."""
    size, unit = next((u for u in _BYTES if abs(count) >= u[0]), _BYTES[-1])
    return f"{three_digits(count / size) if size > 1 else count} {unit}"


def count_text(value: float) -> str:
    """Format a count with thousands separators; fractions below ten keep one decimal."""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
