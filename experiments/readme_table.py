"""Fill the table of results in the README from reports.

  python -m experiments.readme_table --out=out --readme=README.md

reads every OUT/*/report.json that `experiments.optimize` wrote and replaces what stands between the
two `results` comments of the README. The numbers are those of the reports, nothing else.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from xrl_jax.report.text import Report

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
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


def filled(readme: str, block: str) -> str:
    """The README with `block` between the markers.

    Raises:
      ValueError: the markers are not there, once each and in order.
    """
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in tail:
        raise ValueError(f"the README needs the lines {BEGIN} and {END}, once each and in order")
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


def define_flags(values: flags.FlagValues) -> None:
    """Add the flags of this command to `values`."""
    for name, default, meaning in (
        ("out", "out", "Folder with one folder of results for each run."),
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
        path.write_text(
            filled(text, results(read_reports(Path(flags.FLAGS.out)))), encoding="utf-8"
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"filled {path}")
    return 0


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
