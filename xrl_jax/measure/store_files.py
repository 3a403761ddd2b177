"""Results of searches, kept next to the timing store; a file that fails is never an error."""

from __future__ import annotations

import warnings
from pathlib import Path

from xrl_jax.runtime.files import atomic_write


def read_kept(path: Path) -> str | None:
    """Return the text of a file, or None if it is absent or (with a warning) cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        warnings.warn(f"xrl_jax: {path} cannot be read and is ignored ({error})", stacklevel=3)
        return None


def keep(path: Path, text: str) -> None:
    """Write a text file and, if need be, its folder; a process that is killed leaves the old file
    intact.

    If it cannot be written (a full disk, no permission), nothing is kept, and there is a warning.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text.encode())
    except OSError as error:
        warnings.warn(
            f"xrl_jax: the result is not kept for the next search: {path} cannot be written "
            f"({error.strerror or error})",
            stacklevel=3,
        )
