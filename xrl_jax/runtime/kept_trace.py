"""Functions of the engine whose trace is kept for the next process.

What is compiled of the engine is kept on disk, and what is left of the time until a large function
is ready is tracing it: 10 of 14 seconds of a step of rollouts. Its trace is kept as `jax.export`
writes it, in the folder in which JAX keeps what it compiles. It is found again by all that it
depends on: the sources of this package and the versions of those it is traced with, the settings of
JAX that change a trace, what the function is closed over, and the types of its arguments.
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
from xrl_jax.runtime.files import replacing

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
    """`engine_jit` of a function of trees of arrays, traced once for all processes.

    Where JAX has no cache folder, or it cannot be read or written, the function is traced as any.

    Args:
      settings: what `fn` is closed over, as text that tells all that matters of it.
      like: a tree of the structure of the result, made of the arguments.
    """

    @functools.cache
    def flat(tree: Any, types: tuple[jax.ShapeDtypeStruct, ...], _platform: str) -> Any:
        def leaves(*given: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(fn(*jax.tree.unflatten(tree, given)))

        told = f"{fn.__module__}.{fn.__qualname__} {settings} {tree}"
        return engine_jit(_kept(leaves, told, types))

    def call(*args: Any) -> Any:
        given, tree = jax.tree.flatten(args)
        # Results are bound to a device. Were arguments not, results as arguments would be others.
        given = jax.device_put(given, _device())
        types = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in given)
        made = flat(tree, types, platform())(*given)
        return jax.tree.unflatten(jax.tree.structure(like(*args)), made)

    return call


def _kept(
    fn: Callable[..., Any], told: str, types: tuple[jax.ShapeDtypeStruct, ...]
) -> Callable[..., Any]:
    """The function as its kept trace, which is made where there is none; itself where none can be
    kept.

    Args:
      told: what tells the function apart, types aside.
    """
    folder = Path(getattr(jax.config, "jax_compilation_cache_dir", None) or "")
    if folder == Path() or not folder.is_dir():  # JAX makes it; it may not be of this machine
        return fn
    path = folder / f"traced-{_digest(told, types)}"
    try:
        return jax.export.deserialize(bytearray(path.read_bytes())).call
    except Exception:  # not there, cut short, or of another version: of many types
        pass
    exported = jax.export.export(jax.jit(fn), platforms=[_lowered_for()])(*types)
    try:
        with replacing(path) as file:
            file.write(exported.serialize())
    except OSError:  # a full disk costs the next process the trace
        pass
    return exported.call


def _device() -> Any:
    """JAX's default device."""
    device = getattr(jax.config, "jax_default_device", None)
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=platform())[0]


def _lowered_for() -> str:
    """The platform as `jax.export` calls it."""
    return {"gpu": "cuda"}.get(platform(), platform())


def _digest(told: str, types: tuple[jax.ShapeDtypeStruct, ...]) -> str:
    parts = [told, *map(str, types), platform(), _sources()]
    parts += [f"{name}={getattr(jax.config, name, None)}" for name in _SETTINGS]
    parts += [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    """Hash of all files of this package that a trace may depend on."""
    digest = hashlib.sha256()
    for path in sorted(_ROOT.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
