"""JAX's settings: those that our own code is written for, and the user's for the user's function.

A user may have JAX refuse mixed types, stop at the first NaN or run without `jit`. That is meant
for the user's function. The engine, the lowerings and the timing mix types, compute NaN on purpose
and are hopeless without `jit`, so they run under `own_settings`, and what the user wrote runs under
`users_settings`, wherever it is called.
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

# By name in `jax.config`: the context that sets it, and our value.
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
# Of the user's settings those that a trace cannot do with: without `jit`, loops ask for values.
_NOT_TRACED = frozenset({"jax_disable_jit"})


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """JAX in this context is as our own code expects it, whatever the user has set."""
    with _under({name: value for name, (_, value) in _SETTINGS.items()}):
        yield


@contextlib.contextmanager
def types_mixed() -> Iterator[None]:
    """JAX in this context lets types and ranks mix: for a translation into JAX, which does mix
    them, of what is the user's in all else.
    """
    names = ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")
    with _under({name: _SETTINGS[name][1] for name in names}):
        yield


def under_own_settings(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn`, called (or traced) under `own_settings`."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with own_settings():
            return fn(*args, **kwargs)

    return call


def under_users_settings(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn`, called (or traced) under the settings that are in force now."""
    now = {n: getattr(jax.config, n) for n in _SETTINGS if n not in _NOT_TRACED}

    @functools.wraps(fn, updated=())
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _under(now):
            return fn(*args, **kwargs)

    return call


def debugging() -> bool:
    """Whether the user looks for a fault: runs without `jit`, or stops at NaN or infinity."""
    config: Any = jax.config
    return config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs


def meaning() -> tuple[Any, ...]:
    """The settings that change what one and the same function computes."""
    config: Any = jax.config
    return config.jax_enable_x64, config.jax_default_matmul_precision


@contextlib.contextmanager
def _under(values: Mapping[str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            if getattr(jax.config, name) != value:
                stack.enter_context(_SETTINGS[name][0](value))
        yield
