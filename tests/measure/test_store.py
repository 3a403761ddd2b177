"""The store keeps timings whatever happens to its file, and never raises because of it."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import pytest

from xrl_jax.measure.store import SCHEMA_VERSION, TimingStore, default_cache_dir
from xrl_jax.measure.target import Target
from xrl_jax.measure.timing import Timing

HERE = Target("cpu", "model A", 2, "jax 1", "")
ELSEWHERE = Target("gpu", "model A", 2, "jax 1", "")
ROOT = Path(__file__).resolve().parents[2]
PREAMBLE = """
import sys
from xrl_jax.measure.target import Target
from xrl_jax.measure.store import TimingStore
from xrl_jax.measure.timing import Timing
store = TimingStore(sys.argv[1], target=Target("cpu", "model A", 2, "jax 1", ""))
"""


def timing(seconds: float = 1.0) -> Timing:
    return Timing(seconds, seconds / 2, seconds * 2, repeats=7, hlo_hash="ab", relative=0.5)


def opened(path: Path | None, **options) -> TimingStore:
    return TimingStore(path, target=HERE, **options)


def script(body: str, path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREAMBLE + body, str(path), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_stored_timings_are_found_by_a_later_store(tmp_path):
    path = tmp_path / "new" / "folder" / "timings.sqlite"
    with opened(path) as store:
        store.put({"a": timing(1.0), "b": timing(2.0)})
    with opened(path) as store:
        assert store.get(["a", "b", "c"]) == {"a": timing(1.0), "b": timing(2.0)}


def test_a_failed_timing_keeps_its_reason(tmp_path):
    failed = Timing.without("timeout", "stopped after 3 seconds")
    with opened(tmp_path / "t.sqlite") as store:
        store.put({"a": failed})
        assert store.get(["a"])["a"] == failed


def test_a_later_timing_replaces_the_earlier(tmp_path):
    with opened(tmp_path / "t.sqlite") as store:
        store.put({"a": timing(1.0)})
        store.put({"a": timing(3.0)})
        assert store.get(["a"])["a"].seconds == 3.0


def test_more_keys_than_fit_into_one_statement_are_stored(tmp_path):
    many = {f"{number:04x}": timing(number + 1.0) for number in range(1300)}
    with opened(tmp_path / "t.sqlite") as store:
        store.put(many)
        assert store.get(many) == many


def test_timings_of_another_machine_are_listed_but_not_used(tmp_path):
    path = tmp_path / "t.sqlite"
    with TimingStore(path, target=ELSEWHERE) as store:
        store.put({"a": timing()})
    with opened(path) as store:
        assert store.get(["a"]) == {}
        assert store.items() == [("a", ELSEWHERE, timing())]


@pytest.mark.parametrize("in_file", [True, False])
def test_items_are_sorted_by_key(tmp_path, in_file):
    with opened(tmp_path / "t.sqlite" if in_file else None) as store:
        store.put({"ab1": timing(1.0), "ab0": timing(2.0), "b": timing(3.0)})
        assert [key for key, _, _ in store.items()] == ["ab0", "ab1", "b"]


def test_without_a_path_timings_live_in_memory():
    with opened(None) as store:
        store.put({"a": timing()})
        assert store.in_memory and store.get(["a"]) == {"a": timing()}


def test_a_row_that_cannot_be_read_counts_as_not_timed(tmp_path):
    path = tmp_path / "t.sqlite"
    with opened(path) as store:
        store.put({"a": timing(), "b": timing()})
    connection = sqlite3.connect(path)
    connection.execute("UPDATE timing SET timing = '{\"seconds\":' WHERE key = 'a'")
    connection.commit()
    connection.close()
    with opened(path) as store:
        assert list(store.get(["a", "b"])) == ["b"]


def test_threads_share_a_store(tmp_path):
    with opened(tmp_path / "t.sqlite") as store:

        def work(name: str) -> None:
            for number in range(50):
                store.put({f"{name}{number}": timing()})
                store.get([f"{name}{number}"])

        threads = [threading.Thread(target=work, args=(name,)) for name in "xy"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.items()) == 100


def test_four_processes_create_and_write_one_file_at_once(tmp_path):
    body = """
