"""Where the library's package is installed, and the environment in which it is loaded."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "onednn-cpu-gomp"


def packaged() -> list[str]:
    """Return the paths of the library in its package; none if that is not installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [str(Path(str(f.locate())).resolve()) for f in files if f.name == "libdnnl.so.3"]


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set those environment variables that are not set yet, inside the context only."""
    new = {k: v for k, v in values.items() if k not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for k in new:
            del os.environ[k]
