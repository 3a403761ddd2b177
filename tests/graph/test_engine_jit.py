"""Functions of the engine are compiled with options that make the compiler quick."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.graph import engine_jit as lib


def test_same_values_as_jit() -> None:
    def shifted(x: jax.Array, *, by: int) -> jax.Array:
        return jnp.roll(x, by) * 2

    quick = lib.engine_jit(shifted, static_argnames="by")
    np.testing.assert_array_equal(quick(jnp.arange(4), by=1), [6, 0, 2, 4])


def test_traced_once_for_each_shape() -> None:
    traces: list[tuple[int, ...]] = []

    def total(x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        return jnp.sum(x)

    quick = lib.engine_jit(total)
    for size in (3, 3, 5, 3):
        quick(jnp.ones(size))
    assert traces == [(3,), (5,)]


def test_a_jaxlib_without_these_options_compiles_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown: dict[str, Any] = {"xla_cpu_an_option_of_another_version": True}
    monkeypatch.setattr(lib, "_QUICK", unknown)
    lib._options.cache_clear()
    try:
        assert lib._options() is None
        assert lib.engine_jit(lambda x: x + 1)(jnp.int32(1)) == 2
    finally:
        lib._options.cache_clear()
