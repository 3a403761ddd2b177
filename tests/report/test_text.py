"""The report: its text, values derived from its fields, and JSON."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from tests.report.reports import small_report
from xrl_jax.measure.timing import Timing
from xrl_jax.report.text import Report
from xrl_jax.search.base import Step

TEXT = """\
tiny: 2.00 times as fast (1.90 to 2.12)
  faster beyond noise and within the tolerance
  noise: a function timed against itself gives 0.994 to 1.007

time per call
  weights as arguments    10.0 ms  (9.50 to 10.5 ms)
  weights closed over     8.00 ms  (7.90 to 8.20 ms)  strongest baseline
  optimised               4.00 ms  (3.90 to 4.25 ms)
  the cost model predicted 7.50 ms before, 3.75 ms after

errors against float64: original 1.5e-06, optimised 3.0e-06, allowed 6.0e-06
where weights are traced, as inside another jit: 1.25 times as fast
memory added by prepared weights: 3.00 MiB
calls to break even: 15,000

rules fired: 3 rewrites by 2 rules (predicted gain, first place)
  merge-dots    1 x    2.40 ms  body 1: %7 dot[8,64]
  conv-nhwc     2 x    1.50 ms  %12 conv[1,64,56,56]

time spent: 60.0 s (compiling 25.0 s, measuring 20.0 s, searching 10.0 s, other 5.00 s)
search taso, seed 3: out of time; 12,345 candidates, 210 measured (2 failed), 1,000 from the store
  with Taso.alpha=1.0
nodes: 120 before, 96 after; 1 folded body runs 12 times
compile options: xla_cpu_fast=true xla_disable=(none)
machine: Some CPU, 2 threads
versions: jax 0.10.2 jaxlib 0.10.2 cpu"""


def test_text() -> None:
    assert str(small_report()) == TEXT


def test_text_says_when_the_original_is_returned_and_why() -> None:
    reason = "the original is returned: nothing found is faster beyond noise"
    report = small_report(used="original", reason=reason, speedup=1.0)
    lines = str(report).splitlines()
    assert lines[:2] == ["tiny: nothing gained", f"  {reason}"]
    assert "calls to break even: never" in lines


def test_text_says_what_the_errors_are_measured_against() -> None:
    lines = str(small_report(narrow=("sort", "custom"))).splitlines()
    assert (
        "errors against float64 (computed in their own precision: sort, custom): "
        "original 1.5e-06, optimised 3.0e-06, allowed 6.0e-06"
    ) in lines


def test_rules_are_marked_if_their_program_is_not_returned() -> None:
    text = str(small_report(used="original"))
    assert "rewrites by 2 rules, in a program that is not returned (predicted gain" in text


def test_text_without_rewrites_bodies_and_options() -> None:
    lines = str(small_report(steps=(), body_counts=(), options=(), seed=None)).splitlines()
    assert "rules fired: none" in lines
    assert "nodes: 120 before, 96 after" in lines
    assert "compile options: (default)" in lines
    assert any(line.startswith("search taso: out of time") for line in lines)


def test_text_names_a_baseline_that_could_not_be_timed() -> None:
    report = small_report()
    failed = Timing.without("failed", "XlaRuntimeError: out of memory\nlong trace")
    report = dataclasses.replace(report, baselines={**report.baselines, "same options": failed})
    expected = "  same options          failed: XlaRuntimeError: out of memory"
    assert expected in str(report).splitlines()


def test_many_rules_stay_within_fifty_lines() -> None:
    steps = tuple(Step(0, f"rule-{i:02}", f"%{i} add[4]", i * 1e-6) for i in range(40))
    lines = str(small_report(steps=steps)).splitlines()
    assert len(lines) < 50
    assert "  rule-39    1 x    39.0 us  %39 add[4]" in lines
    assert "  and 26 rewrites by 26 more rules, 325 us" in lines


def test_rules_fired_most_often_first() -> None:
    assert list(small_report().rules_fired.items()) == [("conv-nhwc", 2), ("merge-dots", 1)]


def test_milliseconds_follow_from_the_timings() -> None:
    report = small_report()
    assert (report.baseline_ms, report.optimized_ms) == (8.0, 4.0)


@pytest.mark.parametrize("slower", [0.008, 0.009, math.inf])
def test_without_savings_there_is_no_break_even(slower: float) -> None:
    report = small_report(optimized=Timing(slower, slower, slower))
    assert report.break_even_calls is None


def test_json_round_trip() -> None:
    report = small_report()
    text = json.dumps(report.as_dict(), allow_nan=False)
    assert Report.from_dict(json.loads(text)) == report


def test_json_round_trip_of_infinite_numbers() -> None:
    report = small_report(max_error=math.inf, optimized=Timing.without("timeout", "30 s"))
    values = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert values["max_error"] is None
    assert values["optimized_ms"] is None
    assert Report.from_dict(values) == report


def test_dict_has_the_derived_figures() -> None:
    values = small_report().as_dict()
    assert values["speedup"] == 2.0
    assert values["interval"] == [1.9, 2.125]
    assert values["break_even_calls"] == 15000
    assert values["rules_fired"] == {"conv-nhwc": 2, "merge-dots": 1}
    assert values["stop_reason"] == "SECONDS"


def test_newer_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format 2, this version reads up to 1"):
        Report.from_dict({**small_report().as_dict(), "format": 2})


@pytest.mark.parametrize("values", [{}, {"format": 1}, {"format": 1, "name": "x"}])
def test_values_that_are_no_report_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a report"):
        Report.from_dict(values)


def test_the_strongest_baseline_must_have_been_timed() -> None:
    with pytest.raises(ValueError, match="'other' was not timed; timed were: weights as arguments"):
        small_report(baseline_name="other")
