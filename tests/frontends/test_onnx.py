"""load_onnx: its results, and its errors for damaged or unsupported models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.frontends.onnx_models import FLOAT, INT64, array, model, tensor
from xrl_jax.frontends.onnx import OnnxError, UnsupportedOnnxError, from_onnx, load_onnx
from xrl_jax.graph.bindings import Array


def linear_model():
    """Return a model of y = relu(x W + b) with x [2, 3], W [3, 2], b [2]."""
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["h"], name="multiply"),
        helper.make_node("Add", ["h", "b"], ["s"], name="shift"),
        helper.make_node("Relu", ["s"], ["y"], name="relu"),
    ]
    weights = [array("W", [[1, 0], [0, 1], [1, 1]]), array("b", [-1, 1])]
    return model(nodes, [tensor("x", [2, 3])], [tensor("y", [2, 2])], weights)


def primitives(fn, *args):
    return [equation.primitive.name for equation in jax.make_jaxpr(fn)(*args).eqns]


class TestFunction:
    def test_computes_the_model(self):
        loaded = load_onnx(linear_model())
        x = jnp.array([[1.0, 2.0, 3.0], [-4.0, 0.0, 1.0]])
        np.testing.assert_array_equal(loaded.fn(loaded.weights, x), [[3, 6], [0, 2]])

    def test_describes_itself(self):
        loaded = load_onnx(linear_model())
        assert loaded.inputs == (jax.ShapeDtypeStruct((2, 3), jnp.float32),)
        assert loaded.input_names == ("x",)
        assert loaded.output_names == ("y",)
        assert loaded.opset == 17
        assert {name: w.shape for name, w in loaded.weights.items()} == {"W": (3, 2), "b": (2,)}

    def test_reads_a_file(self, tmp_path):
        onnx.save(linear_model(), tmp_path / "linear.onnx")
        assert load_onnx(tmp_path / "linear.onnx").output_names == ("y",)
        assert load_onnx(str(tmp_path / "linear.onnx")).output_names == ("y",)

    def test_a_program_takes_the_inputs_and_holds_the_weights(self):
        program = from_onnx(linear_model())
        x = jnp.array([[1.0, 2.0, 3.0], [-4.0, 0.0, 1.0]])
        np.testing.assert_array_equal(program(x), [[3, 6], [0, 2]])
        assert program.in_avals == (jax.ShapeDtypeStruct((2, 3), jnp.float32),)
        held = [b.value for b in program.bindings if isinstance(b, Array)]
        assert [(type(a), a.shape) for a in held] == [(type(x), (3, 2)), (type(x), (2,))]

    def test_traces_to_plain_primitives(self):
        loaded = load_onnx(linear_model())
        names = primitives(loaded.fn, loaded.weights, *loaded.inputs)
        assert names == ["dot_general", "broadcast_in_dim", "add", "max"]

    def test_several_outputs_are_a_tuple(self):
        nodes = [helper.make_node("Split", ["x"], ["a", "b"], axis=0)]
        split = model(nodes, [tensor("x", [4])], [tensor("b", [2]), tensor("a", [2])])
        loaded = load_onnx(split)
        b, a = loaded.fn({}, jnp.arange(4.0))
        np.testing.assert_array_equal(a, [0, 1])
        np.testing.assert_array_equal(b, [2, 3])

    def test_shape_arithmetic_folds_away(self):
        nodes = [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Gather", ["s", "zero"], ["n"], axis=0),
            helper.make_node("Concat", ["n", "rest"], ["target"], axis=0),
            helper.make_node("Reshape", ["x", "target"], ["y"]),
        ]
        constants = [array("zero", [0], np.int64), array("rest", [-1], np.int64)]
        loaded = load_onnx(
            model(nodes, [tensor("x", [2, 3, 4])], [tensor("y", [2, 12])], constants)
        )
        assert primitives(loaded.fn, {}, *loaded.inputs) == ["reshape"]

    def test_nodes_may_come_in_any_order(self):
        proto = linear_model()
        nodes = list(proto.graph.node)[::-1]
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
        loaded = load_onnx(proto)
        np.testing.assert_array_equal(loaded.fn(loaded.weights, jnp.ones((2, 3))), [[1, 3], [1, 3]])

    def test_local_functions_are_inlined(self):
        body = helper.make_function(
            "custom",
            "Double",
            ["a"],
            ["c"],
            [helper.make_node("Add", ["a", "a"], ["c"])],
            [helper.make_opsetid("", 17)],
        )
        call = helper.make_node("Double", ["x"], ["y"], domain="custom")
        proto = model(
            [call],
            [tensor("x", [2])],
            [tensor("y", [2])],
            functions=[body],
            extra=[helper.make_opsetid("custom", 1)],
        )
        np.testing.assert_array_equal(load_onnx(proto).fn({}, jnp.array([1.0, 2.0])), [2, 4])

    def test_scalar_constants_are_not_weights(self):
        nodes = [helper.make_node("Mul", ["x", "half"], ["y"])]
        loaded = load_onnx(
            model(nodes, [tensor("x", [2])], [tensor("y", [2])], [array("half", 0.5)])
        )
        assert loaded.weights == {}
        jaxpr = jax.make_jaxpr(loaded.fn)({}, *loaded.inputs)
        assert "0.5" in str(jaxpr)


class TestWithoutX64:
    def test_64_bit_models_narrow_to_32(self):
        nodes = [helper.make_node("ArgMax", ["x"], ["y"], axis=0, keepdims=0)]
        proto = model(nodes, [tensor("x", [3], TensorProto.DOUBLE)], [tensor("y", [], INT64)])
        loaded = load_onnx(proto)
        assert loaded.inputs[0].dtype == np.float32
        assert loaded.fn({}, np.array([1.0, 3.0, 2.0])).dtype == np.int32

    def test_slice_ends_beyond_32_bits_still_mean_the_end(self):
        node = helper.make_node("Slice", ["x", "first", "last"], ["y"])
        bounds = [array("first", [1], np.int64), array("last", [2**63 - 1], np.int64)]
        loaded = load_onnx(model([node], [tensor("x", [4])], [tensor("y", [3])], bounds))
        np.testing.assert_array_equal(loaded.fn({}, jnp.arange(4.0)), [1, 2, 3])


class TestUnsupported:
    def test_lists_every_operator_at_once(self):
        nodes = [
            helper.make_node("NonMaxSuppression", ["x", "x"], ["a"], name="first"),
            helper.make_node("Frobnicate", ["x"], ["y"], name="second", domain="com.example"),
        ]
        extra = [helper.make_opsetid("com.example", 3)]
        proto = model(nodes, [tensor("x", [1, 1, 1])], [tensor("y", [1])], extra=extra)
        with pytest.raises(UnsupportedOnnxError) as caught:
            load_onnx(proto)
        assert "node 'first' (ai.onnx.NonMaxSuppression, opset 17)" in str(caught.value)
        assert "node 'second' (com.example.Frobnicate, opset 3)" in str(caught.value)
        assert caught.value.names == ("NonMaxSuppression", "Frobnicate")

    @pytest.mark.parametrize("kind", ["STRING", "FLOAT8E4M3FN", "INT4"])
    def test_types_are_refused_by_name(self, kind):
        node = helper.make_node("Identity", ["x"], ["y"])
        number = TensorProto.DataType.Value(kind)
        proto = model([node], [tensor("x", [1], number)], [tensor("y", [1], number)], opset=21)
        with pytest.raises(UnsupportedOnnxError, match=f"value 'x': type {kind}"):
            load_onnx(proto)

    def test_sequences_are_refused(self):
        sequence = helper.make_tensor_sequence_value_info("x", FLOAT, [2])
        node = helper.make_node("SequenceLength", ["x"], ["y"])
        with pytest.raises(UnsupportedOnnxError, match="value 'x': sequence_type"):
            load_onnx(model([node], [sequence], [tensor("y", [], INT64)]))

    @pytest.mark.parametrize("op", ["RandomNormalLike", "RandomUniformLike", "Bernoulli"])
    def test_random_operators_are_refused(self, op):
        node = helper.make_node(op, ["x"], ["y"], name="dice")
        with pytest.raises(UnsupportedOnnxError, match="RandomUniformLike|RandomNormalLike"):
            load_onnx(model([node], [tensor("x", [2])], [tensor("y", [2])]))

    def test_dropout_in_training_is_refused(self):
        node = helper.make_node("Dropout", ["x", "ratio", "training"], ["y"], name="drop")
        constants = [array("ratio", 0.5), array("training", True, np.bool_)]
        with pytest.raises(UnsupportedOnnxError, match="node 'drop'.*training mode"):
            load_onnx(model([node], [tensor("x", [2])], [tensor("y", [2])], constants))

    def test_dropout_at_inference_is_the_identity(self):
        node = helper.make_node("Dropout", ["x"], ["y"])
        loaded = load_onnx(model([node], [tensor("x", [2])], [tensor("y", [2])]))
        assert primitives(loaded.fn, {}, *loaded.inputs) == []

    @pytest.mark.parametrize(
        ("opset", "message"), [(6, "older than 7, where Add changed"), (999, "newer")]
    )
    def test_opset_out_of_range(self, opset, message):
        proto = linear_model()
        proto.opset_import[0].version = opset
        with pytest.raises(UnsupportedOnnxError, match=f"opset {opset}.*{message}"):
            load_onnx(proto)


class TestDamaged:
    def test_missing_file(self, tmp_path):
        with pytest.raises(OnnxError, match="none.onnx: cannot be read: No such file"):
            load_onnx(tmp_path / "none.onnx")

    def test_not_a_protobuf(self, tmp_path):
        (tmp_path / "text.onnx").write_text("This is not a model.\n")
        with pytest.raises(OnnxError, match="not an ONNX file"):
            load_onnx(tmp_path / "text.onnx")

    def test_empty_file(self, tmp_path):
        (tmp_path / "empty.onnx").write_bytes(b"")
        with pytest.raises(OnnxError, match="truncated or not an ONNX file"):
            load_onnx(tmp_path / "empty.onnx")

    def test_truncation_anywhere_is_an_onnx_error(self, tmp_path):
        whole = linear_model().SerializeToString()
        path = tmp_path / "cut.onnx"
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(OnnxError):
                load_onnx(path)

    def test_flipped_bytes_give_an_onnx_error_or_a_model(self, tmp_path):
        whole = linear_model().SerializeToString()
        path = tmp_path / "flipped.onnx"
        rng = np.random.default_rng(0)
        refused = 0
        for _ in range(200):
            damaged = bytearray(whole)
            damaged[rng.integers(len(whole))] = rng.integers(256)
            path.write_bytes(damaged)
            try:
                load_onnx(path)
            except OnnxError:
                refused += 1
        assert refused > 100

    def test_cycle(self):
        nodes = [
            helper.make_node("Add", ["x", "b"], ["a"], name="one"),
            helper.make_node("Relu", ["a"], ["b"], name="two"),
        ]
        with pytest.raises(OnnxError, match="cycle through the nodes 'one', 'two'"):
            load_onnx(model(nodes, [tensor("x", [2])], [tensor("b", [2])]))

    def test_missing_initialiser(self):
        proto = linear_model()
        del proto.graph.initializer[0]
        with pytest.raises(OnnxError, match="node 'multiply' .MatMul. reads 'W', which is neither"):
            load_onnx(proto)

    def test_dangling_output(self):
        proto = linear_model()
        proto.graph.output[0].name = "nowhere"
        with pytest.raises(OnnxError, match="output 'nowhere' is not made by any node"):
            load_onnx(proto)

    def test_duplicate_value(self):
        proto = linear_model()
        proto.graph.node[1].output[0] = "h"
        with pytest.raises(OnnxError, match="makes the value 'h' 2 times"):
            load_onnx(proto)

    def test_duplicate_initialiser(self):
        proto = linear_model()
        proto.graph.initializer.append(proto.graph.initializer[0])
        with pytest.raises(OnnxError, match="two initialisers named 'W'"):
            load_onnx(proto)

    def test_initialiser_of_wrong_length(self):
        proto = linear_model()
        proto.graph.initializer[0].raw_data = b"\0" * 8
        with pytest.raises(OnnxError, match="initialiser 'W' of shape .* needs 24 bytes and has 8"):
            load_onnx(proto)

    def test_shapes_that_do_not_match_name_the_node(self):
        proto = linear_model()
        proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 4
        with pytest.raises(OnnxError, match=r"node 'multiply'.*float32\[2, 4\], float32\[3, 2\]"):
            load_onnx(proto)


class TestExternalData:
    def save(self, folder, location, **entries):
        """Save the linear model with W in an external file. Return the path of the model and the 24
        bytes of W, which the caller writes.
        """
        proto = linear_model()
        weight = proto.graph.initializer[0]
        data = weight.raw_data
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, **entries}.items():
            weight.external_data.add(key=key, value=str(value))
        folder.mkdir(exist_ok=True)
        (folder / "model.onnx").write_bytes(proto.SerializeToString())
        return folder / "model.onnx", data

    def test_is_read_from_beside_the_model(self, tmp_path):
        path, data = self.save(tmp_path, "sub/w.bin", offset=4, length=24)
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "w.bin").write_bytes(b"skip" + data)
        np.testing.assert_array_equal(load_onnx(path).weights["W"], [[1, 0], [0, 1], [1, 1]])

    def test_path_traversal_is_refused(self, tmp_path):
        path, data = self.save(tmp_path / "inner", "../w.bin")
        (tmp_path / "w.bin").write_bytes(data)
        with pytest.raises(OnnxError, match="'W': external data '../w.bin' is outside"):
            load_onnx(path)

    def test_absolute_path_is_refused(self, tmp_path):
        path, data = self.save(tmp_path, str(tmp_path / "w.bin"))
        (tmp_path / "w.bin").write_bytes(data)
        with pytest.raises(OnnxError, match="is outside the model's folder"):
            load_onnx(path)

    def test_symlink_that_leads_out_is_refused(self, tmp_path):
        path, data = self.save(tmp_path / "inner", "w.bin")
        (tmp_path / "secret.bin").write_bytes(data)
        (tmp_path / "inner" / "w.bin").symlink_to(tmp_path / "secret.bin")
        with pytest.raises(OnnxError, match="is outside the model's folder"):
            load_onnx(path)

    def test_missing_file(self, tmp_path):
        path, _ = self.save(tmp_path, "w.bin")
        with pytest.raises(OnnxError, match="external data 'w.bin' is missing"):
            load_onnx(path)

    def test_short_file(self, tmp_path):
        path, data = self.save(tmp_path, "w.bin", length=24)
        (tmp_path / "w.bin").write_bytes(data[:20])
        with pytest.raises(OnnxError, match="too short: it needs 24 bytes and has 20"):
            load_onnx(path)

    def test_short_file_without_length(self, tmp_path):
        path, data = self.save(tmp_path, "w.bin")
        (tmp_path / "w.bin").write_bytes(data[:20])
        with pytest.raises(OnnxError, match="needs 24 bytes and has 20"):
            load_onnx(path)

    def test_model_in_memory_needs_its_path(self, tmp_path):
        path, _ = self.save(tmp_path, "w.bin")
        proto = onnx.load(path, load_external_data=False)
        with pytest.raises(OnnxError, match="give the path of the model"):
            load_onnx(proto)
