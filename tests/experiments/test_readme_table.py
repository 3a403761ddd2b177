"""The README's table of results is made of reports, and of nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.benchmark import Config
from experiments.benchmark_table import summary
from experiments.readme_table import benchmark_results, filled, read_reports, results
from tests.experiments.test_benchmark import NET, REPORT
from tests.report.reports import small_report
from xrl_jax.report.text import Report

ROOT = Path(__file__).parents[2]
BLOCK = """\
| network | search | strongest baseline | optimised | speed-up (95 % interval) | A/A noise | \
error / original's |
|---|---|---|---|---|---|---|
| tiny | taso | 8.00 ms | 4.00 ms | 2.00 (1.90 to 2.12) | 0.994 to 1.007 | 2.0 |
| whole | greedy | 8.00 ms | 4.00 ms | 8.00 (1.90 to 2.12) | 0.994 to 1.007 | exact |

Geometric mean of the speed-ups: 4.00.
Measured on Some CPU, 2 threads; jax 0.10.2 jaxlib 0.10.2 cpu.

```sh
python a
python b
```"""


def write(folder: Path, command: str, report: Report) -> None:
    folder.mkdir(parents=True)
    values = {"command": command, **report.as_dict()}
    (folder / "report.json").write_text(json.dumps(values), encoding="utf-8")


def test_table() -> None:
    whole = small_report(name="whole", search="greedy", speedup=8.0, reference_error=0.0)
    assert results([("python a", small_report()), ("python b", whole)]) == BLOCK


def test_reports_are_read_in_order_of_their_folders(tmp_path: Path) -> None:
    write(tmp_path / "b", "second", small_report(name="b"))
    write(tmp_path / "a", "first", small_report(name="a"))
    found = read_reports(tmp_path)
    assert [(command, r.name) for command, r in found] == [("first", "a"), ("second", "b")]


def test_no_reports(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*/report.json in .*: run experiments.optimize"):
        read_reports(tmp_path)


def test_a_damaged_report_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "report.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="report.json is not a report of experiments.optimize"):
        read_reports(tmp_path)


def test_only_the_block_is_replaced() -> None:
    text = "before\n<!-- results:begin -->\nold\n<!-- results:end -->\nafter\n"
    new = "before\n<!-- results:begin -->\nnew\n<!-- results:end -->\nafter\n"
    assert filled(text, "new", "results") == new
    assert filled(new, "new", "results") == new


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "<!-- results:begin -->",
        "<!-- results:end --><!-- results:begin -->",
        "<!-- results:begin --><!-- results:begin --><!-- results:end -->",
    ],
)
def test_markers_must_be_there_once_and_in_order(text: str) -> None:
    with pytest.raises(ValueError, match="the README needs the lines"):
        filled(text, "new", "results")


def test_the_command_fills_a_file(tmp_path: Path) -> None:
    write(tmp_path / "out" / "tiny", "python a", small_report())
    readme = tmp_path / "R.md"
    readme.write_text("<!-- results:begin -->\n<!-- results:end -->\n", encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.readme_table",
            f"--out={tmp_path / 'out'}",
            f"--readme={readme}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"filled {readme}\n"), done.stderr
    assert "| tiny | taso | 8.00 ms |" in readme.read_text(encoding="utf-8")


def test_a_benchmark_is_a_table_with_its_date_machine_and_command(tmp_path: Path) -> None:
    config = Config(("bert",), ("local", "taso"), 30.0, 1.0, 0, False, tmp_path)
    reports = {"bert": {"taso": {**REPORT, "machine": "Some CPU", "versions": "jax 1"}}}
    values = {"networks": [NET.as_dict()], "summary": summary([NET], reports), "reports": reports}
    values |= {"command": config.command(), "date": "2026-11-22"}
    (tmp_path / "benchmark.json").write_text(json.dumps(values), encoding="utf-8")
    lines = benchmark_results(tmp_path).splitlines()
    assert lines[2].startswith("| bert | 10.0 | 0.980-1.030 | 1.25 (1.20-1.30) | 2.00 ")
    assert lines[-4:] == [
        "",
        "```sh",
        "python -m experiments.benchmark --networks=bert --searches=local,taso --budget_seconds=30 "
        "--seed=0 --compare_seconds=1 --norival",
        "```",
    ]
    assert "Measured on 2026-11-22, Some CPU; jax 1." in lines


def test_a_folder_without_a_benchmark_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"benchmark.json is not written by"):
        benchmark_results(tmp_path)
