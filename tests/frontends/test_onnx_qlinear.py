"""Operators on quantised arrays that ONNX Runtime's quantiser writes, compared with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.frontends.onnx_models import model, tensor
from xrl_jax.frontends.onnx import UnsupportedOnnxError, load_onnx

runtime = pytest.importorskip("onnxruntime")
MICROSOFT = helper.make_opsetid("com.microsoft", 1)
RNG = np.random.default_rng(0)
X = RNG.integers(0, 60, (1, 2, 5, 6)).astype(np.uint8)
OTHER = RNG.integers(0, 60, (1, 2, 5, 6)).astype(np.uint8)
B = RNG.integers(-30, 30, (6, 4)).astype(np.int8)


def level(scale: float, zero: int, kind: Any = np.uint8) -> list[Any]:
    """Return a scale and a zero point."""
    return [np.float32(scale), kind(zero)]


# (operator, x, further inputs, attributes)
CASES: dict[str, tuple[str, np.ndarray, list[Any], dict[str, Any]]] = {
    "QLinearAdd": (
        "QLinearAdd",
        X,
        [*level(0.11, 20), OTHER, *level(0.37, 5), *level(0.23, 9)],
        {},
    ),
    "QLinearMul": ("QLinearMul", X, [*level(0.1, 20), OTHER, *level(0.3, 5), *level(0.4, 99)], {}),
    "QLinearMul, saturated": (
        "QLinearMul",
        X,
        [*level(1.0, 0), OTHER, *level(1.0, 0), *level(1.0, 0)],
        {},
    ),
    "QLinearGlobalAveragePool": (
        "QLinearGlobalAveragePool",
        X,
        [*level(0.1, 20), *level(0.05, 7)],
        {},
    ),
    "QLinearAveragePool": (
        "QLinearAveragePool",
        X,
        [*level(0.07, 20), *level(0.05, 7)],
        {"kernel_shape": [2, 2]},
    ),
    "QLinearSigmoid": ("QLinearSigmoid", X, [*level(0.1, 20), *level(1 / 256, 0)], {}),
    "QLinearLeakyRelu": (
        "QLinearLeakyRelu",
        X,
        [*level(0.1, 20), *level(0.1, 20)],
        {"alpha": 0.3},
    ),
    "QGemm": (
        "QGemm",
        X[0, 0],
        [*level(0.1, 20), B, *level(0.2, 0, np.int8), np.arange(4, dtype=np.int32)],
        {"alpha": 0.5},
    ),
    "QGemm, columns, transposed": (
        "QGemm",
        X[0, 0],
        [
            *level(0.1, 20),
            np.ascontiguousarray(B.T),
            np.asarray([0.1, 0.2, 0.3, 0.4], np.float32),
            np.zeros(4, np.int8),
            np.arange(4, dtype=np.int32),
            *level(2.0, 100),
        ],
        {"transB": 1},
    ),
}


def one_node(op: str, x: np.ndarray, further: list[Any], attributes: dict[str, Any]) -> Any:
    constants = [numpy_helper.from_array(np.asarray(v), f"c{i}") for i, v in enumerate(further)]
    names = ["x", *(constant.name for constant in constants)]
    node = helper.make_node(op, names, ["y"], domain="com.microsoft", **attributes)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    is_float = op == "QGemm" and len(further) == 6  # neither scale nor zero point of the result
    made = tensor("y", None, TensorProto.FLOAT if is_float else kind)
    return model([node], [tensor("x", x.shape, kind)], [made], constants, extra=[MICROSOFT])


def results(proto: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of xrl_jax and of ONNX Runtime, each operator on its own."""
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    loaded = load_onnx(proto)
    (expected,) = session.run(None, {"x": x})
    return np.asarray(loaded.fn(loaded.weights, x)), expected


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_onnxruntime(case: str) -> None:
    op, x, further, attributes = CASES[case]
    got, expected = results(one_node(op, x, further, attributes), x)
    assert got.dtype == expected.dtype and expected.std() > 0
    # What is halfway between two levels may become either.
    np.testing.assert_allclose(
        got.astype(float), expected, rtol=1e-6, atol=float(got.dtype == np.uint8)
    )
    assert np.mean(got != expected) < 0.1 or got.dtype == np.float32


def test_arrays_with_their_own_levels_are_joined() -> None:
    further = [np.float32(0.2), np.uint8(9)]
    constants = [numpy_helper.from_array(np.asarray(v), f"c{i}") for i, v in enumerate(further)]
    own = [*level(0.1, 20), OTHER, *level(0.3, 5)]
    constants += [numpy_helper.from_array(np.asarray(v), f"d{i}") for i, v in enumerate(own)]
    names = ["c0", "c1", "x", "d0", "d1", "d2", "d3", "d4"]
    node = helper.make_node("QLinearConcat", names, ["y"], domain="com.microsoft", axis=1)
    x, y = tensor("x", X.shape, TensorProto.UINT8), tensor("y", None, TensorProto.UINT8)
    got, expected = results(model([node], [x], [y], constants, extra=[MICROSOFT]), X)
    assert got.shape == (1, 4, 5, 6)
    np.testing.assert_allclose(got.astype(float), expected, atol=1.0)


def test_features_that_come_last_are_refused() -> None:
    op, x, further, _ = CASES["QLinearGlobalAveragePool"]
    proto = one_node(op, x, further, {"channels_last": 1})
    with pytest.raises(UnsupportedOnnxError, match="channels_last is not supported"):
        loaded = load_onnx(proto)
        loaded.fn(loaded.weights, x)
