"""Compiling and placing the engine itself: large programs of small integer work, compiled for each
bucket and called thousands of times for milliseconds each. A search waits for the compiler, so it
is told to leave out what takes long and gains nothing there.

A search works on one graph at a time, in loops that end when they are done. A GPU takes longer for
one turn of such a loop than a CPU for many, so that a search runs on the CPU wherever what it finds
will run (`on_cpu`). Thousands of environments at once are another matter: there the engine runs on
the default device, and where that is `wide`, it does more in fewer steps.
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
    # XLA:CPU's older emitter of fusions and the cheap half of LLVM's passes: half the time to
    # compile, the same time to run (docs/measurements/engine.md).
    "cpu": {"xla_cpu_use_fusion_emitters": False, "xla_llvm_disable_expensive_passes": True},
    # Loops that end when they are done are part of a CUDA graph too: the host launches one graph
    # and is not asked whether to go on. And sums are added up in one order, always.
    "gpu": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
        "DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
        "xla_gpu_deterministic_ops": True,
    },
}


def platform() -> str:
    """Where the engine runs: the platform of JAX's default device."""
    device = getattr(jax.config, "jax_default_device", None)
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def wide() -> bool:
    """Whether the engine runs where a step takes as long for one as for thousands, as on a GPU:
    then it takes few wide steps. On a CPU it takes many that are no wider than need be.
    """
    return platform() != "cpu"


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """The engine runs on the CPU in this context, where JAX has one for us, and under settings of
    its own.
    """
    with own_settings(), _cpu():
        yield


def _cpu() -> contextlib.AbstractContextManager[Any]:
    if not wide():
        return contextlib.nullcontext()
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return contextlib.nullcontext()


@functools.cache
def _options(platform: str) -> dict[str, bool | str]:
    """Those of the options that this jaxlib knows."""

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
    """`jax.jit` of a function of the engine, compiled quickly. Starts no backend before it is
    called; not for use inside another jit, which has compile options of its own.
    """

    @functools.cache
    def jitted(platform: str) -> Any:
        options, traced = _options(platform), under_own_settings(fn)
        return jax.jit(traced, static_argnames=static_argnames, compiler_options=options)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return jitted(platform())(*args, **kwargs)

    return call
