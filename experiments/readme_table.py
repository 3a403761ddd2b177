"""Fill the table of results in the README.

  python -m experiments.readme_table --benchmark=out/benchmark --readme=README.md

replaces the text between the two `benchmark` comments of the README with the results that
`experiments.benchmark` wrote. All numbers are those of its reports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from experiments.benchmark_table import table
from experiments.side_by_side import SideBySide

_BEGIN, _END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"


def benchmark_results(folder: Path) -> str:
    """Return the README block of a benchmark: its table, date, machine and command.

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
        raise ValueError(f"{path} was not written by experiments.benchmark: {error}") from error
    lines = [table(networks, values["summary"]), ""]
    machines = sorted({f"{r['machine']}; {r['versions']}" for r in reports})
    lines += [f"Measured on {date}, {machine}." for machine in machines]
    return "\n".join([*lines, "", "```sh", command, "```"])


def filled(readme: str, block: str) -> str:
    """Return the README with `block` between the two comments.

    Raises:
      ValueError: the comments are not there, once each and in order.
    """
    head, begin, rest = readme.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not (begin and end) or _BEGIN in rest or _END in tail:
        raise ValueError(f"the README needs the lines {_BEGIN} and {_END}, once each and in order")
    return f"{head}{_BEGIN}\n{block}\n{_END}{tail}"


def define_flags(values: flags.FlagValues) -> None:
    """Add the flags of this command to `values`."""
    for name, default, meaning in (
        ("benchmark", "out/benchmark", "Folder that experiments.benchmark wrote."),
        ("readme", "README.md", "File to fill."),
    ):
        flags.DEFINE_string(name, default, meaning, flag_values=values)


def main(argv: Sequence[str]) -> int:
    """Fill the file; the exit status is 2 if that cannot be done."""
    try:
        if len(argv) > 1:
            raise ValueError(f"unexpected argument {argv[1]!r}: flags are written --name=value")
        path = Path(flags.FLAGS.readme)
        block = benchmark_results(Path(flags.FLAGS.benchmark))
        path.write_text(filled(path.read_text(encoding="utf-8"), block), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"filled {path}")
    return 0


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
