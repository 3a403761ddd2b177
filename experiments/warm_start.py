"""Benefit of a warm cache folder: the same network optimised cold, and again warm.

  python -m experiments.warm_start --model=bert

Three searches run, each in a process of its own: a long one from an empty cache folder, which shows
what a search can reach; a short one from an empty folder (cold); and a very short one from the
folder that the long one has left (warm). Then all results are timed in turn in one process. The
command prints for each search the seconds before its final check (compiling, measuring and
searching), the number of timings made, of timings read from the store and of candidates, its
speed-up over the strongest jit, and that speed-up relative to the long search's. --out gets
warm_start.json. Ctrl-C ends the running search; its result counts, and the next one begins.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import app, flags
from rich.console import Console
from rich.table import Table

from experiments import children
from experiments.children import search_command
from experiments.side_by_side import SideBySide, WrongResultError, side_by_side
from experiments.targets import from_model, require_network

LONG, COLD, WARM = "long", "cold", "warm"


@dataclass(frozen=True)
class Config:
    """Configuration of the comparison; `seconds` are the budgets, by run."""

    model: str
    search: str
    seconds: Mapping[str, float]
    compare_seconds: float
    seed: int
    out: Path

    def __post_init__(self) -> None:
        require_network(self.model)


def command_of(config: Config, run: str) -> list[str]:
    """Return the command of one search; the warm one uses the cache folder of the long one."""
    cache = config.out / ("cold_cache" if run == COLD else "cache")
    return search_command(
        config.model,
        config.search,
        seconds=config.seconds[run],
        seed=config.seed,
        cache=cache,
        out=config.out / run,
    )


def figures(
    reports: Mapping[str, Mapping[str, Any]], result: SideBySide
) -> dict[str, dict[str, float]]:
    """Return, by run, seconds of the search, counts, speed-up, and its share of the long run's."""
    best = result.entries[LONG].speedup
    return {
        run: {
            **{f"{part}_seconds": report[f"{part}_seconds"] for part in _PARTS},
            "seconds": sum(report[f"{part}_seconds"] for part in _PARTS),
            **{name: report[name] for name in ("measurements", "from_store", "candidates")},
            "speedup": result.entries[run].speedup,
            "share": result.entries[run].speedup / best,
        }
        for run, report in reports.items()
    }


_PARTS = ("compile", "measure", "search")


def table(config: Config, rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the table to print."""
    shown = Table(title=f"{config.model} by {config.search}", title_justify="left")
    for name in ("run", "budget, s", "searched, s", "compiling", "measuring", "searching"):
        shown.add_column(name, justify="right")
    for name in ("measured", "from the store", "candidates", "speed-up", "share of long"):
        shown.add_column(name, justify="right")
    for run, row in rows.items():
        shown.add_row(
            run,
            f"{config.seconds[run]:g}",
            f"{row['seconds']:.1f}",
            *(f"{row[f'{part}_seconds']:.1f}" for part in _PARTS),
            *(f"{row[name]:,.0f}" for name in ("measurements", "from_store", "candidates")),
            f"{row['speedup']:.2f}",
            f"{row['share']:.0%}",
        )
    return shown


def define_flags() -> None:
    flags.DEFINE_string("model", "bert", "Network.")
    flags.DEFINE_string("search", "taso", "Search strategy.")
    flags.DEFINE_float(
        "long_seconds", 300.0, "Seconds of the long search, the standard of comparison."
    )
    flags.DEFINE_float("cold_seconds", 60.0, "Seconds of the search from an empty cache folder.")
    flags.DEFINE_float(
        "warm_seconds", 10.0, "Seconds of the search from the cache folder of the long one."
    )
    flags.DEFINE_float("compare_seconds", 20.0, "Seconds to time the results in turn.")
    flags.DEFINE_integer("seed", 0, "Seed of searches and weights.")
    flags.DEFINE_string("out", "out/warm_start", "Folder of all results; older ones are removed.")


def main(argv: Sequence[str]) -> int:
    """Run the comparison. The exit status is 2 for bad flags, 1 if a search failed."""
    values = flags.FLAGS
    try:
        if len(argv) > 1:
            raise ValueError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
        seconds = {LONG: values.long_seconds, COLD: values.cold_seconds, WARM: values.warm_seconds}
        config = Config(
            values.model,
            values.search,
            seconds,
            values.compare_seconds,
            values.seed,
            Path(values.out),
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for run in (*seconds, "cache", "cold_cache"):
        shutil.rmtree(config.out / run, ignore_errors=True)
    for run in seconds:
        (config.out / run).mkdir(parents=True)
        print(f"{run}: {config.seconds[run]:g} s", file=sys.stderr)
        log = config.out / run / "log.txt"
        if children.run(command_of(config, run), log=log).status:
            print(f"the {run} search failed: see {log}", file=sys.stderr)
            return 1
    folders = {run: config.out / run for run in seconds}
    try:
        result = side_by_side(
            from_model(config.model, seed=config.seed),
            folders,
            seconds=config.compare_seconds,
            seed=config.seed,
        )
    except WrongResultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    reports = {
        run: json.loads((folder / "report.json").read_text(encoding="utf-8"))
        for run, folder in folders.items()
    }
    rows = figures(reports, result)
    Console(width=160).print(table(config, rows))
    path = config.out / "warm_start.json"
    kept = {"runs": rows, "side_by_side": result.as_dict()}
    path.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    print(f"results are in {config.out}")
    return 0


if __name__ == "__main__":
    define_flags()
    app.run(main)
