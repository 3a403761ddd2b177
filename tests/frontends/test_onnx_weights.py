"""Which arrays of an ONNX model are weights and which are known values, however they are stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import TensorProto, numpy_helper
from onnx.helper import make_graph, make_node

from tests.frontends.onnx_models import FLOAT, INT64, array, model, tensor
from xrl_jax.frontends.onnx import from_onnx, load_onnx
from xrl_jax.graph.bindings import Array

WEIGHT = np.arange(12.0).reshape(4, 3)
IMAGE = tensor("x", [1, 1, 2, 2])
UPSAMPLED = [[[[1, 1, 1, 1], [1, 1, 1, 1]] * 2]]


def stored(as_constant: bool, values: Any, dtype: Any = np.float32):
    """Return the nodes and the initialisers that store the array w: one Constant node or
    initialiser.
    """
    value = numpy_helper.from_array(np.asarray(values, dtype), "w")
    if as_constant:
        return [make_node("Constant", [], ["w"], value=value)], []
    return [], [value]


VIA = {
    "itself": (make_node("Identity", ["w"], ["v"]), WEIGHT, np.float32),
    "half precision": (make_node("Cast", ["w"], ["v"], to=FLOAT), WEIGHT, np.float16),
    "a flat array": (make_node("Unsqueeze", ["w", "axes"], ["v"]), WEIGHT[:, 0], np.float32),
    "its transpose": (make_node("Transpose", ["w"], ["v"]), WEIGHT.T, np.float32),
}


@pytest.mark.parametrize("as_constant", [True, False], ids=["constant", "initialiser"])
@pytest.mark.parametrize("via", VIA)
def test_weights_stay_weights_through_other_nodes(via: str, as_constant: bool) -> None:
    node, values, dtype = VIA[via]
    values = np.tile(values, 3) if values.ndim == 1 else values
    nodes, initialisers = stored(as_constant, values, dtype)
    nodes += [node, make_node("MatMul", ["x", "v"], ["y"])]
    size = 12 if values.ndim == 1 else 4
    proto = model(
        nodes,
        [tensor("x", [1, size])],
        [tensor("y", None)],
        [*initialisers, array("axes", [1], np.int64)],
    )
    loaded = load_onnx(proto)
    x = jnp.ones((1, size))
    expected = [[54]] if values.ndim == 1 else [[18, 22, 26]]
    assert list(loaded.weights) == ["w"]
    np.testing.assert_array_equal(loaded.fn(loaded.weights, x), expected)
    program = from_onnx(proto)
    assert [b.value.shape for b in program.bindings if isinstance(b, Array)] == [values.shape]
    np.testing.assert_array_equal(program(x), expected)


def resized(*nodes, initialisers, scales):
    resize = make_node("Resize", ["x", "", scales], ["y"])
    return model([*nodes, resize], [IMAGE], [tensor("y", None)], initialisers)


SCALES = {
    "as they are": resized(initialisers=[array("s", [1, 1, 2, 2])], scales="s"),
    "through an identity": resized(
        make_node("Identity", ["s"], ["t"]), initialisers=[array("s", [1, 1, 2, 2])], scales="t"
    ),
    "cast": resized(
        make_node("Cast", ["s"], ["t"], to=FLOAT),
        initialisers=[array("s", [1, 1, 2, 2], np.float64)],
        scales="t",
    ),
    "joined": resized(
        make_node("Concat", ["ones", "twos"], ["t"], axis=0),
        initialisers=[array("ones", [1, 1]), array("twos", [2, 2])],
        scales="t",
    ),
}


@pytest.mark.parametrize("how", SCALES)
def test_scales_are_known_however_they_are_computed(how: str) -> None:
    loaded = load_onnx(SCALES[how])
    assert loaded.weights == {}
    np.testing.assert_array_equal(loaded.fn({}, jnp.ones((1, 1, 2, 2))), UPSAMPLED)


def test_scales_are_known_inside_of_branches() -> None:
    def branch(name):
        node = make_node("Resize", ["x", "", "s"], [name])
        return make_graph([node], name, [], [tensor(name, None)])

    choose = make_node("If", ["on"], ["y"], then_branch=branch("a"), else_branch=branch("b"))
    inputs = [IMAGE, tensor("on", [], TensorProto.BOOL)]
    loaded = load_onnx(model([choose], inputs, [tensor("y", None)], [array("s", [1, 1, 2, 2])]))
    y = loaded.fn({}, jnp.ones((1, 1, 2, 2)), jnp.array(True))
    np.testing.assert_array_equal(y, UPSAMPLED)


def test_sizes_may_be_products_of_a_shape_and_stored_floats() -> None:
    nodes = [
        make_node("Shape", ["x"], ["n"]),
        make_node("Cast", ["n"], ["f"], to=FLOAT),
        make_node("Mul", ["f", "s"], ["g"]),
        make_node("Cast", ["g"], ["t"], to=INT64),
        make_node("Resize", ["x", "", "", "t"], ["y"]),
    ]
    loaded = load_onnx(model(nodes, [IMAGE], [tensor("y", None)], [array("s", [1, 1, 2, 2])]))
    np.testing.assert_array_equal(loaded.fn({}, jnp.ones((1, 1, 2, 2))), UPSAMPLED)


def test_a_weight_whose_shape_is_read_stays_a_weight() -> None:
    nodes = [
        make_node("Mul", ["x", "w"], ["h"]),
        make_node("Shape", ["h"], ["n"]),
        make_node("Expand", ["h", "n"], ["y"]),
    ]
    loaded = load_onnx(
        model(nodes, [tensor("x", [3])], [tensor("y", [3])], [array("w", [1, 2, 3])])
    )
    assert list(loaded.weights) == ["w"]
    assert jax.eval_shape(loaded.fn, loaded.weights, *loaded.inputs).shape == (3,)
