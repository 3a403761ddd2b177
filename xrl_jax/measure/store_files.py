"""Results of searches, kept beside the timing store; never a reason to fail."""

from __future__ import annotations

import warnings
from pathlib import Path

from xrl_jax.runtime.files import replacing


def read_kept(path: Path) -> str | None:
    """The text; None where there is no such file, or none that can be read, which is said."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        warnings.warn(f"xrl_jax: {path} cannot be read and is ignored ({error})", stacklevel=3)
        return None


def keep(path: Path, text: str) -> None:
    """Write the file, its folder with it; a process that is killed leaves the old one. Where it
    cannot be written (a full disk, no permission), that is said, and nothing is kept.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        warnings.warn(
            f"xrl_jax: the result is not kept for the next search: {path} cannot be written "
            f"({error.strerror or error})",
            stacklevel=3,
        )
