"""Functions of the engine whose trace is kept on disk for later processes.

Compiled code is cached on disk, so most of the time until a large function is ready is spent on
tracing: 10 of 14 seconds for a step of rollouts. The trace is therefore stored, serialised by
`jax.export`, in the folder of JAX's compilation cache. Its key covers everything that it depends
on: the sources of this package, the versions of the packages it is traced with, the JAX settings
that change a trace, the values that the function closes over, and the types of its arguments.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export

from xrl_jax.runtime.engine_jit import engine_jit, platform
from xrl_jax.runtime.files import atomic_write

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("jax", "jaxlib", "flax", "jraph", "numpy")
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)


def kept_trace(
    fn: Callable[..., Any], *, settings: str, like: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `engine_jit` of a function of pytrees of arrays, traced once for all processes.

    If JAX has no cache folder, or the folder cannot be read or written, the function is traced in
    each process.

    Args:
      settings: text that determines the values that `fn` closes over, as far as they matter.
      like: the arguments -> a pytree with the structure of the result.
    """

    @functools.cache
    def flat(tree: Any, types: tuple[jax.ShapeDtypeStruct, ...], _platform: str) -> Any:
        def leaves(*given: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(fn(*jax.tree.unflatten(tree, given)))

        identity = f"{fn.__module__}.{fn.__qualname__} {settings} {tree}"
        return engine_jit(_kept(leaves, identity, types))

    def call(*args: Any) -> Any:
        given, tree = jax.tree.flatten(args)
        # Results are committed to a device. Arguments are too, so that results passed as arguments
        # count as the same.
        given = jax.device_put(given, _device())
        types = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in given)
        made = flat(tree, types, platform())(*given)
        return jax.tree.unflatten(jax.tree.structure(like(*args)), made)

    return call


def _kept(
    fn: Callable[..., Any], identity: str, types: tuple[jax.ShapeDtypeStruct, ...]
) -> Callable[..., Any]:
    """Return the kept trace of the function, creating it if necessary; `fn` if it cannot be kept.

    Args:
      identity: text that identifies the function, apart from its argument types.
    """
    folder = Path(getattr(jax.config, "jax_compilation_cache_dir", None) or "")
    if folder == Path() or not folder.is_dir():  # JAX creates it; it may not be on this machine
        return fn
    path = folder / f"traced-{_digest(identity, types)}"
    try:
        return jax.export.deserialize(bytearray(path.read_bytes())).call
    except Exception:  # missing, truncated, or of another version: many exception types
        pass
    exported = jax.export.export(jax.jit(fn), platforms=[_lowered_for()])(*types)
    try:
        with atomic_write(path) as file:
            file.write(exported.serialize())
    except OSError:  # e.g. a full disk: the next process traces again
        pass
    return exported.call


def _device() -> Any:
    """Return JAX's default device."""
    device = getattr(jax.config, "jax_default_device", None)
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=platform())[0]


def _lowered_for() -> str:
    """Return the platform by its name in `jax.export`."""
    return {"gpu": "cuda"}.get(platform(), platform())


def _digest(identity: str, types: tuple[jax.ShapeDtypeStruct, ...]) -> str:
    parts = [identity, *map(str, types), platform(), _sources()]
    parts += [f"{name}={getattr(jax.config, name, None)}" for name in _SETTINGS]
    parts += [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """Return a hash of all files of this package that a trace may depend on."""
    digest = hashlib.sha256()
    for path in sorted(_ROOT.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
