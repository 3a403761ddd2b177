"""Prepared weights are laid out as XLA's kernels want them, on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from xrl_jax import from_jax, load
from xrl_jax.backends import layouts
from xrl_jax.backends.fast import Fast
from xrl_jax.backends.hoist import Hoisted
from xrl_jax.runtime.target_platform import making_for

COLUMNS_FIRST = Layout((1, 0))


def linear(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


@pytest.fixture
def wanting_columns_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU wants rows first; let it seem to want columns first for matrices."""

    at = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def formats(hoisted: Hoisted, inputs: Sequence[Any]) -> tuple[Format, ...]:
        return tuple(Format(COLUMNS_FIRST, at) for _ in hoisted.avals)

    monkeypatch.setattr(layouts, "wanted_formats", formats)


def fast_linear() -> Fast:
    w, x = jnp.ones((3, 2)), jnp.ones((3, 3))
    return Fast(from_jax(linear, w, x, weights=(0,)), linear)


def test_xla_is_asked_for_the_formats() -> None:
    hoisted = fast_linear().runnable.hoisted
    (found,) = layouts.wanted_formats(hoisted, [jax.ShapeDtypeStruct((3, 3), "float32")])
    assert isinstance(found.layout, Layout)
    assert found.layout.major_to_minor == (0, 1)  # on the CPU


def test_weights_are_row_major_on_cpus() -> None:
    prepared = fast_linear().prepare(jnp.ones((3, 2)))
    assert [v.format.layout.major_to_minor for v in prepared.values] == [(0, 1)]


def test_weights_are_in_the_wanted_layout_on_gpus(wanting_columns_first: None) -> None:
    fast, w = fast_linear(), jnp.arange(6.0).reshape(3, 2)
    with making_for("gpu"):
        prepared = fast.prepare(w)
        assert [v.format.layout.major_to_minor for v in prepared.values] == [(1, 0)]
        np.testing.assert_array_equal(fast(w, jnp.eye(3)), w)
        np.testing.assert_array_equal(fast.call(prepared, jnp.eye(3)), w)


def test_weights_may_be_traced_on_gpus(wanting_columns_first: None) -> None:
    fast, w = fast_linear(), jnp.arange(6.0).reshape(3, 2)
    with making_for("gpu"):
        np.testing.assert_array_equal(jax.jit(fast)(w, jnp.eye(3)), w)
        np.testing.assert_array_equal(jax.jit(lambda x: fast(w, x))(jnp.eye(3)), w)


def test_a_saved_function_lays_them_out_again(wanting_columns_first: None, tmp_path: Path) -> None:
    fast, w = fast_linear(), jnp.arange(6.0).reshape(3, 2)
    fast.save(tmp_path / "linear.xrl")
    with making_for("gpu"):
        loaded = load(tmp_path / "linear.xrl")
        (value,) = loaded.prepare(w).values
        assert value.format.layout.major_to_minor == (1, 0)
