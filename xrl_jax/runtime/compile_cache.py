"""JAX's persistent compilation cache during a search.

With it, the engine is compiled once per machine and version.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

COMPILED = "compiled"  # name of its folder within a cache folder or a results folder

_FOLDER = "jax_compilation_cache_dir"
_SETTINGS: dict[str, Any] = {
    # On a GPU, XLA's own caches would lie in the folder and make its path part of JAX's cache key.
    "jax_persistent_cache_enable_xla_caches": "none",
    # Programs that compile quickly add up to a tenth of a search's first minute.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
}

_LOCK = threading.Lock()
_users = 0
_before: dict[str, Any] = {}  # the settings before the first user entered


@contextlib.contextmanager
def persistent_cache(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Cache compiled programs in `folder` inside this context, unless the user has set a cache.

    Several threads may be inside at once; the configuration is restored when the last one leaves.
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
    """Return the folder of JAX's persistent cache, whoever has set it; None if there is none."""
    return getattr(jax.config, _FOLDER) or None


def _configure(settings: dict[str, Any]) -> dict[str, Any]:
    """Apply these settings and return the previous ones."""
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    return before
