"""Archives: files of named parts that are safe to open, written atomically and checked when read.

An archive is a zip without compression: `header.json` (the format number, and size and SHA-256 of
every other part) and the parts. This module never runs or unpickles anything in it, unpacks nothing
to disk, and reads no part that the header does not name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xrl_jax.runtime.files import atomic_write

HEADER = "header.json"
_MAX_HEADER = 1 << 26  # bytes
_EPOCH = (1980, 1, 1, 0, 0, 0)  # fixed, so that the same parts give the same file
# The errors that zipfile raises on damaged files.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    RuntimeError,
    NotImplementedError,
    ValueError,
    EOFError,
    OverflowError,
)


class LoadError(ValueError):
    """A file that cannot be loaded; the message names it and says why."""


def write_archive(
    path: str | os.PathLike[str], number: int, header: Mapping[str, Any], parts: Mapping[str, bytes]
) -> None:
    """Write header and parts to `path`, replacing an existing file.

    Args:
      number: the number of the format; readers refuse any other.
      header: plain JSON values; "format" and "parts" are added here.
      parts: content by name.

    Raises:
      OSError: the folder is missing, the disk is full, ...; an existing file at `path` is left
        intact.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, "cannot save: there is no such folder", str(path.parent)
        )
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "cannot save: this is a folder", str(path))
    listing = {n: [len(data), hashlib.sha256(data).hexdigest()] for n, data in parts.items()}
    head = {"format": number, **header, "parts": listing}
    text = json.dumps(head, indent=1, allow_nan=False).encode()
    try:
        with atomic_write(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for name, data in {HEADER: text, **parts}.items():
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), data)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            size = sum(map(len, parts.values())) / 1e6
            reason = f"cannot save: the disk is full ({size:.1f} MB are needed)"
            raise OSError(error.errno, reason, str(path)) from error
        raise


def read_archive(
    path: str | os.PathLike[str], known: int
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the header and parts of a file that `write_archive` wrote.

    Args:
      known: the number of the format; files of another one are refused.

    Raises:
      LoadError: the file is damaged, of another kind or of another format.
      OSError: it is missing or cannot be read.
    """
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                header = _read_header(path, archive, known)
                return header, _read_parts(path, archive, header["parts"])
        except LoadError:
            raise
        except (OSError, *_ZIP_ERRORS) as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise  # the disk's fault; a wrong offset in a damaged file gives EINVAL
            raise LoadError(f"{path} is damaged or not a saved function: {error}") from error


def _read_header(
    path: str | os.PathLike[str], archive: zipfile.ZipFile, known: int
) -> dict[str, Any]:
    if HEADER not in archive.namelist():
        raise LoadError(f"{path} is not a saved function: it has no {HEADER}")
    if archive.getinfo(HEADER).file_size > _MAX_HEADER:
        raise LoadError(f"{path} is damaged: its {HEADER} has more than {_MAX_HEADER} bytes")
    try:
        header = json.loads(_read(path, archive, HEADER))
    except RecursionError as error:
        raise LoadError(f"{path} is damaged: its {HEADER} is nested too deeply") from error
    number = header.get("format") if isinstance(header, dict) else None
    if not isinstance(number, int):
        raise LoadError(f"{path} is not a saved function: its {HEADER} states no format")
    if number != known:
        raise LoadError(
            f"{path} has format {number}, but this version of xrl_jax reads {known}: the file was "
            f"written by {header.get('written_by', 'another version')}; use that version or "
            "optimise again"
        )
    return header


def _read_parts(
    path: str | os.PathLike[str], archive: zipfile.ZipFile, listing: Any
) -> dict[str, bytes]:
    if not isinstance(listing, dict):
        raise LoadError(f"{path} is damaged: its {HEADER} lists no parts")
    names = archive.namelist()
    if sorted(names) != sorted([HEADER, *listing]):
        wrong = sorted({HEADER, *listing} ^ set(names)) or "a part occurs twice"
        raise LoadError(f"{path} is damaged: its parts differ from those in its {HEADER}: {wrong}")
    parts: dict[str, bytes] = {}
    for name, entry in listing.items():
        if archive.getinfo(name).file_size != entry[0]:
            raise LoadError(f"{path} is damaged: {name} does not have the stated size")
        parts[name] = _read(path, archive, name)
        if hashlib.sha256(parts[name]).hexdigest() != entry[1]:
            raise LoadError(f"{path} is damaged: {name} does not have the stated checksum")
    return parts


def _read(path: str | os.PathLike[str], archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a part; compressed ones, which could be far larger than the file, are refused."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise LoadError(f"{path} is damaged or was repacked: {name} is compressed")
    return archive.read(name)
