"""Other runtimes as functions, and what counts as agreement."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from experiments import runtimes
from experiments.runtimes import (
    NARROWER,
    RUNTIMES,
    Loaded,
    jit_in_bfloat16,
    onnx_model,
    onnx_runtime,
)

X = np.array([1.0, 2.0, 4.0], np.float32)


def scaled(weights: Any, x: Any) -> Any:
    return weights * x, jnp.sum(x)


def need(package: str) -> None:
    """Skip the test if a package is not installed, without importing it."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.fixture(params=RUNTIMES)
def tripling(request: pytest.FixtureRequest) -> Loaded:
    """Load `scaled` with weight 3 in each runtime that is installed."""
    need(request.param)
    return RUNTIMES[request.param](onnx_model(scaled, np.float32(3), X), 1)


def test_runs_the_model_on_numpy_arrays(tripling: Loaded) -> None:
    product, total = tripling(X)
    np.testing.assert_array_equal(product, [3.0, 6.0, 12.0])
    assert total == 7.0


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_scalar_input_may_be_read_only(name: str) -> None:
    need(name)
    two = np.array(2, np.float32)
    two.flags.writeable = False
    run = RUNTIMES[name](onnx_model(scaled, np.float32(3), two), 1)
    assert [float(y) for y in run(two)] == [6.0, 2.0]


@pytest.mark.parametrize("spinning", [True, False])
def test_an_idle_runtime_uses_no_processor_time(spinning: bool) -> None:
    need("onnxruntime")
    kernels, x = np.ones((64, 64, 3, 3), np.float32), np.ones((1, 64, 56, 56), np.float32)
    model = onnx_model(lambda w, x: lax.conv(x, w, (1, 1), "SAME"), kernels, x)
    run = onnx_runtime(model, threads=2, spinning=spinning)
    run(x)
    run.wait_until_idle()
    used = time.process_time()
    time.sleep(0.02)
    assert time.process_time() - used < 0.005


def test_agreement_returns_the_error(tripling: Loaded) -> None:
    assert runtimes.check_agreement(tripling, scaled, np.float32(3), [X]) == 0.0


def test_disagreement_is_refused_and_its_size_reported(tripling: Loaded) -> None:
    with pytest.raises(runtimes.DisagreementError, match=r"differ by 0\.25, more than 0\.001"):
        runtimes.check_agreement(tripling, scaled, np.float32(4), [X])


def test_error_is_relative_to_the_largest_magnitude_of_each_output() -> None:
    wanted = [np.array([1.0, -100.0]), np.array([0.0, 2.0])]
    got = [np.array([2.0, -100.0]), np.array([0.0, 2.1])]
    assert runtimes.error_of(got, wanted) == pytest.approx(0.05)


@pytest.mark.parametrize(
    "got", [[np.ones(2)], [np.ones(3), np.ones(3)], [np.array([1.0, np.nan, 1.0])]]
)
def test_other_shapes_and_non_finite_values_have_an_infinite_error(got: Any) -> None:
    assert runtimes.error_of(got, [np.ones(3)]) == np.inf


@pytest.mark.parametrize("name", RUNTIMES)
def test_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx_model(scaled, np.float32(3), X)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"pip install {name}"):
        RUNTIMES[name](model, 1)


@pytest.mark.parametrize("name", RUNTIMES)
def test_too_large_a_model_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need(name)
    monkeypatch.setattr(runtimes, "LARGEST", 10)
    with pytest.raises(ValueError, match=r"model 'network' has \d+ bytes"):
        RUNTIMES[name](onnx_model(scaled, np.float32(3), X), 1)


def test_openvino_sends_no_usage_statistics() -> None:
    need("openvino")
    RUNTIMES["openvino"](onnx_model(scaled, np.float32(3), X), 1)
    assert sys.modules["openvino_telemetry"] is None


def test_a_model_that_openvino_refuses_is_an_error_of_one_line() -> None:
    need("openvino")
    model = onnx_model(scaled, np.float32(3), X)
    model.graph.node[0].op_type = "Unheard"
    with pytest.raises(ValueError, match="OpenVINO refuses the model: .*Unheard"):
        RUNTIMES["openvino"](model, 1)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


@pytest.mark.parametrize("name", NARROWER)
def test_narrower_types_err_by_little(name: str) -> None:
    need(name.partition("-")[0])
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(s).astype(np.float32) / 8 for s in ((64, 64), (8, 64)))
    run = NARROWER[name](onnx_model(layer, w, x), 1)
    assert runtimes.check_agreement(run, layer, w, [x], tolerance=0.1) < 0.1


def test_jit_in_bfloat16_rounds_weights_and_inputs() -> None:
    run = jit_in_bfloat16(lambda w, x: w * x, np.float32(1 / 3))
    (y,) = run(np.asarray([3.0], np.float32))
    assert y.dtype == np.float32 and y[0] == 3 * 0.333984375
