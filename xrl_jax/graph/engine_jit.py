"""Compiling the engine itself: large programs of small integer work, compiled for each bucket and
called thousands of times for milliseconds each. A search waits for the compiler, so it is told to
leave out what takes long and gains nothing there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")

# XLA:CPU's older emitter of fusions and the cheap half of LLVM's passes: half the time to compile,
# the same time to run (BUILD_NOTES, "Measured: the engine").
_QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def _options() -> dict[str, bool] | None:
    """Those options, or None where this jaxlib does not know them."""
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda: 0, compiler_options=_QUICK).lower().compile()
    except (RuntimeError, ValueError):
        return None
    return _QUICK


def engine_jit(
    fn: Callable[P, R], *, static_argnames: str | tuple[str, ...] = ()
) -> Callable[P, R]:
    """`jax.jit` of a function of the engine, compiled quickly. Starts no backend before it is
    called; not for use inside another jit, which has compile options of its own.
    """

    @functools.cache
    def jitted() -> Any:
        return jax.jit(fn, static_argnames=static_argnames, compiler_options=_options())

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return jitted()(*args, **kwargs)

    return call
