"""The libraries that there are: packages beside this file, and those of other distributions.

A distribution of its own adds a library by an entry point of the group `xrl_jax.libraries`, whose
object is the library.
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

GROUP = "xrl_jax.libraries"
_FIRST = "xla"  # has the plain lowerings


class LibraryError(ValueError):
    """A library that cannot be used; the message names it."""


@functools.cache
def libraries() -> tuple[Library, ...]:
    """All libraries, installed or not: XLA, then others by name, then those of other distributions.

    Raises:
      LibraryError: one cannot be imported, or two have the same name.
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
    """The library of this name.

    Raises:
      LibraryError: there is none.
    """
    for lib in libraries():
        if lib.name == name:
            return lib
    known = ", ".join(lib.name for lib in libraries())
    raise LibraryError(f"there is no library {name!r} here (there are: {known})")


def is_for(lib: Library, platform: str) -> bool:
    """Whether a library has kernels for a platform of JAX."""
    return not lib.platforms or platform in lib.platforms


def calling(platform: str) -> Library | None:
    """The library whose kernels share calls on a platform; None where there is none. The cost model
    knows of one at a time: the first that is there.
    """
    found = (lib for lib in libraries() if is_for(lib, platform))
    return next((lib for lib in found if lib.calls() is not None), None)


def calls() -> Calls | None:
    """The calls of `calling` on the default device."""
    lib = calling(jax.default_backend())
    return lib.calls() if lib is not None else None


def versions() -> str:
    """Versions of all libraries that are there, for the keys of timings."""
    return " ".join(v for lib in libraries() if (v := lib.version()))


def partitioned(closed: Any, known: Sequence[bool]) -> Any:
    """The closed jaxpr with kernels put together in calls; see `Calls.partitioned`."""
    made = calls()
    return closed if made is None else made.partitioned(closed, known)


def exported(fn: Callable[..., Any], *avals: Any) -> export.Exported:
    """`jax.export` of a function that may hold kernels of libraries, which JAX makes no promise
    about.
    """
    compiled, made = jax.jit(fn), calls()
    compiled.lower(*avals)  # makes the names known
    names = [name for lib in libraries() for name in lib.custom_call_names()]
    allowed = [export.DisabledSafetyCheck.custom_call(n) for n in names]
    with contextlib.nullcontext() if made is None else made.exporting():
        artefact = export.export(compiled, disabled_checks=allowed)(*avals)
    # Of the names known here only its own: the artefact must not depend on what came before.
    own = [
        check
        for name, check in zip(names, allowed, strict=True)
        if name.encode() in artefact.mlir_module_serialized
    ]
    return dataclasses.replace(artefact, disabled_safety_checks=tuple(own))


def custom_calls(artefact: export.Exported) -> tuple[CustomCall, ...]:
    """The calls of libraries in an artefact, to be made known where it is run."""
    made = calls()
    return () if made is None else tuple(made.custom_calls_in(artefact.mlir_module_serialized))


def bound_to_jaxlib(artefact: export.Exported) -> bool:
    """Whether the artefact runs under this version of jaxlib alone."""
    module = artefact.mlir_module_serialized
    return any(lib.bound_to_jaxlib(module) for lib in libraries())


def make_known(wanted: Sequence[CustomCall]) -> None:
    """Make XLA know the calls that an artefact makes.

    Raises:
      LibraryError: a library is missing.
      RuntimeError: a library computes otherwise here; says which.
    """
    for name in dict.fromkeys(t.library for t in wanted):
        made = by_name(name).calls()
        if made is None:
            raise LibraryError(f"{name} is missing here: {by_name(name).install}")
        made.make_known([t for t in wanted if t.library == name])
