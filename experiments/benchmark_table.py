"""The benchmark's figures as a table, as means, and as a picture."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments import models
from experiments.side_by_side import RIVAL, SideBySide
from xrl_jax.report.units import three_digits


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean logarithm; nan for none."""
    logs = [math.log(v) for v in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def best_of(result: SideBySide) -> str:
    """The search whose result is the fastest."""
    return min(result.entries, key=lambda s: result.entries[s].seconds)


def beyond_noise(result: SideBySide, slow: str, fast: str) -> bool:
    """Whether one entrant is faster than another by more than the A/A control's interval."""
    _, low, _ = result.ratios.get(f"{slow}/{fast}", (1.0, 1.0, 1.0))
    return low > max(result.noise[1], 1.0 / result.noise[0], 1.0)


def summary(
    results: Sequence[SideBySide], reports: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> dict[str, Any]:
    """Means over groups of networks that are all there, and counts.

    Args:
      reports: of `experiments.optimize`, by network and search.
    """
    by_name = {r.network: r for r in results}
    groups = {"twelve": models.TWELVE, "seven": models.SEVEN}
    there = {g: list(names) for g, names in groups.items() if set(names) <= set(by_name)}
    there |= {"all": list(by_name)}
    searches = list(dict.fromkeys(s for r in results for s in r.entries))
    means = {
        group: {
            s: geometric_mean(
                by_name[n].entries[s].speedup for n in names if s in by_name[n].entries
            )
            for s in searches
        }
        for group, names in there.items()
    }
    errors = [
        abs(each[f"predicted_ms_{when}"] / each[measured] - 1.0)
        for of_network in reports.values()
        for each in of_network.values()
        for when, measured in (("before", "baseline_ms"), ("after", "optimized_ms"))
        if each[measured]
    ]
    rivals = {
        r.network: r.ratios[f"{RIVAL}/{best_of(r)}"][0]
        for r in results
        if f"{RIVAL}/{best_of(r)}" in r.ratios
    }
    return {
        "means": means,
        "taso_beats_local": [r.network for r in results if beyond_noise(r, "local", "taso")],
        "slower_than_jit": [
            r.network for r in results if any(e.high < 1.0 for e in r.entries.values())
        ],
        "rival_over_best": rivals,
        "rival_over_best_mean": geometric_mean(rivals.values()),
        "ahead_of_rival": [n for n, ratio in rivals.items() if ratio > 1.0],
        "model_error_median": statistics.median(errors) if errors else None,
        "peak_bytes": max(
            (each["peak_bytes"] for of in reports.values() for each in of.values()), default=None
        ),
    }


def table(results: Sequence[SideBySide], figures: Mapping[str, Any]) -> str:
    """Markdown: a row for each network, means below, counts after that."""
    searches = list(dict.fromkeys(s for r in results for s in r.entries))
    head = ["network", "strongest jit, ms", "A/A", *searches, f"{RIVAL}, ms", "rival / best"]
    rows = [_row(r, searches) for r in results]
    for group, means in figures["means"].items():
        name = f"geometric mean, {group}"
        rows.append([name, "", "", *(_number(means[s]) for s in searches), "", ""])
    if figures["rival_over_best"]:
        rows[-1][-1] = _number(figures["rival_over_best_mean"])
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += [
        "",
        f"taso beats local beyond noise on: {_names(figures['taso_beats_local'])}",
        f"slower than the strongest jit: {_names(figures['slower_than_jit'])}",
        f"ahead of {RIVAL}: {_names(figures['ahead_of_rival'])}",
    ]
    if figures["model_error_median"] is not None:
        share = 100 * figures["model_error_median"]
        lines.append(f"cost model against measured, median error: {share:.0f} %")
    if figures["peak_bytes"] is not None:
        lines.append(f"peak memory of a search: {figures['peak_bytes'] / 2**30:.2f} GiB")
    lines += [f"no {RIVAL} for {r.network}: {r.rival_note}" for r in results if r.rival_note]
    return "\n".join(lines)


def _row(result: SideBySide, searches: Sequence[str]) -> list[str]:
    best = best_of(result)
    cells = []
    for s in searches:
        if s not in result.entries:
            cells.append("failed")
            continue
        e = result.entries[s]
        cells.append(f"{_number(e.speedup)} ({_number(e.low)}-{_number(e.high)})")
    rival = "-" if result.rival_seconds is None else _milliseconds(result.rival_seconds)
    ratio = result.ratios.get(f"{RIVAL}/{best}")
    low, high = result.noise
    return [
        result.network,
        _milliseconds(min(result.jits.values())),
        f"{low:.3f}-{high:.3f}",
        *cells,
        rival,
        "-" if ratio is None else _number(ratio[0]),
    ]


def _milliseconds(seconds: float) -> str:
    return three_digits(1e3 * seconds)


def _number(value: float) -> str:
    return f"{value:.2f}"


def _names(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "none"


def plot(results: Sequence[SideBySide], path: str | os.PathLike[str]) -> None:
    """Bars of speed-ups over the strongest jit with their intervals, and the rival's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    searches = list(dict.fromkeys(s for r in results for s in r.entries))
    figure = Figure(figsize=(1.2 + 1.1 * len(results), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    width = 0.8 / (len(searches) + 1)
    for k, s in enumerate(searches):
        there = [(i, r.entries[s]) for i, r in enumerate(results) if s in r.entries]
        axes.bar(
            [i + k * width for i, _ in there],
            [e.speedup for _, e in there],
            width,
            yerr=[[e.speedup - e.low for _, e in there], [e.high - e.speedup for _, e in there]],
            label=s,
        )
    with_rival = [(i, r) for i, r in enumerate(results) if r.rival_seconds]
    axes.bar(
        [i + len(searches) * width for i, _ in with_rival],
        [min(r.jits.values()) / (r.rival_seconds or math.inf) for _, r in with_rival],
        width,
        label=RIVAL,
        color="tab:grey",
    )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(results))])
    axes.set_xticklabels([r.network for r in results], rotation=30, ha="right")
    axes.set_ylabel("times as fast as the strongest jax.jit")
    axes.legend()
    figure.savefig(path, dpi=150)
