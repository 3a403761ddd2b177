"""Fill the tables of results in the README.

  python -m experiments.readme_table --out=out --readme=README.md

reads every OUT/*/report.json that `experiments.optimize` wrote and replaces what stands between the
two `results` comments of the README.

  python -m experiments.readme_table --benchmark=out/benchmark --readme=README.md

does the same between the two `benchmark` comments with what `experiments.benchmark` wrote. The
numbers are those of the reports, nothing else.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from experiments.benchmark_table import table
from experiments.side_by_side import SideBySide
from xrl_jax.report.text import Report

_HEAD = (
    "| network | search | strongest baseline | optimised | speed-up (95 % interval) | A/A noise |"
    " error / original's |\n|---|---|---|---|---|---|---|"
)


def read_reports(folder: Path) -> list[tuple[str, Report]]:
    """(command, report) of every `*/report.json` in `folder`, in order of their folders' names.

    Raises:
      ValueError: there are none, or a file is no report; the message names it.
    """
    paths = sorted(folder.glob("*/report.json"))
    if not paths:
        raise ValueError(f"no */report.json in {folder}: run experiments.optimize with --out first")
    found = []
    for path in paths:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found.append((str(values["command"]), Report.from_dict(values)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a report of experiments.optimize: {error}") from error
    return found


def results(reports: Sequence[tuple[str, Report]]) -> str:
    """The block of the README: a table, the geometric mean, machines and commands."""
    rows = [_row(report) for _, report in reports]
    mean = math.exp(sum(math.log(r.speedup) for _, r in reports) / len(reports))
    machines = sorted({f"{r.machine}; {r.versions}" for _, r in reports})
    commands = [command for command, _ in reports]
    return "\n".join(
        [
            _HEAD,
            *rows,
            "",
            f"Geometric mean of the speed-ups: {mean:.2f}.",
            *(f"Measured on {machine}." for machine in machines),
            "",
            "```sh",
            *commands,
            "```",
        ]
    )


def _row(r: Report) -> str:
    (low, high), (noise_low, noise_high) = r.interval, r.noise_interval
    noise = f"{noise_low:.3f} to {noise_high:.3f}"
    ratio = f"{r.max_error / r.reference_error:.1f}" if r.reference_error > 0 else "exact"
    return (
        f"| {r.name} | {r.search} | {r.baseline_ms:.2f} ms | {r.optimized_ms:.2f} ms | "
        f"{r.speedup:.2f} ({low:.2f} to {high:.2f}) | {noise} | {ratio} |"
    )


def benchmark_results(folder: Path) -> str:
    """The block of a benchmark: its table, date, machine and command.

    Raises:
      ValueError: the folder has no results of experiments.benchmark.
    """
    path = folder / "benchmark.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        networks = [SideBySide.from_dict(n) for n in values["networks"]]
        command, date = values["command"], values["date"]
        reports = [r for of in values["reports"].values() for r in of.values()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not written by experiments.benchmark: {error}") from error
    lines = [table(networks, values["summary"]), ""]
    machines = sorted({f"{r['machine']}; {r['versions']}" for r in reports})
    lines += [f"Measured on {date}, {machine}." for machine in machines]
    return "\n".join([*lines, "", "```sh", command, "```"])


def filled(readme: str, block: str, name: str) -> str:
    """The README with `block` between the comments of this name.

    Raises:
      ValueError: they are not there, once each and in order.
    """
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, begin, rest = readme.partition(first)
    _, end, tail = rest.partition(last)
    if not (begin and end) or first in rest or last in tail:
        raise ValueError(f"the README needs the lines {first} and {last}, once each and in order")
    return f"{head}{first}\n{block}\n{last}{tail}"


def define_flags(values: flags.FlagValues) -> None:
    """Add the flags of this command to `values`."""
    for name, default, meaning in (
        ("out", "out", "Folder with one folder of results for each run."),
        ("benchmark", "", "Folder of a benchmark; fills that table instead."),
        ("readme", "README.md", "File to fill."),
    ):
        flags.DEFINE_string(name, default, meaning, flag_values=values)


def main(argv: Sequence[str]) -> int:
    """Fill the file; the exit status is 2 where that cannot be done."""
    try:
        if len(argv) > 1:
            raise ValueError(f"{argv[1]!r} is no flag: flags are written --name=value")
        path = Path(flags.FLAGS.readme)
        text = path.read_text(encoding="utf-8")
        if flags.FLAGS.benchmark:
            text = filled(text, benchmark_results(Path(flags.FLAGS.benchmark)), "benchmark")
        else:
            text = filled(text, results(read_reports(Path(flags.FLAGS.out))), "results")
        path.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"filled {path}")
    return 0


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
