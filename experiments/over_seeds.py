"""Summary of a benchmark over several seeds: means over the seeds, and whether the last search is
ahead of the best of the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scipy.stats import t as students_t

from experiments.side_by_side import SideBySide


class Mean(NamedTuple):
    """A geometric mean over seeds with its 95 % interval, unbounded for a single seed."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


def mean_over_seeds(ratios: Sequence[float]) -> Mean:
    """Return the geometric mean with an interval, by Student's t for the mean of the logarithms."""
    logs = [math.log(r) for r in ratios]
    middle, n = statistics.fmean(logs), len(logs)
    if n < 2:
        return Mean(math.exp(middle), 0.0, math.inf)
    half = float(students_t.ppf(0.975, n - 1)) * statistics.stdev(logs) / math.sqrt(n)
    return Mean(*(math.exp(v) for v in (middle, middle - half, middle + half)))


class Verdict(NamedTuple):
    """Comparison of the last search with the best of the others on one network.

    Attributes:
      best_other: the other search with the largest mean speed-up.
      ratio: seconds of its result / seconds of the last search's.
    """

    best_other: str
    ratio: Mean

    @property
    def text(self) -> str:
        """The verdict in a word: ahead or behind if the whole interval is, else even."""
        if self.ratio.low > 1.0:
            return "ahead"
        return "behind" if self.ratio.high < 1.0 else "even"


def by_network(of_seeds: Sequence[Sequence[SideBySide]]) -> dict[str, list[SideBySide]]:
    """Return the results of all seeds, for the networks that every seed has."""
    names = [{r.network: r for r in results} for results in of_seeds]
    return {
        name: [of[name] for of in names] for name in names[0] if all(name in of for of in names)
    }


def speedups(results: Sequence[SideBySide]) -> dict[str, Mean]:
    """Return mean speed-ups over the strongest jit, for searches that succeeded with every seed."""
    searches = [s for s in results[0].entries if all(s in r.entries for r in results)]
    return {s: mean_over_seeds([r.entries[s].speedup for r in results]) for s in searches}


def verdict(results: Sequence[SideBySide], search: str) -> Verdict | None:
    """Compare a search with the best of the others; return None if either is missing."""
    means = speedups(results)
    others = {s: m for s, m in means.items() if s != search}
    if not others or search not in means:
        return None
    best_other = max(others, key=lambda s: others[s].value)
    # If both return the original, they are the same program and no ratio was timed.
    same = (1.0, 1.0, 1.0)
    ratios = [r.ratios.get(f"{best_other}/{search}", same)[0] for r in results]
    return Verdict(best_other, mean_over_seeds(ratios))


def summary(of_seeds: Sequence[Sequence[SideBySide]], search: str) -> dict[str, Any]:
    """Return as plain data, by network, the means of all searches and the verdict on `search`."""
    found: dict[str, Any] = {}
    for network, results in by_network(of_seeds).items():
        judged = verdict(results, search)
        found[network] = {
            "speedups": {s: m._asdict() for s, m in speedups(results).items()},
            "verdict": judged and {**judged._asdict(), "text": judged.text},
        }
    return found


def table(of_seeds: Sequence[Sequence[SideBySide]], search: str, notes: Mapping[str, str]) -> str:
    """Return a Markdown table with a row for each network.

    Args:
      notes: remarks on searches, by their names; printed below the table.
    """
    rows = by_network(of_seeds)
    searches = list(dict.fromkeys(s for results in rows.values() for s in speedups(results)))
    head = ["network", *searches, f"best other / {search}", "which", search]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    counts: dict[str, int] = {"ahead": 0, "even": 0, "behind": 0}
    for network, results in rows.items():
        means, judged = speedups(results), verdict(results, search)
        cells = [str(means[s]) if s in means else "failed" for s in searches]
        last = ("-", "-", "-")
        if judged is not None:
            last = (str(judged.ratio), judged.best_other, judged.text)
            counts[judged.text] += 1
        lines.append("| " + " | ".join([network, *cells, *last]) + " |")
    counts_text = ", ".join(f"{n} {text}" for text, n in counts.items())
    lines += ["", f"{search} against the best other search, {len(of_seeds)} seeds: {counts_text}"]
    lines += [f"{name}: {note}" for name, note in notes.items()]
    return "\n".join(lines)
