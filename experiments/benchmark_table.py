"""Summary of the benchmark's results: a table, means, and a bar chart."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments import models
from experiments.runtimes import RUNTIMES, TITLES
from experiments.side_by_side import SideBySide
from xrl_jax.report.units import three_digits

WITHIN = "@"  # between the name of a search and the tolerance that it had
GREYS = ("tab:gray", "silver")  # colours of the runtimes' bars


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of the values; nan if there are none."""
    logs = [math.log(v) for v in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def best_of(result: SideBySide, runtime: str = "") -> str:
    """Return the search whose result is the fastest, without a tolerance unless it is compared with
    a runtime in a narrower type.
    """
    strict = runtime in RUNTIMES or not runtime
    allowed = (s for s in result.entries if WITHIN not in s or not strict)
    return min(allowed, key=lambda s: result.entries[s].seconds)


def beyond_noise(result: SideBySide, slow: str, fast: str) -> bool:
    """Return whether `fast` is faster than `slow` by more than the A/A control's interval."""
    _, low, _ = result.ratios.get(f"{slow}/{fast}", (1.0, 1.0, 1.0))
    return low > max(result.noise[1], 1.0 / result.noise[0], 1.0)


def summary(
    results: Sequence[SideBySide], reports: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> dict[str, Any]:
    """Return means over groups of networks whose results are complete, and other summary figures.

    Args:
      reports: those of `experiments.optimize`, by network and search.
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
    runtimes = {name: over_best(results, name) for name in runtimes_of(results)}
    return {
        "means": means,
        "taso_beats_local": [r.network for r in results if beyond_noise(r, "local", "taso")],
        "slower_than_jit": [
            r.network for r in results if any(e.high < 1.0 for e in r.entries.values())
        ],
        "within_over_strict": within_over_strict(results),
        "runtime_over_best": runtimes,
        "runtime_over_best_mean": {n: geometric_mean(of.values()) for n, of in runtimes.items()},
        "model_error_median": statistics.median(errors) if errors else None,
        "peak_bytes": max(
            (each["peak_bytes"] for of in reports.values() for each in of.values()), default=None
        ),
    }


def within_over_strict(results: Sequence[SideBySide]) -> dict[str, dict[str, float]]:
    """Return, by search with a tolerance and by network, seconds of its strict result / seconds of
    the result within the tolerance.
    """
    found: dict[str, dict[str, float]] = {}
    for r in results:
        for entrant in r.entries:
            strict, _, tolerance = entrant.partition(WITHIN)
            ratio = r.ratios.get(f"{strict}/{entrant}")
            if tolerance and strict in r.entries:
                found.setdefault(entrant, {})[r.network] = 1.0 if ratio is None else ratio[0]
    return found


def runtimes_of(results: Sequence[SideBySide]) -> list[str]:
    """Return the runtimes in which any network was tried."""
    return list(dict.fromkeys(name for r in results for name in r.runtimes))


def over_best(results: Sequence[SideBySide], runtime: str) -> dict[str, float]:
    """Return, by network, seconds in a runtime / seconds of the fastest search's result."""
    ratios = {r.network: r.ratios.get(f"{runtime}/{best_of(r, runtime)}") for r in results}
    return {network: ratio[0] for network, ratio in ratios.items() if ratio is not None}


def table(results: Sequence[SideBySide], figures: Mapping[str, Any]) -> str:
    """Return Markdown: a table with a row for each network and rows of means, then counts."""
    searches = list(dict.fromkeys(s for r in results for s in r.entries))
    runtimes = runtimes_of(results)
    head = ["network", "strongest jit, ms", "A/A", *searches]
    head += [column for n in runtimes for column in (f"{TITLES[n]}, ms", "/ best")]
    rows = [_row(r, searches, runtimes) for r in results]
    for group, means in figures["means"].items():
        row = [f"geometric mean, {group}", "", "", *(_number(means[s]) for s in searches)]
        rows.append(row + [""] * (len(head) - len(row)))
    for place, name in enumerate(runtimes):  # the last row is for all networks
        rows[-1][4 + len(searches) + 2 * place] = _number(figures["runtime_over_best_mean"][name])
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += [
        "",
        f"taso beats local beyond noise on: {_names(figures['taso_beats_local'])}",
        f"slower than the strongest jit: {_names(figures['slower_than_jit'])}",
    ]
    for entrant, ratios in figures["within_over_strict"].items():
        each = ", ".join(
            f"{r.network} {ratios[r.network]:.2f} (error {r.entries[entrant].error:.1e})"
            for r in results
            if r.network in ratios
        )
        lines.append(
            f"{entrant} over strict: {geometric_mean(ratios.values()):.2f} on average; {each}"
        )
    for name, ratios in figures["runtime_over_best"].items():
        ahead = _names([network for network, ratio in ratios.items() if ratio > 1.0])
        lines.append(f"ahead of {TITLES[name]}: {ahead}")
        if name not in RUNTIMES:
            lines.append(f"errors of {TITLES[name]}: {_errors_in(results, name)}")
    if figures["model_error_median"] is not None:
        share = 100 * figures["model_error_median"]
        lines.append(f"cost model against measured, median error: {share:.0f} %")
    if figures["peak_bytes"] is not None:
        lines.append(f"peak memory of a search: {figures['peak_bytes'] / 2**30:.2f} GiB")
    lines += [
        f"no {TITLES[name]} for {r.network}: {entry.note}"
        for r in results
        for name, entry in r.runtimes.items()
        if entry.note
    ]
    return "\n".join(lines)


def _row(result: SideBySide, searches: Sequence[str], runtimes: Sequence[str]) -> list[str]:
    cells = []
    for s in searches:
        if s not in result.entries:
            cells.append("failed")
            continue
        e = result.entries[s]
        cells.append(f"{_number(e.speedup)} ({_number(e.low)}-{_number(e.high)})")
    for name in runtimes:
        entry = result.runtimes.get(name)
        ratio = result.ratios.get(f"{name}/{best_of(result, name)}")
        seconds = None if entry is None else entry.seconds
        cells += ["-" if seconds is None else _milliseconds(seconds)]
        cells += ["-" if ratio is None else _number(ratio[0])]
    low, high = result.noise
    return [
        result.network,
        _milliseconds(min(result.jits.values())),
        f"{low:.3f}-{high:.3f}",
        *cells,
    ]


def _errors_in(results: Sequence[SideBySide], runtime: str) -> str:
    found = ((r.network, r.runtimes[runtime].error) for r in results if runtime in r.runtimes)
    return ", ".join(f"{network} {error:.1e}" for network, error in found if error is not None)


def _milliseconds(seconds: float) -> str:
    return three_digits(1e3 * seconds)


def _number(value: float) -> str:
    return f"{value:.2f}"


def _names(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "none"


def plot(results: Sequence[SideBySide], path: str | os.PathLike[str]) -> None:
    """Plot speed-ups over the strongest jit as bars: searches, with intervals, and runtimes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    searches = list(dict.fromkeys(s for r in results for s in r.entries))
    runtimes = runtimes_of(results)
    figure = Figure(figsize=(1.2 + 1.1 * len(results), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    width = 0.8 / (len(searches) + len(runtimes))
    for k, s in enumerate(searches):
        there = [(i, r.entries[s]) for i, r in enumerate(results) if s in r.entries]
        axes.bar(
            [i + k * width for i, _ in there],
            [e.speedup for _, e in there],
            width,
            yerr=[[e.speedup - e.low for _, e in there], [e.high - e.speedup for _, e in there]],
            label=s,
        )
    for k, name in enumerate(runtimes, start=len(searches)):
        seconds = [r.runtimes[name].seconds if name in r.runtimes else None for r in results]
        axes.bar(
            [i + k * width for i, s in enumerate(seconds) if s],
            [min(r.jits.values()) / s for r, s in zip(results, seconds, strict=True) if s],
            width,
            label=TITLES[name],
            color=GREYS[(k - len(searches)) % len(GREYS)],
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(results))])
    axes.set_xticklabels([r.network for r in results], rotation=30, ha="right")
    axes.set_ylabel("times as fast as the strongest jax.jit")
    axes.legend()
    figure.savefig(path, dpi=150)
