"""Plots of a search: the best prediction over time, the timings, time against error."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xrl_jax.report.text import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_history(
    source: Report | Sequence[tuple[float, float]], path: str | os.PathLike[str]
) -> None:
    """Write a plot to `path` in the format that its extension names (.png, .svg, .pdf).

    Args:
      source: a report, whose timings before and after and whose frontier of time and error are
        drawn as well; or only a history, i.e. pairs of seconds since the start and best predicted
        seconds.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
      ValueError: `source` is an empty history.
    """
    history = source.history if isinstance(source, Report) else tuple(source)
    if not history and not isinstance(source, Report):
        raise ValueError("there is nothing to plot: the history is empty")
    columns = 1 if not isinstance(source, Report) else 3 if source.frontier else 2
    figure, axes = _figure(columns)
    end = source.total_seconds if isinstance(source, Report) else None
    draw_history(axes[0], history, end)
    if isinstance(source, Report):
        figure.suptitle(f"{source.name}, search {source.search}")
        draw_timings(axes[1], source)
        if source.frontier:
            draw_frontier(axes[2], source)
    figure.savefig(path, dpi=150)


def plot_frontier(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a plot of what narrower types buy to `path`, in the format that its extension names.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
      ValueError: the report has no frontier.
    """
    if not report.frontier:
        raise ValueError("there is nothing to plot: the report has no frontier")
    figure, (axes,) = _figure(1)
    figure.suptitle(f"{report.name} within an error of {report.tolerance:g}")
    draw_frontier(axes, report)
    figure.savefig(path, dpi=150)


def _figure(columns: int) -> tuple[Any, Sequence[Any]]:
    """Return a figure and its axes, side by side."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'plots need matplotlib: pip install matplotlib, or the extra "dev" of xrl_jax',
            name=error.name,
        ) from error
    # No pyplot: it keeps figures in global state and may open a window.
    figure = Figure(figsize=(5.5 * columns, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def draw_history(axes: Axes, history: Sequence[tuple[float, float]], end: float | None) -> None:
    """Draw the best predicted milliseconds over time as steps; the last one extends to `end`."""
    times = [seconds for seconds, _ in history]
    best = [1e3 * seconds for _, seconds in history]
    if history and end is not None and end > times[-1]:
        times.append(end)
        best.append(best[-1])
    axes.step(times, best, where="post")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the search began")
    axes.set_ylabel("best so far, predicted ms")


def draw_frontier(axes: Axes, report: Report) -> None:
    """Draw what narrower types buy: the time of the original / time, by the error they cause."""
    errors = [p.error for p in report.frontier]
    speedups = [1.0 / p.relative for p in report.frontier]
    axes.step(errors, speedups, where="post", marker="o")
    for point, speedup in zip(report.frontier, speedups, strict=True):
        text = point.types or "no narrower types"
        side, offset = ("right", (-4, 4)) if point.error else ("left", (3, -9))
        at = point.error, speedup
        axes.annotate(text, at, offset, textcoords="offset points", fontsize=7, ha=side)
    axes.axvline(report.tolerance, color="tab:red", linestyle="--", label="tolerance")
    least = max(min((e for e in errors if e), default=1e-3), 3e-9)
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(report.tolerance)) + 1)
    axes.set_xscale("symlog", linthresh=least / 3)
    axes.set_xticks([0.0, *(10.0**n for n in decades)])
    axes.set_xlim(left=0.0, right=1.3 * max(report.tolerance, *errors))
    axes.set_ylim(bottom=0.0, top=1.15 * max(speedups))
    axes.set_xlabel("error that narrower types cause")
    axes.set_ylabel("speed-up over the original")
    axes.legend(loc="lower right")


def draw_timings(axes: Axes, report: Report) -> None:
    """Draw measured milliseconds per call of baselines and result, with 95 % intervals."""
    named = {**report.baselines, "optimised": report.optimized}
    timed = {name: t for name, t in named.items() if t.ok}
    places = range(len(timed))
    ms = [1e3 * t.seconds for t in timed.values()]
    below = [1e3 * (t.seconds - t.low) for t in timed.values()]
    above = [1e3 * (t.high - t.seconds) for t in timed.values()]
    colours = ["tab:green" if name == "optimised" else "tab:grey" for name in timed]
    axes.barh(places, ms, xerr=[below, above], color=colours, capsize=3)
    axes.set_yticks(places, list(timed))
    axes.invert_yaxis()
    axes.set_xlabel("ms per call, measured")
