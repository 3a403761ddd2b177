"""Operators whose meaning or attributes changed between opsets, compared with onnxruntime."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from onnx import helper, numpy_helper

from xrl_jax.frontends.onnx import load_onnx
from xrl_jax.frontends.onnx_ops.evaluate import FOLDING

IMAGE = (1, 2, 5, 6)


def f32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


# (operator, opset, input shape, attributes, further inputs as constants)
CASES: list[tuple[str, int, tuple[int, ...], dict[str, Any], list[Any]]] = [
    ("Softmax", 12, (2, 3, 4), {"axis": 1}, []),
    ("Softmax", 12, (2, 3, 4), {}, []),
    ("Softmax", 13, (2, 3, 4), {"axis": 1}, []),
    ("LogSoftmax", 11, (2, 3, 4), {"axis": -2}, []),
    ("Hardmax", 11, (2, 3, 4), {"axis": 1}, []),
    ("Slice", 9, (4, 5), {"starts": [1, 0], "ends": [-1, 99], "axes": [0, 1]}, []),
    ("Slice", 13, (4, 5), {}, [[-1], [-99], [1], [-2]]),
    ("Pad", 9, (2, 3), {"pads": [1, 0, 0, 2], "value": 1.5}, []),
    ("Pad", 10, (2, 3), {"pads": [0, 2, 0, 1], "mode": "reflect"}, []),
    ("Pad", 18, (2, 3), {}, [[-1, 1], np.float32(2.5), [1]]),
    ("Clip", 7, (2, 3), {"min": -0.5, "max": 0.5}, []),
    ("Clip", 10, (2, 3), {"max": 0.1}, []),
    ("Clip", 13, (2, 3), {}, [np.float32(-0.1)]),
    ("Squeeze", 11, (2, 1, 3, 1), {"axes": [1]}, []),
    ("Unsqueeze", 11, (2, 3), {"axes": [0, -1]}, []),
    ("Split", 11, (5, 2), {"axis": 0, "split": [2, 3]}, []),
    ("Split", 18, (5, 2), {"axis": 0, "num_outputs": 2}, []),
    ("ReduceSum", 11, (2, 3, 4), {"axes": [1], "keepdims": 0}, []),
    ("ReduceMean", 13, (2, 3, 4), {"axes": [-1, 0]}, []),
    ("ReduceMax", 18, (2, 3, 4), {"keepdims": 0}, [[2]]),
    ("TopK", 9, (2, 5), {"k": 2, "axis": 1}, []),
    ("TopK", 11, (2, 5), {"largest": 0}, [[3]]),
    ("Upsample", 8, IMAGE, {"scales": [1.0, 1.0, 2.0, 3.0]}, []),
    ("Upsample", 9, IMAGE, {"mode": "linear"}, [f32([1, 1, 2, 2])]),
    ("Resize", 10, IMAGE, {}, [f32([1, 1, 2, 0.5])]),
    (
        "Resize",
        11,
        IMAGE,
        {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"},
        [f32([]), f32([1, 1, 1.6, 2])],
    ),
    ("Resize", 13, IMAGE, {"mode": "nearest"}, [None, f32([1, 1, 1.6, 1.3])]),
    ("Resize", 13, IMAGE, {"mode": "linear"}, [None, f32([1, 1, 1.6, 2])]),
    ("Resize", 13, IMAGE, {"mode": "cubic"}, [None, None, [1, 2, 9, 7]]),
    ("Dropout", 9, (2, 3), {}, []),
    ("Flatten", 9, (2, 3, 4), {"axis": 2}, []),
    ("BatchNormalization", 8, IMAGE, {}, [f32(v) for v in ([1, 2], [0, 1], [1, 0], [2, 1])]),
    (
        "BatchNormalization",
        15,
        IMAGE,
        {},
        [f32(v) for v in ([1, 2], [3, 1], [1, 0], [2, 1])],
    ),
    ("AveragePool", 10, IMAGE, {"kernel_shape": [2, 2], "strides": [2, 4], "ceil_mode": 1}, []),
    ("AveragePool", 9, IMAGE, {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2]}, []),
    (
        "AveragePool",
        11,
        IMAGE,
        {"kernel_shape": [3, 3], "pads": [1, 0, 1, 2], "count_include_pad": 1},
        [],
    ),
    (
        "MaxPool",
        8,
        IMAGE,
        {"kernel_shape": [3, 3], "auto_pad": "SAME_LOWER", "strides": [2, 2]},
        [],
    ),
    ("MaxPool", 10, IMAGE, {"kernel_shape": [2, 2], "dilations": [2, 3], "ceil_mode": 1}, []),
    ("LRN", 9, (1, 5, 2, 2), {"size": 3, "alpha": 0.5}, []),
    ("ArgMax", 12, (2, 3), {"axis": 1, "keepdims": 0}, []),
    ("CumSum", 11, (2, 4), {"exclusive": 1, "reverse": 1}, [np.int64(1)]),
    ("DepthToSpace", 11, (1, 8, 2, 3), {"blocksize": 2, "mode": "CRD"}, []),
    ("GatherElements", 11, (2, 3), {"axis": -1}, [[[0, -1, 2], [2, 2, 0]]]),
    ("ScatterElements", 13, (3, 2), {}, [[[2]], f32([[7]])]),
    ("Gelu", 20, (2, 3), {"approximate": "tanh"}, []),
]


def build(op, opset, shape, attributes, further):
    """Return a model of one node; the node takes x and the constants."""
    outputs = {"Split": 2, "TopK": 2}.get(op, 1)
    constants = [
        None if value is None else numpy_helper.from_array(np.asarray(value), f"c{i}")
        for i, value in enumerate(further)
    ]
    names = ["x", *("" if c is None else c.name for c in constants)]
    made = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, names, made, name="node", **attributes)
    kinds = [7 if op == "ArgMax" or (op == "TopK" and i == 1) else 1 for i in range(outputs)]
    graph = helper.make_graph(
        [node],
        "test",
        [helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info(n, k, None) for n, k in zip(made, kinds, strict=True)],
        [c for c in constants if c is not None],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def onnxruntime_outputs(model, x):
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    providers = ["CPUExecutionProvider"]
    return runtime.InferenceSession(model.SerializeToString(), options, providers).run(
        None, {"x": x}
    )


def assert_all_close(actual, expected):
    actual = jax.tree.leaves(actual)
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=5e-6)


def name_of(case):
    return f"{case[0]}-{case[1]}-{'-'.join(case[3])}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_agrees_with_onnxruntime(case):
    model = build(*case)
    x = np.random.default_rng(0).normal(size=case[2]).astype(np.float32)
    loaded = load_onnx(model)
    assert_all_close(loaded.fn(loaded.weights, x), onnxruntime_outputs(model, x))


@pytest.mark.parametrize("case", [c for c in CASES if c[0] in FOLDING], ids=name_of)
def test_folding_a_known_input_agrees_with_onnxruntime(case):
    model = build(*case)
    x = np.random.default_rng(0).normal(size=case[2]).astype(np.float32)
    loaded = load_onnx(model, constants={"x": x})
    assert jax.make_jaxpr(loaded.fn)(loaded.weights).eqns == []
    assert_all_close(loaded.fn(loaded.weights), onnxruntime_outputs(model, x))
