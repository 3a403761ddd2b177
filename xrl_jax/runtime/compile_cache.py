"""JAX's persistent compilation cache for the time of a search, so that the engine is compiled once
per machine and version.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

COMPILED = "compiled"  # its folder within a cache folder, or within one of results

_FOLDER = "jax_compilation_cache_dir"
_SETTINGS: dict[str, Any] = {
    # XLA's own caches on a GPU lie in the folder, and by its path JAX told apart what is compiled.
    "jax_persistent_cache_enable_xla_caches": "none",
    # What takes little to compile is much in all: of a search's first minute a tenth.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
}

_LOCK = threading.Lock()
_users = 0
_before: dict[str, Any] = {}  # what was set before the first user came


@contextlib.contextmanager
def persistent_cache(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keep what is compiled in `folder`, unless the user has set a cache already; restores the
    configuration at the end.

    Several threads may be inside at once; the configuration goes back when the last one leaves.
    """
    global _users, _before
    with _LOCK:
        if _users == 0 and getattr(jax.config, _FOLDER):
            ours = False
        else:
            ours = True
            _users += 1
            if _users == 1:
                _before = _configure({_FOLDER: os.fspath(folder), **_SETTINGS})
    try:
        yield
    finally:
        if ours:
            with _LOCK:
                _users -= 1
                if _users == 0:
                    _configure(_before)


def cache_folder() -> str | None:
    """Of JAX's persistent cache, ours or the user's; None where there is none."""
    return getattr(jax.config, _FOLDER) or None


def _configure(settings: dict[str, Any]) -> dict[str, Any]:
    """Set these; what was set before."""
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    return before
