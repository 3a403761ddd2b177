"""Compilation and placement of the engine itself.

The engine consists of large programs of small integer operations, compiled for each bucket and
called thousands of times for milliseconds each. A search waits for the compiler, so optimisations
that take long and gain nothing for such programs are switched off.

A search works on one graph at a time, in loops of data-dependent length. One iteration of such a
loop takes longer on a GPU than many on a CPU, so a search runs on the CPU, wherever its result will
run (`on_cpu`). With thousands of environments at once, the engine runs on the default device; where
that is `wide`, it does more in fewer steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax

from xrl_jax.runtime.settings import own_settings, under_own_settings

P = ParamSpec("P")
R = TypeVar("R")

# Compile options, by platform.
_OPTIONS: dict[str, dict[str, bool | str]] = {
    # XLA:CPU's older fusion emitter, and only LLVM's cheap passes: half the compile time, the same
    # run time (docs/measurements/engine.md).
    "cpu": {"xla_cpu_use_fusion_emitters": False, "xla_llvm_disable_expensive_passes": True},
    # Loops of data-dependent length become part of a CUDA graph: the host launches one graph and
    # does not evaluate loop conditions. Sums are deterministic.
    "gpu": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
        "DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
        "xla_gpu_deterministic_ops": True,
    },
}


def platform() -> str:
    """Return the platform that the engine runs on, that of JAX's default device."""
    device = getattr(jax.config, "jax_default_device", None)
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def wide() -> bool:
    """Return whether a step takes as long for one element as for thousands, as on a GPU.

    If so, the engine takes few wide steps. On a CPU it takes many steps that are as narrow as
    possible.
    """
    return platform() != "cpu"


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Run the engine on the CPU and under `own_settings` inside this context.

    If JAX has no CPU backend, the default device is used.
    """
    with own_settings(), _cpu():
        yield


def _cpu() -> contextlib.AbstractContextManager[Any]:
    if not wide():
        return contextlib.nullcontext()
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        return contextlib.nullcontext()


@functools.cache
def _options(platform: str) -> dict[str, bool | str]:
    """Return those compile options that this jaxlib accepts."""

    def known(option: tuple[str, bool | str]) -> bool:
        try:
            jax.jit(lambda: 0, compiler_options=dict([option])).lower().compile()
        except (RuntimeError, ValueError):
            return False
        return True

    return dict(filter(known, _OPTIONS.get(platform, {}).items()))


def engine_jit(
    fn: Callable[P, R], *, static_argnames: str | tuple[str, ...] = ()
) -> Callable[P, R]:
    """Return `jax.jit` of a function of the engine, with options for quick compilation.

    No backend is started before the first call. Not for use inside another jit, which has its own
    compile options.
    """

    @functools.cache
    def jitted(platform: str) -> Any:
        options, traced = _options(platform), under_own_settings(fn)
        return jax.jit(traced, static_argnames=static_argnames, compiler_options=options)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return jitted(platform())(*args, **kwargs)

    return call
