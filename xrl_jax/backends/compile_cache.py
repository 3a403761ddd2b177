"""JAX's persistent compilation cache for the time of a search, so that the engine is compiled once
per machine and version.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

COMPILED = "compiled"  # its folder within a cache folder, or within one of results

_LOCK = threading.Lock()
_SETTING = "jax_compilation_cache_dir"
_users = 0


@contextlib.contextmanager
def persistent_cache(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keep what is compiled in `folder`, unless the user has set a cache already; restores the
    configuration at the end.

    Several threads may be inside at once; the configuration goes back when the last one leaves.
    """
    global _users
    with _LOCK:
        if _users == 0 and getattr(jax.config, _SETTING):
            ours = False
        else:
            ours = True
            _users += 1
            if _users == 1:
                jax.config.update(_SETTING, os.fspath(folder))
                compilation_cache.reset_cache()
    try:
        yield
    finally:
        if ours:
            with _LOCK:
                _users -= 1
                if _users == 0:
                    jax.config.update(_SETTING, None)
                    compilation_cache.reset_cache()
