"""Plots: what they show, and the error without matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.report.reports import small_report
from xrl_jax.measure.timing import Timing
from xrl_jax.report.plots import (
    draw_frontier,
    draw_history,
    draw_timings,
    plot_frontier,
    plot_history,
)
from xrl_jax.search.base import FrontierPoint

figure_lib = pytest.importorskip("matplotlib.figure")


def test_history_is_drawn_as_steps_in_milliseconds_up_to_the_end() -> None:
    axes = figure_lib.Figure().subplots()
    draw_history(axes, [(0.5, 0.0075), (12.0, 0.004)], 60.0)
    x, y = axes.lines[0].get_data()
    assert list(x) == [0.5, 12.0, 60.0]
    assert list(y) == [7.5, 4.0, 4.0]


def test_timings_are_bars_in_milliseconds_and_failures_are_left_out() -> None:
    axes = figure_lib.Figure().subplots()
    report = small_report()
    baselines = {**report.baselines, "broken": Timing.without("failed", "no memory")}
    draw_timings(axes, small_report(baselines=baselines))
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["weights as arguments", "weights closed over", "optimised"]
    assert [bar.get_width() for bar in axes.patches] == [10.0, 8.0, 4.0]


FRONTIER = (FrontierPoint(0.5, 0.0), FrontierPoint(0.25, 2e-3, "3 x operands in int8"))


def test_the_frontier_is_drawn_as_speed_ups_by_error() -> None:
    axes = figure_lib.Figure().subplots()
    draw_frontier(axes, small_report(frontier=FRONTIER, tolerance=1e-2))
    x, y = axes.lines[0].get_data()
    assert list(x) == [0.0, 2e-3]
    assert list(y) == [2.0, 4.0]
    assert [text.get_text() for text in axes.texts] == ["no narrower types", "3 x operands in int8"]


def test_the_frontier_has_a_plot_of_its_own(tmp_path: Path) -> None:
    plot_frontier(small_report(frontier=FRONTIER, tolerance=1e-2), tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="the report has no frontier"):
        plot_frontier(small_report(), tmp_path / "frontier.png")


@pytest.mark.parametrize("source", [small_report(), small_report(history=()), [(0.0, 1e-3)]])
def test_the_file_extension_decides_the_format(tmp_path: Path, source: object) -> None:
    plot_history(source, tmp_path / "history.png")  # type: ignore[arg-type]
    plot_history(source, tmp_path / "history.svg")  # type: ignore[arg-type]
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "history.svg").read_text(encoding="utf-8")


def test_an_empty_history_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_history([], tmp_path / "history.png")


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="plots need matplotlib: pip install matplotlib"):
        plot_history(small_report(), tmp_path / "history.png")
