"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to, which replaces `path` at the end of the block.

    The previous file is kept if the block fails or the process is killed.
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(aside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
