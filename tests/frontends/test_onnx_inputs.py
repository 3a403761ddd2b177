"""Sizes and values that an ONNX model leaves open about its inputs, and how callers give them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.frontends.onnx_models import FLOAT, INT64, array, model, tensor
from xrl_jax.frontends.onnx import OnnxError, UnsupportedOnnxError, from_onnx, load_onnx


def open_model(*shape):
    """Return a model of y = relu(x), with x of the given shape: sizes, names or None."""
    node = helper.make_node("Relu", ["x"], ["y"])
    return model([node], [tensor("x", shape)], [tensor("y", shape)])


def two_inputs():
    """Return a model of mask [batch, seq] times x [seq, 3], and of n [2], which leaves nothing
    open.
    """
    nodes = [helper.make_node("MatMul", ["mask", "x"], ["y"])]
    inputs = [tensor("x", ["seq", 3]), tensor("mask", ["batch", "seq"]), tensor("n", [2])]
    return model([*nodes, helper.make_node("Neg", ["n"], ["z"])], inputs, [tensor("y", None)])


class TestSizes:
    def test_all_open_dimensions_are_asked_for_at_once(self):
        message = (
            "input 'x' has shape [seq, 3], input 'mask' has shape [batch, seq]: specify "
            "the open sizes with dimensions={'seq': ..., 'batch': ...} or with "
            "input_shapes={'x': (...), 'mask': (...)}"
        )
        with pytest.raises(OnnxError) as caught:
            load_onnx(two_inputs())
        assert str(caught.value) == message

    def test_unnamed_dimensions_are_asked_for_by_whole_shapes(self):
        message = (
            r"^input 'x' has shape \[\?, 3\]: specify the open sizes with "
            r"input_shapes=\{'x': \(...\)\}$"
        )
        with pytest.raises(OnnxError, match=message):
            load_onnx(open_model(None, 3))

    def test_input_shapes_fill_open_dimensions(self):
        loaded = load_onnx(open_model("batch", 3), input_shapes={"x": (5, 3)})
        assert loaded.inputs[0].shape == (5, 3)

    def test_named_dimensions_apply_to_all_inputs(self):
        program = from_onnx(two_inputs(), dimensions={"seq": 4, "batch": 2})
        assert [aval.shape for aval in program.in_avals] == [(4, 3), (2, 4), (2,)]

    def test_only_dimensions_that_are_still_open_are_asked_for(self):
        message = (
            r"^input 'mask' has .*: specify the open sizes with dimensions=\{'batch': ...\} or"
        )
        with pytest.raises(OnnxError, match=message):
            load_onnx(two_inputs(), dimensions={"seq": 4})

    def test_negative_sizes_are_open_dimensions(self):
        loaded = load_onnx(open_model(-1, 3), input_shapes={"x": (5, 3)})
        assert loaded.inputs[0].shape == (5, 3)
        with pytest.raises(
            OnnxError, match=r"input 'x' has shape \[\?, 3\]: specify the open sizes"
        ):
            load_onnx(open_model(-1, 3))

    @pytest.mark.parametrize("shape", [(5, 4), (5,)])
    def test_input_shapes_must_fit(self, shape):
        with pytest.raises(OnnxError, match=r"input 'x' has shape \[batch, 3\], which \(5,.*fit"):
            load_onnx(open_model("batch", 3), input_shapes={"x": shape})

    def test_shapes_and_dimensions_must_agree(self):
        with pytest.raises(OnnxError, match=r"\[batch, 3\], which \(5, 3\) does not fit"):
            load_onnx(open_model("batch", 3), input_shapes={"x": (5, 3)}, dimensions={"batch": 4})

    def test_input_shapes_must_name_inputs(self):
        with pytest.raises(OnnxError, match="'z' is not an input of the model"):
            load_onnx(open_model("batch", 3), input_shapes={"z": (1,)})

    def test_unknown_dimensions_are_refused(self):
        message = r"no input of the model has a dimension 'n' \(known: 'batch'\)"
        with pytest.raises(OnnxError, match=message):
            load_onnx(open_model("batch", 3), dimensions={"n": 1})


def reshape_model(*between):
    """Return a model of y = reshape(x, s), where s may first go through other nodes."""
    target = between[-1].output[0] if between else "s"
    node = helper.make_node("Reshape", ["x", target], ["y"], name="reshape")
    inputs = [tensor("x", [6]), tensor("s", [2], INT64)]
    return model([*between, node], inputs, [tensor("y", None)])


def branch(name, columns):
    """Return a graph that multiplies reshape(x, [-1, columns]) by ones [columns, 2]."""
    nodes = [
        helper.make_node("Reshape", ["x", f"s{name}"], [f"r{name}"], name=f"fold_{name}"),
        helper.make_node("MatMul", [f"r{name}", f"w{name}"], [name]),
    ]
    constants = [
        array(f"s{name}", [-1, columns], np.int64),
        array(f"w{name}", np.ones((columns, 2))),
    ]
    return helper.make_graph(nodes, name, [], [tensor(name, None)], constants)


def by_rate(condition, *constants, then=6, other=5):
    """Return a model with two branches on x [1, 6], of which a condition on the input rate takes
    one.
    """
    choose = helper.make_node(
        "If",
        [condition[-1].output[0]],
        ["y"],
        name="choose",
        then_branch=branch("a", then),
        else_branch=branch("b", other),
    )
    inputs = [tensor("x", [1, 6]), tensor("rate", [], INT64)]
    return model([*condition, choose], inputs, [tensor("y", None)], constants)


EQUAL = [helper.make_node("Equal", ["rate", "known"], ["c"])]
KNOWN = array("known", 16000, np.int64)


class TestConstants:
    def test_unknown_shape_argument_asks_for_constants(self):
        message = r"node 'reshape' \(ai.onnx.Reshape, opset 17\).*constants=\{'s': ...\}"
        with pytest.raises(UnsupportedOnnxError, match=message):
            load_onnx(reshape_model())

    def test_the_input_is_asked_for_and_not_a_value_computed_from_it(self):
        doubled = helper.make_node("Add", ["s", "s"], ["t"])
        with pytest.raises(UnsupportedOnnxError, match=r"constants=\{'s': ...\}"):
            load_onnx(reshape_model(doubled))

    def test_constants_make_an_input_known(self):
        loaded = load_onnx(reshape_model(), constants={"s": np.array([2, 3])})
        assert loaded.input_names == ("x",)
        assert loaded.fn({}, jnp.arange(6.0)).shape == (2, 3)

    def test_constants_may_be_numbers(self):
        loaded = load_onnx(reshape_model(), constants={"s": [3, 2]})
        assert loaded.fn({}, jnp.arange(6.0)).shape == (3, 2)

    def test_constants_take_the_type_and_rank_of_the_input(self):
        node = helper.make_node("Add", ["x", "n"], ["y"])
        proto = model([node], [tensor("x", [2]), tensor("n", [1])], [tensor("y", [2])])
        loaded = load_onnx(proto, constants={"n": 1})
        np.testing.assert_array_equal(loaded.fn({}, jnp.zeros(2)), [1, 1])

    @pytest.mark.parametrize(
        ("value", "message"),
        [([1, 2, 3], r"shape \[2\], which a constant of shape \[3\]"), ([0.5, 1], "type int64")],
    )
    def test_constants_must_fit(self, value, message):
        with pytest.raises(OnnxError, match=f"input 's' has {message}.* does not fit"):
            load_onnx(reshape_model(), constants={"s": value})


class TestBranches:
    def test_a_failing_branch_asks_for_the_input_that_decides(self):
        message = (
            r"node 'choose' .*a condition that is not known.*where the else_branch fails "
            r"\(node 'fold_b'.*the input 'rate' .*constants=\{'rate': ...\}"
        )
        with pytest.raises(UnsupportedOnnxError, match=message):
            load_onnx(by_rate(EQUAL, KNOWN))

    def test_branches_of_different_shapes_ask_for_the_input_that_decides(self):
        message = r"its branches have different shapes.*constants=\{'rate': ...\}"
        with pytest.raises(UnsupportedOnnxError, match=message):
            load_onnx(by_rate(EQUAL, KNOWN, other=3))

    def test_a_constant_selects_the_branch(self):
        loaded = load_onnx(by_rate(EQUAL, KNOWN), constants={"rate": 16000})
        np.testing.assert_array_equal(loaded.fn({}, jnp.ones((1, 6))), [[6, 6]])

    def test_all_inputs_that_decide_are_named(self):
        condition = [
            helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
            helper.make_node("Cast", ["m"], ["i"], to=TensorProto.INT64),
            helper.make_node("Greater", ["i", "rate"], ["c"]),
        ]
        with pytest.raises(UnsupportedOnnxError, match=r"constants=\{'x': ..., 'rate': ...\}"):
            load_onnx(by_rate(condition))

    def test_a_condition_inside_of_a_branch_is_found(self):
        inner = by_rate(EQUAL, KNOWN).graph
        nested = helper.make_graph(inner.node, "inner", [], [tensor("y", None)], [KNOWN])
        other = helper.make_graph(
            [helper.make_node("ReduceSum", ["x"], ["z"])], "other", [], [tensor("z", None)]
        )
        choose = helper.make_node("If", ["on"], ["out"], then_branch=nested, else_branch=other)
        inputs = [*inner.input, tensor("on", [], TensorProto.BOOL)]
        with pytest.raises(UnsupportedOnnxError, match=r"\{'rate': ..., 'on': ...\}"):
            load_onnx(model([choose], inputs, [tensor("out", None, FLOAT)]))
