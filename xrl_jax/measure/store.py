"""One SQLite file with every timing taken on this target, shared by threads and processes.

A store never raises because of its file; measuring goes on without it. A damaged or foreign file is
moved aside and a new one begun; if a file is locked, read-only, on a full disk or from a newer
version, timings are kept in memory. Each of these causes one warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import sqlite3
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xrl_jax.measure.target import Target, target_here
from xrl_jax.measure.timing import Timing

SCHEMA_VERSION = 1
APPLICATION_ID = (
    0x58524C4A  # "XRLJ" in the file's header distinguishes timing stores from other SQLite files
)
_TABLE = """
CREATE TABLE timing (
    key TEXT NOT NULL, device TEXT NOT NULL, cpu TEXT NOT NULL, threads INTEGER NOT NULL,
    versions TEXT NOT NULL, flags TEXT NOT NULL, written REAL NOT NULL, timing TEXT NOT NULL,
    PRIMARY KEY (key, device, cpu, threads, versions, flags)
) WITHOUT ROWID
"""
_DAMAGED = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


STORE_FILE = "timings.sqlite"  # in the cache folder


def default_cache_dir() -> Path:
    """Return $XRL_JAX_CACHE, or $XDG_CACHE_HOME/xrl_jax, or ~/.cache/xrl_jax. Creates nothing."""
    own = os.environ.get("XRL_JAX_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared and os.path.isabs(shared):  # the XDG specification: relative paths are to be ignored
        return Path(shared) / "xrl_jax"
    try:
        return Path.home() / ".cache" / "xrl_jax"
    except RuntimeError:  # a user without a home directory, as in some containers
        return Path(tempfile.gettempdir()) / f"xrl_jax-{os.getuid()}"


class TimingStore:
    """Timings by (timing key, target). `path` None keeps them in memory.

    Thread-safe; any number of processes may share the file, and one that is killed while writing
    leaves it intact. `timeout` is how many seconds to wait for another process's lock. `target`
    defaults to that of this process.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        target: Target | None = None,
        timeout: float = 10.0,
    ):
        self._target = target
        self._timeout = timeout
        self._lock = threading.RLock()
        self._memory: dict[tuple[str, Target], Timing] = {}  # not written to the file
        self._connection: sqlite3.Connection | None = None
        self._writable = False
        self._identity: tuple[int, int] | None = None  # (device, inode) of the opened file
        self._path = None if path is None else Path(path).absolute()
        if self._path is not None:
            self._open(self._path)

    @property
    def path(self) -> Path | None:
        return self._path

    @property
    def in_memory(self) -> bool:
        """Whether new timings are kept in memory only."""
        return not self._writable

    @property
    def target(self) -> Target:
        if self._target is None:
            self._target = target_here()
        return self._target

    def get(self, keys: Iterable[str]) -> dict[str, Timing]:
        """Return the timings of those `keys` that were timed on this target."""
        wanted = list(dict.fromkeys(keys))
        target = self.target
        found: dict[str, Timing] = {}
        with self._lock:
            for start in range(0, len(wanted), 500):  # SQLite bounds the parameters of a statement
                part = wanted[start : start + 500]
                where = f"key IN ({','.join('?' * len(part))}) AND {_SAME_TARGET}"
                rows = self._select(where, [*part, *_columns(target)])
                found.update({key: timing for _, key, timing in rows})
            for key in wanted:
                if (key, target) in self._memory:
                    found[key] = self._memory[key, target]
        return found

    def put(self, timings: Mapping[str, Timing]) -> None:
        """Write all of `timings` for this target, or none; a later timing of a key replaces the
        earlier.
        """
        if not timings:
            return
        target = self.target
        with self._lock:
            if not self._write(target, timings):
                self._memory.update({(key, target): timing for key, timing in timings.items()})

    def items(self) -> list[tuple[str, Target, Timing]]:
        """Return every (key, target, timing), of any target, sorted by key."""
        with self._lock:
            found = {(key, target): timing for target, key, timing in self._select("TRUE", [])}
            found |= self._memory
        ordered = sorted(found.items(), key=lambda item: (item[0][0], _columns(item[0][1])))
        return [(key, target, timing) for (key, target), timing in ordered]

    def close(self) -> None:
        """Close the file; if it is used again, the store goes on in memory."""
        with self._lock:
            self._give_up_file()

    def __enter__(self) -> TimingStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The file ------------------------------------------------------------------------------------

    def _open(self, path: Path) -> None:
        for attempt in range(3):  # another process may replace a file by a damaged one
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._identity = _identity(path)
                self._connection = _connect(path, self._timeout)
                self._identity = _identity(path)
                self._writable = True
                return
            except _NewerSchemaError as error:
                self._warn(
                    f"is from a newer version of xrl_jax (schema {error}) and left unchanged"
                )
                return
            except (_UnusableFileError, sqlite3.Error, OSError) as error:
                damaged = isinstance(error, _UnusableFileError) or _code(error) in _DAMAGED
                if not (damaged and attempt < 2 and self._move_aside(error)):
                    self._warn(f"cannot be used ({_reason(error)})")
                    return

    def _move_aside(self, error: Exception) -> bool:
        """Rename the file and its journal to NAME.corrupt-N, with a warning. Returns False if it
        cannot be renamed.
        """
        assert self._path is not None
        self._give_up_file()
        if _identity(self._path) != self._identity:
            return True  # another process has moved it and begun a new one
        names = (f"{self._path.name}.corrupt-{number}" for number in itertools.count(1))
        aside = next(path for path in map(self._path.with_name, names) if not path.exists())
        try:
            os.rename(self._path, aside)
            for suffix in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{self._path}{suffix}", f"{aside}{suffix}")
        except OSError:
            return False
        _warn(
            f"the timing store {self._path} is not usable ({_reason(error)}); "
            f"it was moved to {aside}, and a new one is created"
        )
        return True

    def _give_up_file(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
        self._connection, self._writable = None, False

    def _warn(self, what: str) -> None:
        _warn(f"the timing store {self._path} {what}; timings are kept in memory only")

    def _failed(self, error: sqlite3.Error, *, writing: bool) -> bool:
        """Handle an error of an open file; return whether to try again (with a new file)."""
        if _code(error) in _DAMAGED:
            assert self._path is not None
            if self._move_aside(error):
                self._open(self._path)
                return self._writable
        if writing:
            self._writable = False  # the file can still be read
        else:
            self._give_up_file()
        self._warn(f"cannot be {'written' if writing else 'read'} any more ({_reason(error)})")
        return False

    def _select(self, where: str, parameters: list[Any]) -> list[tuple[Target, str, Timing]]:
        if self._connection is None:
            return []
        columns = "device, cpu, threads, versions, flags, key, timing"
        statement = f"SELECT {columns} FROM timing WHERE {where}"
        try:
            rows = self._connection.execute(statement, parameters).fetchall()
        except sqlite3.Error as error:
            self._failed(error, writing=False)
            return []
        found = []
        for *target, key, text in rows:
            # A row that cannot be read counts as not timed, so that it is timed again.
            with contextlib.suppress(ValueError):
                found.append((Target(*target), key, Timing.from_dict(json.loads(text))))
        return found

    def _write(self, target: Target, timings: Mapping[str, Timing]) -> bool:
        now = time.time()
        rows = [
            (key, *_columns(target), now, json.dumps(timing.as_dict()))
            for key, timing in timings.items()
        ]
        for _ in range(2):
            if self._connection is None or not self._writable:
                return False
            try:
                with _transaction(self._connection):
                    self._connection.executemany(
                        "INSERT OR REPLACE INTO timing VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows
                    )
                return True
            except sqlite3.Error as error:
                if not self._failed(error, writing=True):
                    return False
        return False


class _NewerSchemaError(Exception):
    """The file's schema is of a newer version of xrl_jax."""


class _UnusableFileError(Exception):
    """The file is a database of another program, or its pages are damaged."""


_SAME_TARGET = "device = ? AND cpu = ? AND threads = ? AND versions = ? AND flags = ?"


def _columns(target: Target) -> tuple[Any, ...]:
    return dataclasses.astuple(target)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _connect(path: Path, timeout: float) -> sqlite3.Connection:
    """Open or create the database.

    SQLite's own waiting does not cover the switch to the write-ahead log, which several processes
    may try at once on a new file; hence the loop around it.
    """
    deadline = time.monotonic() + timeout
    while True:
        connection = sqlite3.connect(
            path, timeout=timeout, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(connection)
            return connection
        except BaseException as error:
            connection.close()
            if _code(error) not in _LOCKED or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _prepare(connection: sqlite3.Connection) -> None:
    def value(pragma: str) -> Any:
        return connection.execute(f"PRAGMA {pragma}").fetchone()[0]

    if value("user_version") > SCHEMA_VERSION and value("application_id") == APPLICATION_ID:
        raise _NewerSchemaError(value("user_version"))
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if not empty and value("application_id") != APPLICATION_ID:
        raise _UnusableFileError("it is a database of another program")
    # The write-ahead log allows readers beside one writer, and ignores a killed writer's remains.
    value("journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    if empty:
        with _transaction(connection):
            if value("user_version") == 0:  # no other process was first
                connection.execute(_TABLE)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    if value("quick_check(1)") != "ok":
        raise _UnusableFileError("its pages are damaged")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # SQLite may have rolled back already, for example where the disk is full.
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _code(error: BaseException) -> int:
    """Return SQLite's primary result code of an error, or -1 if it has none."""
    code = getattr(error, "sqlite_errorcode", None)
    return -1 if code is None else code & 0xFF


def _reason(error: BaseException) -> str:
    name = getattr(error, "sqlite_errorname", "")
    return f"{error}" + (f", {name}" if name else "")


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
