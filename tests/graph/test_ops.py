"""The op table: codes, fields, packed dimensions, layouts and precisions."""

from __future__ import annotations

import jax
import pytest
from jax import lax

from xrl_jax.graph import attributes, ops, shapes
from xrl_jax.graph.graph import GraphError, Node, pack_attrs


def test_the_code_of_an_op_is_its_position_and_zero_is_the_hole():
    assert ops.HOLE == 0
    assert [spec.code for spec in ops.OPS.values()] == list(range(ops.N_OPS))


@pytest.mark.parametrize("spec", ops.OPS.values(), ids=lambda s: s.name)
def test_every_op_has_a_shape_rule_and_fields_that_fit_and_do_not_overlap(spec):
    assert spec.shape in shapes.SHAPE_RULES
    assert spec.arity[0] <= spec.arity[1] <= ops.MAX_ARGS
    taken = [i for f in spec.fields for i in range(f.offset, f.offset + f.width)]
    assert sorted(taken) == list(range(len(taken)))
    assert len(taken) <= ops.MAX_ATTRS


def test_an_unknown_attribute_is_named_with_the_known_ones():
    with pytest.raises(KeyError, match="'concat' has no attribute 'axes'.*axis"):
        ops.OPS["concat"].field("axes")


@pytest.mark.parametrize(
    ("op", "dtypes", "taken"),
    [
        ("add", ("float32", "float32"), True),
        ("add", ("float32", "int32"), False),
        ("add", ("bool", "bool"), False),
        ("and", ("bool", "bool"), True),
        ("exp", ("int32",), False),
        ("pow", ("float32", "int32"), True),
        ("select", ("bool", "int8", "int8"), True),
        ("select", ("int8", "int8", "int8"), False),
        ("dot", ("bfloat16", "float32"), True),
        ("conv", ("bfloat16", "float32"), False),
        ("opaque", ("extended", "bool"), True),
    ],
)
def test_operators_accept_only_allowed_combinations_of_dtypes(op, dtypes, taken):
    assert ops.OPS[op].takes_dtypes(dtypes) == taken


def test_normal_resets_attributes_beyond_the_rank_and_the_fields():
    attrs = pack_attrs("slice", {"start": (2, 7), "limit": (5,)})
    node = Node("slice", (0,), (*attrs[:13], 4, *attrs[14:]), shape=(3,))
    assert attributes.normal(node, 1) == pack_attrs("slice", {"start": (2,), "limit": (5,)})


def test_dimensions_are_packed_base_eight_lowest_first():
    assert ops.pack_dims(()) == 0
    assert ops.pack_dims((0,)) == 1
    assert ops.pack_dims((1, 0)) == 2 + 8
    assert ops.unpack_dims(2 + 8) == (1, 0)
    assert ops.unpack_dims(ops.pack_dims((5, 4, 3, 2, 1, 0))) == (5, 4, 3, 2, 1, 0)


def test_a_dimension_beyond_the_rank_is_refused():
    with pytest.raises(ValueError, match="dimension 6"):
        ops.pack_dims((6,))


def test_masks_hold_sets_of_axes():
    assert ops.mask_of((3, 0)) == 0b1001
    assert ops.axes_of(0b1001) == (0, 3)


def test_layouts_are_those_of_convolution_dimension_numbers():
    numbers = lax.conv_dimension_numbers((1, 8, 8, 3), (3, 3, 3, 4), ("NHWC", "HWIO", "NHWC"))
    assert ops.LAYOUTS[ops.LAYOUT_CODE[tuple(numbers.lhs_spec)]] == (0, 3, 1, 2)
    assert ops.LAYOUTS[ops.LAYOUT_CODE[tuple(numbers.rhs_spec)]] == (3, 2, 0, 1)
    assert len(ops.LAYOUTS) == 6 + 24


def test_precisions_survive_coding():
    high, highest = lax.Precision.HIGH, lax.Precision.HIGHEST
    assert ops.encode_precision(None) == 0
    assert ops.decode_precision(0) is None
    assert ops.decode_precision(ops.encode_precision(highest)) == (highest, highest)  # type: ignore[arg-type]
    assert ops.decode_precision(ops.encode_precision((high, highest))) == (high, highest)  # type: ignore[arg-type]
    preset = lax.DotAlgorithmPreset.BF16_BF16_F32_X3
    assert ops.decode_precision(ops.encode_precision(preset)) == preset  # type: ignore[arg-type]


def test_an_unknown_precision_is_encoded_as_none():
    algorithm = lax.DotAlgorithm(
        jax.numpy.float32, jax.numpy.float32, jax.numpy.float32, 1, 1, 1, False
    )
    assert ops.encode_precision(algorithm) is None


def test_attributes_are_packed_by_name_and_filled_up():
    attrs = pack_attrs("transpose", {"perm": (1, 0)})
    assert attrs == (1, 0, 2, 3, 4, 5) + (0,) * 12
    node = Node("slice", (0,), pack_attrs("slice", {"start": (2,), "limit": (5,)}))
    assert node.attr("start") == (2, 0, 0, 0, 0, 0)
    assert node.attr("limit") == (5, 1, 1, 1, 1, 1)
    assert node.attr("stride") == (1, 1, 1, 1, 1, 1)


def test_attributes_that_do_not_exist_or_fit_are_refused():
    with pytest.raises(KeyError, match="no attribute 'axis'"):
        pack_attrs("add", {"axis": 1})
    with pytest.raises(GraphError, match="perm takes 6 values, got 7"):
        pack_attrs("transpose", {"perm": tuple(range(7))})
