"""The light networks of the onnx package, with random weights, agree with onnxruntime.

As shipped, their weights repeat one number and their outputs are uniform, so that agreement would
prove nothing. Here weights are drawn at random, and the values before the softmax are compared.
"""

from __future__ import annotations

import math
from pathlib import Path

import jax
import numpy as np
import onnx
import onnx.backend.test
import pytest
from onnx import numpy_helper

from xrl_jax.frontends.onnx import load_onnx

LIGHT = Path(onnx.backend.test.__file__).parent / "data" / "light"
SLOW_NETWORKS = (
    "bvlc_alexnet densenet121 inception_v1 inception_v2 resnet50 shufflenet vgg19 zfnet512"
).split()


def draw(role: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw weights that keep activations of order one."""
    if role == "kernel":
        return rng.normal(0, math.sqrt(2 / math.prod(shape[1:])), shape).astype(np.float32)
    if role == "positive":
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return rng.normal(0, 0.1, shape).astype(np.float32)


def role_of(model: onnx.ModelProto, name: str) -> str:
    """Return the role of a weight: "kernel", "positive" (scales and variances), or "bias" (any
    other).
    """
    for node in model.graph.node:
        slots = [i for i, read in enumerate(node.input) if read == name]
        for slot in slots:
            if node.op_type in ("Conv", "Gemm"):
                return "kernel" if slot == 1 else "bias"
            if node.op_type == "BatchNormalization":
                return "positive" if slot in (1, 4) else "bias"
            if node.op_type == "Unsqueeze":
                return role_of(model, node.output[0])
            if node.op_type == "Mul":
                return "positive"
    return "bias"


def with_random_weights(name: str) -> onnx.ModelProto:
    """Load a light network with random initialisers as its weights and its logits as output."""
    model = onnx.load(LIGHT / f"light_{name}.onnx")
    rng = np.random.default_rng(0)
    shapes = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    filled = [node for node in model.graph.node if node.op_type == "ConstantOfShape"]
    for node in filled:
        shape = tuple(int(n) for n in shapes[node.input[0]])
        weight = draw(role_of(model, node.output[0]), shape, rng)
        model.graph.initializer.append(numpy_helper.from_array(weight, node.output[0]))
        model.graph.node.remove(node)
    stored = {t.name for t in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in stored]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    last = model.graph.node[-1]
    if last.op_type == "Softmax":
        model.graph.output[0].name = last.input[0]
        model.graph.node.remove(last)
    model.ir_version = 8
    return model


def compare_with_onnxruntime(name: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model = with_random_weights(name)
    loaded = load_onnx(model)
    rng = np.random.default_rng(1)
    image = rng.normal(size=loaded.inputs[0].shape).astype(np.float32)
    session = runtime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (expected,) = session.run(None, {loaded.input_names[0]: image})
    actual = np.asarray(jax.jit(loaded.fn)(loaded.weights, image))
    spread = expected.std()
    assert spread > 1e-3 * np.abs(expected).max()  # otherwise agreement would prove nothing
    np.testing.assert_allclose(actual, expected, atol=2e-4 * spread, rtol=2e-4)


def test_squeezenet_agrees_with_onnxruntime():
    compare_with_onnxruntime("squeezenet")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_NETWORKS)
def test_network_agrees_with_onnxruntime(name):
    compare_with_onnxruntime(name)


@pytest.mark.parametrize("name", ["squeezenet", "resnet50"])
def test_traces_without_nested_jits(name):
    loaded = load_onnx(with_random_weights(name))
    jaxpr = jax.make_jaxpr(loaded.fn)(loaded.weights, *loaded.inputs)
    nested = {e.primitive.name for e in jaxpr.eqns} & {"jit", "pjit", "custom_jvp_call"}
    assert nested == set()
