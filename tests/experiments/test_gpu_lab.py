"""The lab measures by priority, within a time limit, and goes on where it ended."""

from __future__ import annotations

import gzip
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.gpu_lab import measured
from experiments.lab.items import Item, ordered
from experiments.lab.record import Record, RecordError, read_lines


def item(key: str, seconds: float = 0.0, fails: bool = False) -> Item:
    def measure() -> dict[str, str]:
        if fails:
            raise RuntimeError(f"{key} does not work")
        return {"of": key}

    return Item(key, seconds, measure)


def record(tmp_path: Path) -> Record:
    return Record.opened(tmp_path / "device.jsonl.gz", "jax 1")


def test_items_of_the_queue_come_first_and_the_others_keep_their_order() -> None:
    keys = ["ceiling/copy", "network/bert", "network/vit", "fragment/conv/a"]
    found = ordered([item(k) for k in keys], ["fragment/*", "network/v*"])
    assert [i.key for i in found] == [
        *("fragment/conv/a", "network/vit", "ceiling/copy", "network/bert")
    ]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    first = record(tmp_path)
    first.add("a", {"values": {"us": 1.5}})
    first.write()
    (line,) = read_lines(first.path)
    assert (line["key"], line["versions"], line["values"]) == ("a", "jax 1", {"us": 1.5})
    assert record(tmp_path).has("a")


def test_other_versions_are_measured_beside_the_old_ones(tmp_path: Path) -> None:
    first = record(tmp_path)
    first.add("a", {"values": {}})
    first.write()
    later = Record.opened(first.path, "jax 2")
    assert not later.has("a")
    later.add("a", {"values": {}})
    later.write()
    assert [line["versions"] for line in read_lines(first.path)] == ["jax 1", "jax 2"]


def test_equal_records_are_equal_files(tmp_path: Path) -> None:
    contents = []
    for order in ("ab", "ba"):
        made = Record(tmp_path / order, "jax 1")
        for key in order:
            made.add(key, {"values": {}})
        made.write()
        contents.append(made.path.read_bytes())
    assert contents[0] == contents[1]


def test_what_is_measured_is_left_out_and_what_failed_is_tried_again(tmp_path: Path) -> None:
    kept, end = record(tmp_path), time.monotonic() + 60
    assert measured([item("a"), item("b", fails=True), item("c")], kept, end) == 0
    assert [kept.has(k) for k in "abc"] == [True, False, True]
    assert kept.lines["b", "jax 1"]["error"] == "RuntimeError: b does not work"
    measured([item("a", fails=True), item("b")], record(tmp_path), end)
    assert [record(tmp_path).has(k) for k in "ab"] == [True, True]


def test_an_item_that_would_take_too_long_is_left_for_another_run(tmp_path: Path) -> None:
    kept = record(tmp_path)
    measured([item("long", seconds=100.0), item("short")], kept, time.monotonic() + 10)
    assert [kept.has(k) for k in ("long", "short")] == [False, True]


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    def interrupted() -> dict[str, str]:
        raise KeyboardInterrupt

    wanted = [item("a"), Item("b", 0.0, interrupted), item("c")]
    assert measured(wanted, record(tmp_path), time.monotonic() + 60) == 130
    assert [record(tmp_path).has(k) for k in "abc"] == [True, False, False]


@pytest.mark.parametrize(
    ("text", "compressed", "message"),
    [
        ('{"key": 1}', False, "is not a record"),
        ('{"key": 1}', True, "line 1: not a line of a record"),
    ],
    ids=["not compressed", "without versions"],
)
def test_a_damaged_record_is_named(
    tmp_path: Path, text: str, compressed: bool, message: str
) -> None:
    path = tmp_path / "device.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    with pytest.raises(RecordError, match=f"device.jsonl.gz.*{message}"):
        Record.opened(path, "jax 1")


def test_a_dry_run_measures_something_of_every_kind(tmp_path: Path) -> None:
    kept, queue = tmp_path / "cpu.jsonl.gz", tmp_path / "queue"
    queue.write_text("# first these\nfragment/*/window_max/*\n\nnetwork/*\n")
    command = [sys.executable, "-m", "experiments.gpu_lab", "--dry_run"]
    command += ["--seconds=600", f"--record={kept}", f"--queue={queue}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.index("fragment/") < ended.stderr.index("network/")
    lines = {line["key"]: line for line in read_lines(kept)}
    network = lines["network/squeezenet"]["values"]
    assert not network["failed"]
    assert all(error < 1e-5 for error in network["errors"].values())
    assert {"jit, arguments, options 0", "A/A control"} <= set(network["timings"])
    kinds = {key.partition("/")[0] for key, line in lines.items() if "values" in line}
    assert kinds == {"ceiling", "network", "kernels", "fragment"}


def test_bad_flags_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.gpu_lab", "--networks=bret"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "bret" in ended.stderr
