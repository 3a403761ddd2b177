"""Layouts of prepared weights on GPUs.

Kernels of convolutions want their weights in a certain order in memory. A weight that is an
argument comes row-major, and XLA transposes it in every call; one that is a constant is transposed
when the program is compiled, which takes long for large ones. So XLA is asked once which layouts it
wants, and weights are prepared in these.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental.layout import Format, Layout

from xrl_jax.backends.hoist import Hoisted
from xrl_jax.runtime.target_platform import target_platform


def in_wanted_layouts(hoisted: Hoisted, inputs: Sequence[Any]) -> Hoisted:
    """Return the function with its weights prepared in the layouts that XLA wants, if code is made
    for a GPU; on other platforms, as it is.

    Args:
      inputs: shape and dtype of the arguments that are not weights.
    """
    if target_platform() != "gpu":
        return hoisted

    @functools.cache
    def formats() -> tuple[Format, ...]:
        return wanted_formats(hoisted, inputs)

    def prepare(weights: Sequence[Any]) -> tuple[Any, ...]:
        values = hoisted.prepare(weights)
        if not all(map(_may_move, values)):
            return values
        moved = zip(values, formats(), strict=True)
        return tuple(jax.device_put(v, Format(f.layout, v.sharding)) for v, f in moved)

    return replace(hoisted, prepare=prepare)


def wanted_formats(hoisted: Hoisted, inputs: Sequence[Any]) -> tuple[Format, ...]:
    """Return the formats in which XLA wants the prepared weights; compiles the call."""
    free = (Format(Layout.AUTO),) * len(hoisted.avals)
    jitted = jax.jit(lambda prepared, rest: hoisted.call(prepared, rest), in_shardings=(free, None))
    compiled = jitted.lower(hoisted.avals, list(inputs)).compile()
    (formats, _), _ = compiled.input_formats
    return formats


def is_extended(value: Any) -> bool:
    """Return whether an array has a dtype of JAX's own, such as keys."""
    return jnp.issubdtype(value.dtype, jax.dtypes.extended)


def _may_move(value: Any) -> bool:
    """Return whether a value is an array of numbers on one device."""
    is_array = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    return is_array and not is_extended(value) and len(value.sharding.device_set) == 1
