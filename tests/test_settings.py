"""Under any JAX settings of a user, the engine works and the user's function sees the settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import Tracer
from onnx import TensorProto, helper, numpy_helper

import xrl_jax
from tests import test_optimize
from tests.test_optimize import PARAMS, X, network
from xrl_jax.backends.fast import Fast
from xrl_jax.frontends.jaxpr import TraceError, from_jax
from xrl_jax.runtime.settings import own_settings, under_users_settings

optimize, made_up = test_optimize.optimize, test_optimize.made_up  # fixtures

ALL: dict[str, Any] = {
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_default_matmul_precision": "highest",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_disable_jit": True,
    "jax_check_tracer_leaks": True,
    "jax_transfer_guard": "disallow",
}


@contextlib.contextmanager
def setting(**values: Any) -> Iterator[None]:
    """Set values for all threads, as a user does at the start of a script."""
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def made(fn: Callable[..., Any], *args: Any, **options: Any) -> Fast:
    return Fast(from_jax(fn, *args, **options), fn)


@pytest.mark.usefixtures("made_up")
def test_optimize_works_under_all_settings_together(optimize: Callable[..., Any]) -> None:
    expected = network(PARAMS, X)
    with setting(**ALL):
        fast = optimize(network, PARAMS, X, weights=0)
    assert fast.report.used == "optimized"
    with jax.default_matmul_precision("highest"):
        result = fast(PARAMS, X)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_rewriting_step_by_step_works_under_all_settings_together() -> None:
    with setting(**ALL):
        program = from_jax(network, PARAMS, X, weights=0)
        found = xrl_jax.candidates(program)
        rewritten = xrl_jax.apply(program, found[0])
        result = rewritten(PARAMS, X)
    np.testing.assert_allclose(result, network(PARAMS, X), rtol=1e-4, atol=1e-5)


def test_the_users_function_runs_under_the_users_settings_not_the_librarys() -> None:
    with jax.numpy_dtype_promotion("strict"), jax.default_matmul_precision("highest"):
        fn = under_users_settings(lambda: jax.config.jax_numpy_dtype_promotion)  # type: ignore[attr-defined]
    with own_settings():
        assert fn() == "strict"
        assert jax.config.jax_numpy_dtype_promotion == "standard"  # type: ignore[attr-defined]


def test_strict_promotion_errors_of_the_original_are_raised() -> None:
    with (
        jax.numpy_dtype_promotion("strict"),
        pytest.raises(TraceError, match="TypePromotionError"),
    ):
        from_jax(lambda x: x + jnp.arange(3), jnp.ones(3))


def loop(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 2, x)


def test_a_loop_is_traced_where_jit_is_switched_off() -> None:
    with jax.disable_jit():
        fast = made(loop, jnp.ones(3))
    np.testing.assert_array_equal(fast(jnp.ones(3)), [4, 4, 4])


def test_where_jit_is_switched_off_the_original_is_run() -> None:
    seen = []

    def fn(x):
        seen.append(x)
        return x + 1

    fast = made(fn, X)
    with jax.disable_jit():
        np.testing.assert_array_equal(fast(X), X + 1)
    assert isinstance(seen[-1], jax.Array) and not isinstance(seen[-1], Tracer)


def test_a_compiled_call_runs_the_original_where_jit_is_switched_off() -> None:
    seen = []
    fast = made(lambda x: seen.append(x) or x + 1, X)
    fast(X)
    with jax.disable_jit():
        fast(X)
    assert seen[-1] is X


def test_gradients_work_where_jit_is_switched_off() -> None:
    fast = made(lambda x: (x * x).sum(), X)
    with jax.disable_jit():
        np.testing.assert_allclose(jax.grad(fast)(X), 2 * X)


def test_a_program_without_its_original_runs_where_jit_is_switched_off() -> None:
    fast = Fast(from_jax(loop, jnp.ones(3)), None)
    with jax.disable_jit():
        np.testing.assert_array_equal(fast(jnp.ones(3)), [4, 4, 4])


def test_prepared_weights_are_accepted_where_jit_is_switched_off() -> None:
    fast = made(lambda w, x: x @ (w * 2), X, X, weights=0)
    with jax.disable_jit():
        result = fast.call(fast.prepare(X), X)
    np.testing.assert_allclose(result, X @ (X * 2), rtol=1e-5)


def test_a_program_is_called_where_jit_is_switched_off() -> None:
    program = from_jax(loop, jnp.ones(3))
    with jax.disable_jit():
        np.testing.assert_array_equal(program(jnp.ones(3)), [4, 4, 4])


def guarded(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, jnp.log(x), 0.0)


def test_a_nan_raises_where_the_user_asks_for_that() -> None:
    fast = made(guarded, X)
    x = -jnp.ones_like(X)
    np.testing.assert_array_equal(fast(x), jnp.zeros_like(X))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        fast(x)


def test_an_infinity_raises_where_the_user_asks_for_that() -> None:
    fast = made(lambda x: 1 / x, X)
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        fast(np.zeros_like(X))


def test_saving_and_loading_work_under_strict_types_and_without_jit(tmp_path) -> None:
    fast = made(network, PARAMS, X, weights=0)
    with setting(jax_numpy_dtype_promotion="strict", jax_disable_jit=True):
        fast.save(tmp_path / "saved")
        loaded = xrl_jax.load(tmp_path / "saved")
        result = loaded(PARAMS, X)
    np.testing.assert_allclose(result, network(PARAMS, X), rtol=1e-4, atol=1e-5)


def test_products_keep_the_precision_they_were_traced_with() -> None:
    with jax.default_matmul_precision("highest"):
        fast = made(lambda x: x @ x, X)
        text = jax.jit(fast).lower(X).as_text()
    assert "HIGHEST" in text


def test_a_call_on_device_arrays_passes_a_transfer_guard() -> None:
    fast = made(lambda x: x + np.arange(6, dtype=np.float32), X)
    expected = np.asarray(X) + np.arange(6, dtype=np.float32)
    with jax.transfer_guard("disallow"):
        result = fast(X)
    np.testing.assert_array_equal(result, expected)


def test_an_onnx_model_is_read_under_strict_types() -> None:
    gemm = helper.make_node("Gemm", ["x", "w", "b"], ["y"], alpha=0.5)
    power = helper.make_node("Pow", ["y", "two"], ["z"])
    constants = {"w": np.eye(6, dtype=np.float32), "b": np.ones(6, np.float32), "two": np.int64(2)}
    graph = helper.make_graph(
        [gemm, power],
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 6])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [6, 6])],
        [numpy_helper.from_array(np.asarray(v), name) for name, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        program = xrl_jax.from_onnx(model)
        result = program(X)
    np.testing.assert_allclose(result, (X / 2 + 1) ** 2, rtol=1e-5)
