"""Formatting of numbers with units."""

from __future__ import annotations

import math

import pytest

from xrl_jax.report.units import bytes_text, count_text, interval_text, seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2.5e-9, "2.50 ns"),
        (1.234e-5, "12.3 us"),
        (0.01234, "12.3 ms"),
        (1.0, "1.00 s"),
        (300.0, "300 s"),
        (4321.0, "4,321 s"),
        (-0.002, "-2.00 ms"),
        (math.inf, "unknown"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_interval_has_one_unit() -> None:
    assert interval_text(0.00095, 0.00105) == "0.950 to 1.05 ms"
    assert interval_text(0.001, math.inf) == "unknown"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (2048, "2.00 KiB"),
        (4928307, "4.70 MiB"),
        (3 << 30, "3.00 GiB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (3.0, "3"), (12.4, "12"), (12345, "12,345")]
)
def test_counts(value: float, text: str) -> None:
    assert count_text(value) == text
