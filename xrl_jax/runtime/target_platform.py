"""The platform that code is made for, which need not be the one that it is made on."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_PLATFORM: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)
_FOR_EXPORT = {"gpu": "cuda"}  # names that JAX uses for exports, where they differ


def target_platform() -> str:
    """Return JAX's name of the platform that code is made for: "cpu", "gpu" or "tpu"."""
    return _PLATFORM.get() or jax.default_backend()


def export_platform() -> str:
    """Return the same platform by the name that `jax.export` uses."""
    return _FOR_EXPORT.get(target_platform(), target_platform())


@contextlib.contextmanager
def making_for(platform: str) -> Iterator[None]:
    """Make code for a platform inside this context; by default it is made for JAX's default."""
    token = _PLATFORM.set(platform)
    try:
        yield
    finally:
        _PLATFORM.reset(token)
