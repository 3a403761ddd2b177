"""A small report with round numbers, for the tests of this folder and of the experiments."""

from __future__ import annotations

import dataclasses
from typing import Any

from xrl_jax.measure.timing import Timing
from xrl_jax.report.text import Report
from xrl_jax.search.base import Step, StopReason


def small_report(**changes: Any) -> Report:
    """Return a report of a result that is twice as fast: 8 ms before, 4 ms after, 60 s spent."""
    report = Report(
        name="tiny",
        search="taso",
        settings={"Taso.alpha": 1.0, "Search.share": 0.5},
        changed_settings=("Taso.alpha",),
        seed=3,
        machine="Some CPU, 2 threads",
        versions="jax 0.10.2 jaxlib 0.10.2 cpu",
        options=(("xla_cpu_fast", "true"), ("xla_disable", "")),
        used="optimized",
        reason="faster beyond noise and within the tolerance",
        stop_reason=StopReason.SECONDS,
        baselines={
            "weights as arguments": Timing(0.010, 0.0095, 0.0105, repeats=20),
            "weights closed over": Timing(0.008, 0.0079, 0.0082, repeats=20),
        },
        baseline_name="weights closed over",
        optimized=Timing(0.004, 0.0039, 0.00425, repeats=20),
        speedup=2.0,
        interval=(1.9, 2.125),
        traced_speedup=1.25,
        noise_interval=(0.994, 1.007),
        max_error=3e-6,
        reference_error=1.5e-6,
        tolerance=6e-6,
        weight_bytes_added=3 << 20,
        predicted_ms_before=7.5,
        predicted_ms_after=3.75,
        steps=(
            Step(0, "conv-nhwc", "%12 conv[1,64,56,56]", 1e-3),
            Step(1, "merge-dots", "%7 dot[8,64]", 2e-4),
            Step(0, "conv-nhwc", "%30 conv[1,32,28,28]", 5e-4),
        ),
        history=((0.5, 7.5e-3), (12.0, 3.75e-3)),
        nodes_before=120,
        nodes_after=96,
        body_counts=(12.0,),
        candidates=12345,
        measurements=210,
        from_store=1000,
        failures=2,
        compile_seconds=25.0,
        measure_seconds=20.0,
        search_seconds=10.0,
        total_seconds=60.0,
    )
    return dataclasses.replace(report, **changes)
