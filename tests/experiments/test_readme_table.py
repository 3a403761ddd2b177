"""The README's table of results is made from the files of a benchmark only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.benchmark import Config
from experiments.benchmark_table import summary
from experiments.readme_table import benchmark_results, filled
from tests.experiments.test_benchmark import NET, REPORT

ROOT = Path(__file__).parents[2]


def test_only_the_marked_block_is_replaced() -> None:
    text = "before\n<!-- benchmark:begin -->\nold\n<!-- benchmark:end -->\nafter\n"
    new = "before\n<!-- benchmark:begin -->\nnew\n<!-- benchmark:end -->\nafter\n"
    assert filled(text, "new") == new
    assert filled(new, "new") == new


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "<!-- benchmark:begin -->",
        "<!-- benchmark:end --><!-- benchmark:begin -->",
        "<!-- benchmark:begin --><!-- benchmark:begin --><!-- benchmark:end -->",
    ],
)
def test_markers_must_be_there_once_and_in_order(text: str) -> None:
    with pytest.raises(ValueError, match="the README needs the lines"):
        filled(text, "new")


def written(folder: Path) -> None:
    """Write the folder of a benchmark of one network."""
    config = Config(("bert",), ("local", "taso"), 30.0, 1.0, 0, (), folder)
    reports = {"bert": {"taso": {**REPORT, "machine": "Some CPU", "versions": "jax 1"}}}
    values = {"networks": [NET.as_dict()], "summary": summary([NET], reports), "reports": reports}
    values |= {"command": config.command(), "date": "2026-11-22"}
    (folder / "benchmark.json").write_text(json.dumps(values), encoding="utf-8")


def test_the_command_fills_a_file(tmp_path: Path) -> None:
    written(tmp_path)
    readme = tmp_path / "R.md"
    readme.write_text("<!-- benchmark:begin -->\n<!-- benchmark:end -->\n", encoding="utf-8")
    flags = [f"--benchmark={tmp_path}", f"--readme={readme}"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.readme_table", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"filled {readme}\n"), done.stderr
    assert "| bert | 10.0 |" in readme.read_text(encoding="utf-8")


def test_a_benchmark_is_a_table_with_its_date_machine_and_command(tmp_path: Path) -> None:
    written(tmp_path)
    lines = benchmark_results(tmp_path).splitlines()
    assert lines[2].startswith("| bert | 10.0 | 0.980-1.030 | 1.25 (1.20-1.30) | 2.00 ")
    assert lines[-4:] == [
        "",
        "```sh",
        "python -m experiments.benchmark --networks=bert --searches=local,taso --budget_seconds=30 "
        "--seed=0 --compare_seconds=1 --runtimes=",
        "```",
    ]
    assert "Measured on 2026-11-22, Some CPU; jax 1." in lines


def test_a_folder_without_a_benchmark_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"benchmark.json was not written by"):
        benchmark_results(tmp_path)
