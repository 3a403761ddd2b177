"""The command that extracts from files."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

from tests.egraph.extraction.test_extraction import GIVEN


def command(*more: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "experiments.extract", *more]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_files_are_a_row_each_compressed_or_not(tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_text(json.dumps(GIVEN))
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(json.dumps(GIVEN).encode()))
    ended = command(*map(str, sorted(tmp_path.iterdir())), "--seconds=5")
    rows = [line.split(" | ")[:9] for line in ended.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["| packed", "| plain"]
    assert rows[0][1:9] == ["2", "2", "3", "3", "3", "3", "3", "optimal"]
    assert ended.returncode == 0


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("[]")
    ended = command(str(tmp_path / "bad.json"), str(tmp_path / "none.json"))
    assert ended.returncode == 1
    assert "bad.json: not an e-graph of extraction-gym" in ended.stderr
    assert "none.json: [Errno 2] No such file" in ended.stderr
    assert command().returncode == 2