for number in range(40):
    store.put({f"{sys.argv[2]}-{number}": Timing(1.0, 1.0, 1.0)})
print(store.in_memory)
"""
    writers = [script(body, tmp_path / "t.sqlite", name) for name in "abcd"]
    assert [writer.communicate(timeout=60)[0] for writer in writers] == ["False\n"] * 4
    with opened(tmp_path / "t.sqlite") as store:
        assert len(store.items()) == 160


def test_a_killed_writer_leaves_complete_batches(tmp_path):
    body = """
batch = 0
while True:
    store.put({f"{batch}-{number}": Timing(1.0, 1.0, 1.0) for number in range(200)})
    print(batch, flush=True)
    batch += 1
"""
    writer = script(body, tmp_path / "t.sqlite")
    assert writer.stdout is not None
    acknowledged = [writer.stdout.readline() for _ in range(5)]
    writer.send_signal(signal.SIGKILL)
    rest, _ = writer.communicate()
    acknowledged += rest.splitlines()
    with opened(tmp_path / "t.sqlite") as store:
        keys = [key for key, _, _ in store.items()]
    sizes = {batch: 0 for batch in {key.split("-")[0] for key in keys}}
    for key in keys:
        sizes[key.split("-")[0]] += 1
    assert set(sizes.values()) == {200}
    assert {line.strip() for line in acknowledged} <= set(sizes)
    assert [path.name for path in tmp_path.glob("*corrupt*")] == []


def other_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.commit()
    connection.close()


def cut_database(path: Path) -> None:
    with opened(path) as store:
        store.put({f"{number:04}": timing() for number in range(500)})
    path.write_bytes(path.read_bytes()[:20000])


@pytest.mark.parametrize(
    "spoil",
    [lambda path: path.write_bytes(b"not a database" * 1000), cut_database, other_database],
    ids=["garbage", "cut short", "foreign"],
)
def test_a_file_that_is_not_a_store_is_moved_aside(tmp_path, spoil):
    path = tmp_path / "t.sqlite"
    spoil(path)
    spoiled = path.read_bytes()
    with (
        pytest.warns(RuntimeWarning, match=r"moved to .*t\.sqlite\.corrupt-1"),
        opened(path) as store,
    ):
        store.put({"a": timing()})
        assert not store.in_memory
    assert (tmp_path / "t.sqlite.corrupt-1").read_bytes() == spoiled
    with opened(path) as store:
        assert store.get(["a"]) == {"a": timing()}


def test_files_moved_aside_are_numbered(tmp_path):
    path = tmp_path / "t.sqlite"
    for _ in range(2):
        path.write_bytes(b"garbage" * 500)
        with pytest.warns(RuntimeWarning), opened(path):
            pass
    moved = sorted(path.name for path in tmp_path.glob("*corrupt*"))
    assert moved == ["t.sqlite.corrupt-1", "t.sqlite.corrupt-2"]


def test_damage_found_while_in_use_starts_a_new_file(tmp_path):
    path = tmp_path / "t.sqlite"
    with opened(path) as store:
        store.put({f"{number:05}": timing() for number in range(3000)})
    with opened(path) as store:
        with opened(path) as other:  # a change by another store makes SQLite drop its cached pages
            other.put({"other": timing()})
        size = path.stat().st_size
        with open(path, "r+b") as file:  # all but the header page
            file.seek(4096)
            file.write(b"\xff" * (size - 4096))
        with pytest.warns(RuntimeWarning, match="corrupt-1"):
            assert store.get(["02999"]) == {}
        store.put({"a": timing()})
        assert store.get(["a"]) == {"a": timing()} and not store.in_memory


def test_an_empty_file_is_a_new_store(tmp_path):
    path = tmp_path / "t.sqlite"
    path.touch()
    with opened(path) as store:
        assert not store.in_memory


def test_a_newer_file_is_left_alone(tmp_path):
    path = tmp_path / "t.sqlite"
    opened(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    before = path.read_bytes()
    with (
        pytest.warns(RuntimeWarning, match="newer version of xrl_jax.*memory only"),
        opened(path) as store,
    ):
        store.put({"a": timing()})
        assert store.in_memory and store.get(["a"]) == {"a": timing()}
    assert path.read_bytes() == before


def test_after_waiting_for_a_locked_file_timings_are_kept_in_memory(tmp_path):
    path = tmp_path / "t.sqlite"
    with opened(path, timeout=0.2) as store:
        store.put({"a": timing(1.0)})
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.warns(RuntimeWarning, match="database is locked") as caught:
            store.put({"b": timing(2.0)})
            store.put({"c": timing(3.0)})
        other.close()
        assert len(caught) == 1
        # What was in the file can still be read.
        assert list(store.get(["a", "b", "c"])) == ["a", "b", "c"]
    with opened(path) as store:
        assert list(store.get(["a", "b", "c"])) == ["a"]


def test_if_the_file_is_locked_from_the_start_timings_are_kept_in_memory(tmp_path):
    path = tmp_path / "t.sqlite"
    opened(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.warns(RuntimeWarning, match="locked"), opened(path, timeout=0.2) as store:
        store.put({"a": timing()})
        assert store.in_memory and list(store.get(["a"])) == ["a"]
    other.close()


def test_a_lock_that_is_released_in_time_costs_nothing(tmp_path):
    path = tmp_path / "t.sqlite"
    with opened(path, timeout=20.0) as store:
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
        timer.start()
        store.put({"a": timing()})
        timer.join()
        other.close()
        assert not store.in_memory


@pytest.mark.parametrize("what", ["the folder is a file", "the file is a folder"])
def test_if_the_path_cannot_be_a_file_timings_are_kept_in_memory(tmp_path, what):
    path = tmp_path / "folder" / "t.sqlite"
    if what == "the folder is a file":
        (tmp_path / "folder").touch()
    else:
        path.mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="kept in memory only") as caught, opened(path) as store:
        store.put({"a": timing()})
        assert list(store.get(["a"])) == ["a"]
    assert len(caught) == 1


def test_if_the_folder_cannot_be_written_timings_are_kept_in_memory():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        is_root = os.geteuid() == 0
        if is_root:  # root may write anywhere
            os.seteuid(65534)
        try:
            path = Path(folder) / "t.sqlite"
            with (
                pytest.warns(RuntimeWarning, match="unable to open") as caught,
                opened(path) as store,
            ):
                store.put({"a": timing()})
                assert store.in_memory and list(store.get(["a"])) == ["a"]
            assert len(caught) == 1
        finally:
            if is_root:
                os.seteuid(0)
            os.chmod(folder, 0o755)


def test_if_the_disk_is_full_timings_are_kept_in_memory(tmp_path):
    path = tmp_path / "t.sqlite"
    with opened(path) as store:
        store.put({"a": timing()})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        # SQLite treats a file that may not grow any more as a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                store.put({f"b{number}": timing() for number in range(2000)})
                store.put({"c": timing()})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len(caught) == 1 and "cannot be written any more" in str(caught[0].message)
        assert list(store.get(["a", "b1999", "c"])) == ["a", "b1999", "c"]
    with opened(path) as store:
        assert [key for key, _, _ in store.items()] == ["a"]


def test_the_file_is_plain_json_in_a_table(tmp_path):
    with opened(tmp_path / "t.sqlite") as store:
        store.put({"a": Timing.without("failed", "why")})
    connection = sqlite3.connect(tmp_path / "t.sqlite")
    (text,) = connection.execute("SELECT timing FROM timing").fetchone()
    connection.close()
    assert json.loads(text)["seconds"] is None and json.loads(text)["error"] == "why"


def test_default_cache_dir_follows_the_environment(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/someone")
    monkeypatch.setenv("XRL_JAX_CACHE", "/elsewhere")
    assert default_cache_dir() == Path("/elsewhere")
    monkeypatch.delenv("XRL_JAX_CACHE")
    assert default_cache_dir() == Path("/var/cache/someone/xrl_jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == Path("/home/someone/.cache/xrl_jax")
