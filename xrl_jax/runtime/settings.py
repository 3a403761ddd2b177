"""JAX settings: those that xrl_jax is written for, and the user's for the user's function.

A user may configure JAX to refuse mixed types, to stop at the first NaN or to run without `jit`.
These settings are meant for the user's function. The engine, the lowerings and the timing mix
types, compute NaN on purpose and are unusable without `jit`. They run under `own_settings`, and
the user's code runs under the user's settings (`under_users_settings`), wherever it is called.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")

# By name in `jax.config`: the context manager that sets it, and xrl_jax's own value.
_SETTINGS: Mapping[str, tuple[Callable[[Any], Any], Any]] = MappingProxyType(
    {
        "jax_numpy_dtype_promotion": (jax.numpy_dtype_promotion, "standard"),
        "jax_numpy_rank_promotion": (jax.numpy_rank_promotion, "allow"),
        "jax_default_matmul_precision": (jax.default_matmul_precision, None),
        "jax_debug_nans": (jax.debug_nans, False),
        "jax_debug_infs": (jax.debug_infs, False),
        "jax_disable_jit": (jax.disable_jit, False),
        "jax_check_tracer_leaks": (jax.check_tracer_leaks, False),
        "jax_transfer_guard_host_to_device": (jax.transfer_guard_host_to_device, "allow"),
        "jax_transfer_guard_device_to_device": (jax.transfer_guard_device_to_device, "allow"),
        "jax_transfer_guard_device_to_host": (jax.transfer_guard_device_to_host, "allow"),
    }
)
# User settings under which a trace fails: without `jit`, loops need concrete values.
_NOT_TRACED = frozenset({"jax_disable_jit"})


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Configure JAX inside this context as xrl_jax expects it, whatever the user has set."""
    with _under({name: value for name, (_, value) in _SETTINGS.items()}):
        yield


@contextlib.contextmanager
def types_mixed() -> Iterator[None]:
    """Let JAX mix types and ranks inside this context; all other settings remain the user's.

    For translating a user's model into JAX, where the translation itself mixes types and ranks.
    """
    names = ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")
    with _under({name: _SETTINGS[name][1] for name in names}):
        yield


def under_own_settings(fn: Callable[P, R]) -> Callable[P, R]:
    """Return `fn`, called (or traced) under `own_settings`."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with own_settings():
            return fn(*args, **kwargs)

    return call


def under_users_settings(fn: Callable[P, R]) -> Callable[P, R]:
    """Return `fn`, called (or traced) under the settings that are in force now."""
    now = {n: getattr(jax.config, n) for n in _SETTINGS if n not in _NOT_TRACED}

    @functools.wraps(fn, updated=())
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _under(now):
            return fn(*args, **kwargs)

    return call


def debugging() -> bool:
    """Return whether the user is debugging: JAX runs without `jit`, or stops at NaN or infinity."""
    config: Any = jax.config
    return config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs


def semantic_settings() -> tuple[Any, ...]:
    """Return the settings that change what a given function computes."""
    config: Any = jax.config
    return config.jax_enable_x64, config.jax_default_matmul_precision


@contextlib.contextmanager
def _under(values: Mapping[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            if getattr(jax.config, name) != value:
                stack.enter_context(_SETTINGS[name][0](value))
        yield
