"""The available libraries: packages beside this file, and libraries of other distributions.

Another distribution adds a library through an entry point in the group `xrl_jax.libraries` that
refers to the library object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import jax
from jax import export

import xrl_jax.libraries
from xrl_jax.libraries.base import Calls, CustomCall, Library
from xrl_jax.runtime.target_platform import export_platform, target_platform

GROUP = "xrl_jax.libraries"
_FIRST = "xla"  # it has the plain lowerings


class LibraryError(ValueError):
    """A library that cannot be used; the message names it."""


@functools.cache
def libraries() -> tuple[Library, ...]:
    """Return all libraries, whether or not their kernels are installed: XLA first, then the other
    packages by name, then the libraries of other distributions.

    Raises:
      LibraryError: a library cannot be imported, or two have the same name.
    """
    own = [m.name for m in pkgutil.iter_modules(xrl_jax.libraries.__path__) if m.ispkg]
    found: list[Library] = [
        import_module(f"xrl_jax.libraries.{name}.library").LIBRARY
        for name in sorted(own, key=lambda name: (name != _FIRST, name))
    ]
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        try:
            found.append(entry.load())
        except Exception as error:
            raise LibraryError(
                f"the library {entry.name!r} ({entry.value}) cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
    names = [lib.name for lib in found]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise LibraryError(f"two libraries have the name {twice[0]!r}")
    return tuple(found)


def by_name(name: str) -> Library:
    """Return the library of this name.

    Raises:
      LibraryError: there is no library of this name.
    """
    for lib in libraries():
        if lib.name == name:
            return lib
    known = ", ".join(lib.name for lib in libraries())
    raise LibraryError(f"there is no library {name!r} here (available: {known})")


def is_for(lib: Library, platform: str) -> bool:
    """Return whether a library has kernels for a JAX platform."""
    return not lib.platforms or platform in lib.platforms


def calling(platform: str) -> Library | None:
    """Return the library whose kernels share calls on a platform; None if there is none.

    If there are several it is the first, because the cost model supports one at a time.
    """
    found = (lib for lib in libraries() if is_for(lib, platform))
    return next((lib for lib in found if lib.calls() is not None), None)


def calls() -> Calls | None:
    """Return the `Calls` of the library that `calling` returns for the platform that code is made
    for, if any.
    """
    lib = calling(target_platform())
    return lib.calls() if lib is not None else None


def versions() -> str:
    """Return the versions of all available libraries that have kernels for the platform that code
    is made for, for the keys of timings.
    """
    platform = target_platform()
    return " ".join(v for lib in libraries() if is_for(lib, platform) and (v := lib.version()))


def partitioned(closed: Any, known: Sequence[bool]) -> Any:
    """Return the closed jaxpr with its kernels merged into calls; see `Calls.partitioned`."""
    lib_calls = calls()
    return closed if lib_calls is None else lib_calls.partitioned(closed, known)


def exported(fn: Callable[..., Any], *avals: Any) -> export.Exported:
    """Return the `jax.export` of a function that may contain library kernels, for whose custom
    calls JAX does not guarantee that exported modules stay valid.
    """
    compiled, lib_calls = jax.jit(fn), calls()
    platforms = (export_platform(),)
    # Registers the names of the custom calls.
    compiled.trace(*avals).lower(lowering_platforms=platforms)
    names = [name for lib in libraries() for name in lib.custom_call_names()]
    allowed = [export.DisabledSafetyCheck.custom_call(n) for n in names]
    with contextlib.nullcontext() if lib_calls is None else lib_calls.exporting():
        artefact = export.export(compiled, platforms=platforms, disabled_checks=allowed)(*avals)
    # Only the names that it calls: the artefact must not depend on what was compiled before it.
    own = [
        check
        for name, check in zip(names, allowed, strict=True)
        if name.encode() in artefact.mlir_module_serialized
    ]
    return dataclasses.replace(artefact, disabled_safety_checks=tuple(own))


def custom_calls(artefact: export.Exported) -> tuple[CustomCall, ...]:
    """Return the library calls in an artefact, which must be registered wherever it is run."""
    lib_calls = calls()
    if lib_calls is None:
        return ()
    return tuple(lib_calls.custom_calls_in(artefact.mlir_module_serialized))


def bound_to_jaxlib(artefact: export.Exported) -> bool:
    """Return whether the artefact runs only under this version of jaxlib."""
    module = artefact.mlir_module_serialized
    return any(lib.bound_to_jaxlib(module) for lib in libraries())


def register_calls(wanted: Sequence[CustomCall]) -> None:
    """Register the library calls of an artefact with XLA.

    Raises:
      LibraryError: a library is missing.
      RuntimeError: a library computes differently here; says which.
    """
    for name in dict.fromkeys(t.library for t in wanted):
        lib_calls = by_name(name).calls()
        if lib_calls is None:
            raise LibraryError(f"{name} is not installed here: {by_name(name).install}")
        lib_calls.register_calls([t for t in wanted if t.library == name])
