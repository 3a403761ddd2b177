"""Operators that ONNX Runtime's optimiser writes, compared with ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.frontends.onnx_models import array, model, tensor
from xrl_jax.frontends.onnx import UnsupportedOnnxError, load_onnx

runtime = pytest.importorskip("onnxruntime")
MICROSOFT = helper.make_opsetid("com.microsoft", 1)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


ROWS, IMAGE = numbers(2, 3, 4), numbers(1, 2, 5, 6)
# (operator, input, further inputs, attributes)
CASES: dict[str, tuple[str, np.ndarray, list[Any], dict[str, Any]]] = {
    "Gelu": ("Gelu", ROWS, [], {}),
    "BiasGelu": ("BiasGelu", ROWS, [numbers(4)], {}),
    "FastGelu": ("FastGelu", ROWS, [], {}),
    "FastGelu, bias": ("FastGelu", ROWS, [numbers(4)], {}),
    "QuickGelu": ("QuickGelu", ROWS, [], {"alpha": 1.5}),
    "FusedMatMul": ("FusedMatMul", ROWS, [numbers(2, 4, 5)], {"alpha": 0.5}),
    "FusedMatMul, turned": ("FusedMatMul", ROWS, [numbers(2, 3, 3)], {"transA": 1}),
    "FusedMatMul, both turned": (
        "FusedMatMul",
        ROWS,
        [numbers(5, 3)],
        {"transA": 1, "transB": 1},
    ),
    "FusedGemm": (
        "FusedGemm",
        ROWS[0],
        [numbers(4, 2), numbers(2)],
        {"activation": "LeakyRelu", "activation_alpha": 0.3},
    ),
    "FusedConv": ("FusedConv", IMAGE, [numbers(3, 2, 3, 3)], {"activation": "Relu"}),
    "FusedConv, bias and sum": (
        "FusedConv",
        IMAGE,
        [numbers(3, 2, 1, 1), numbers(3), numbers(1, 3, 5, 6)],
        {"activation": "Relu"},
    ),
    "FusedConv, Clip": (
        "FusedConv",
        IMAGE,
        [numbers(3, 2, 3, 3)],
        {"activation": "Clip", "activation_params": [-0.5, 0.25]},
    ),
    "FusedConv, HardSigmoid": (
        "FusedConv",
        IMAGE,
        [numbers(3, 2, 3, 3)],
        {"activation": "HardSigmoid", "activation_params": [0.3, 0.4]},
    ),
    "SkipLayerNormalization": ("SkipLayerNormalization", ROWS, [ROWS[::-1], numbers(4)], {}),
    "SkipLayerNormalization, biases": (
        "SkipLayerNormalization",
        ROWS,
        [ROWS[::-1], numbers(4), numbers(4), -numbers(4)],
        {"epsilon": 0.1},
    ),
    "SkipSimplifiedLayerNormalization": (
        "SkipSimplifiedLayerNormalization",
        ROWS,
        [ROWS[::-1], numbers(4), numbers(4)],
        {"epsilon": 0.1},
    ),
}


def one_node(op, x, further, attributes, outputs=("y",)):
    constants = [array(f"c{i}", value) for i, value in enumerate(further)]
    names = ["x", *(constant.name for constant in constants)]
    node = helper.make_node(op, names, outputs, domain="com.microsoft", **attributes)
    made = [tensor(name, None) for name in outputs if name]
    return model([node], [tensor("x", x.shape)], made, constants, extra=[MICROSOFT])


def assert_agrees(proto, x):
    loaded = load_onnx(proto)
    expected = runtime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    ).run(None, {"x": x})
    actual = loaded.fn(loaded.weights, x)
    actual = actual if isinstance(actual, tuple) else (actual,)
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_onnxruntime(case: str) -> None:
    op, x, further, attributes = CASES[case]
    assert_agrees(one_node(op, x, further, attributes), x)


@pytest.mark.parametrize("op", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
def test_the_optional_output_of_the_sum_is_supported(op: str) -> None:
    further = [ROWS[::-1], numbers(4)]
    assert_agrees(one_node(op, ROWS, further, {}, outputs=("y", "", "", "sum")), ROWS)


def test_a_file_optimised_by_onnxruntime_can_be_read(tmp_path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Transpose", ["b"], ["t"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["b", "t"], ["y"]),
    ]
    weights = [array("w", numbers(3, 2, 3, 3))]
    proto = model(nodes, [tensor("x", IMAGE.shape)], [tensor("y", None)], weights)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    session = runtime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    loaded = load_onnx(tmp_path / "optimised.onnx")
    (expected,) = session.run(None, {"x": IMAGE})
    np.testing.assert_allclose(loaded.fn(loaded.weights, IMAGE), expected, rtol=1e-5, atol=5e-6)


def test_untranslated_operators_are_refused_by_domain_and_name() -> None:
    proto = one_node("Inverse", numbers(2, 2), [], {})
    message = "com.microsoft.Inverse, opset 1"
    with pytest.raises(UnsupportedOnnxError, match=message):
        load_onnx(proto)
