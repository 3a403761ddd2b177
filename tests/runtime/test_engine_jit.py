"""Functions of the engine are compiled with options that shorten compilation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.runtime import engine_jit as lib


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


def test_options_that_this_jaxlib_does_not_know_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {
        "xla_cpu_an_option_of_another_version": True,
        "xla_llvm_disable_expensive_passes": True,
    }
    monkeypatch.setitem(lib._OPTIONS, "cpu", options)
    lib._options.cache_clear()
    try:
        assert lib._options("cpu") == {"xla_llvm_disable_expensive_passes": True}
        assert lib.engine_jit(lambda x: x + 1)(jnp.int32(1)) == 2
    finally:
        lib._options.cache_clear()


def test_a_search_on_a_machine_with_a_gpu_runs_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert (lib.platform(), lib.wide()) == ("gpu", True)
    with lib.on_cpu():
        assert (lib.platform(), lib.wide()) == ("cpu", False)
    assert lib.wide()


def test_without_a_cpu_backend_the_search_stays_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(backend: str) -> list[Any]:
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", none)
    with lib.on_cpu():
        assert lib.wide()
