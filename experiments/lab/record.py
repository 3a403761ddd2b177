"""The record of a device: one JSON line for each thing measured, compressed.

A record grows over several runs on machines of one kind. A line has the item's key, what was
measured or the error, the versions it was measured under, and the date.
"""

from __future__ import annotations

import datetime
import gzip
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xrl_jax.runtime.files import atomic_write

WRITE_SECONDS = 20.0  # a run that is cut off loses no more than this


RECORDS = Path(__file__).parents[1] / "records"


def path_of(device_kind: str, folder: Path = RECORDS) -> Path:
    """Return the file of a device's record.

    >>> path_of("NVIDIA H200").name
    'nvidia-h200.jsonl.gz'
    """
    name = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    return folder / f"{name}.jsonl.gz"


class RecordError(ValueError):
    """A record that cannot be read; the message names the file and the line."""


@dataclass
class Record:
    """Lines by (key, versions), read from a file and written back to it.

    Attributes:
      versions: of jax, the driver and the device, under which new lines are measured.
    """

    path: Path
    versions: str
    lines: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    _written: float = field(default_factory=time.monotonic)

    @classmethod
    def opened(cls, path: Path, versions: str) -> Record:
        """Return the record in a file; an empty one if there is no such file.

        Raises:
          RecordError: the file is damaged.
        """
        found = {(v["key"], v["versions"]): v for v in read_lines(path)} if path.is_file() else {}
        return cls(path, versions, found)

    def has(self, key: str) -> bool:
        """Return whether an item was measured under these versions; a failure does not count."""
        return "values" in self.lines.get((key, self.versions), {})

    def add(self, key: str, outcome: Mapping[str, Any]) -> None:
        """Add a line; write the file if that was long ago."""
        today = datetime.date.today().isoformat()
        line = {"key": key, "versions": self.versions, "date": today, **outcome}
        self.lines[key, self.versions] = line
        if time.monotonic() - self._written > WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the file, sorted, so that equal records are equal files."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(self.lines[at]) + "\n" for at in sorted(self.lines))
        with atomic_write(self.path) as file:
            file.write(gzip.compress(text.encode(), mtime=0))
        self._written = time.monotonic()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a record.

    Raises:
      RecordError: the file is damaged.
    """
    try:
        text = gzip.decompress(path.read_bytes()).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} is not a record: {error}") from error
    for n, line in enumerate(text.splitlines(), start=1):
        try:
            values = json.loads(line)
            _ = values["key"], values["versions"]
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path}, line {n}: not a line of a record ({error})") from error
        yield values
