"""A region is one node, timed as XLA compiles it in a network; its key identifies what is timed."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.cost.regions import (
    Region,
    loops,
    region_fn,
    region_job,
    region_key,
    region_of,
    region_sample,
    wrapping_passes,
)
from xrl_jax.cost.roofline import cost_table
from xrl_jax.cost.view import CostView, view_graph
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, build, pack_attrs
from xrl_jax.libraries.onednn import calls as onednn
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.lower.table import number_of
from xrl_jax.measure.base import EVERYTHING


def contract(dtype: str) -> tuple[int, ...]:
    dims = {"lhs_contract": ops.pack_dims((1,)), "rhs_contract": ops.pack_dims((0,))}
    return pack_attrs("dot", {**dims, "dtype": ops.DTYPE_CODE[dtype]})


CONTRACT = contract("float32")
DOT = Node("dot", (0, 1), CONTRACT, shape=(4, 8))
LEFT, RIGHT = Node("input", shape=(4, 6), ref=0), Node("weight", shape=(6, 8), ref=1)
REGION = Region(DOT, (LEFT, RIGHT), (DOT.spec.code, 0, 0))
TURN = pack_attrs("transpose", {"perm": (1, 0)})


def test_a_region_is_made_from_a_node_of_a_graph():
    graph = build((LEFT, RIGHT, DOT), [2], bucket=64)
    host = CostView(*(np.asarray(f) for f in view_graph(cost_table({}).sharing, graph)))  # type: ignore[arg-type]
    assert region_of(host, (3,), "cpu") == REGION
    assert REGION.op_class == "dot"


def test_the_key_depends_on_lowering_weights_and_options_only():
    other = Region(Node("dot", (0, 1), CONTRACT, 1, (4, 8)), (LEFT, RIGHT))
    both_inputs = Region(DOT, (LEFT, Node("input", shape=(6, 8), ref=1)))
    keys = [
        region_key(REGION, ()),
        region_key(other, ()),
        region_key(both_inputs, ()),
        region_key(REGION, (("a", "1"),)),
    ]
    assert len(set(keys)) == 4
    assert region_key(REGION, (("a", "1"), ("b", "2"))) == region_key(
        REGION, (("b", "2"), ("a", "1"))
    )


def test_a_float_operator_is_timed_between_elementwise_operations():
    x, w = -jnp.ones((4, 6)), jnp.ones((6, 8))
    (out,) = region_fn(REGION)(x, w, jnp.float32(0.0))
    assert (out == 0.0).all()  # max(x, 0) @ w, then max(..., 0)
    (out,) = region_fn(REGION)(x, w, jnp.float32(-100.0))
    assert (out == -6.0).all()


def test_movement_is_timed_after_an_operation_and_integers_alone():
    move = Region(Node("transpose", (0,), TURN, shape=(6, 4)), (LEFT,))
    (out,) = region_fn(move)(-jnp.ones((4, 6)), jnp.float32(-0.5))
    assert (out == -0.5).all() and out.shape == (6, 4)
    left, right = (
        Node("input", shape=(4, 6), dtype="int32"),
        Node("input", shape=(6, 8), dtype="int32"),
    )
    whole = Region(
        Node("dot", (0, 1), contract("int32"), shape=(4, 8), dtype="int32"), (left, right)
    )
    (out,) = region_fn(whole)(-jnp.ones((4, 6), int), jnp.ones((6, 8), int), jnp.float32(0.0))
    assert (out == -6).all()


def test_a_job_takes_prepared_weights_and_the_inputs():
    job = region_job(REGION, (("xla_cpu_enable_fast_math", "true"),))
    assert job.key == region_key(REGION, job.options)
    shapes = [a.shape for a in jax.export.deserialize(bytearray(job.artifact)).in_avals]
    assert sorted(shapes) == [(), (4, 6), (6, 8)]


def test_work_on_weights_is_not_part_of_the_job():
    double = pack_attrs("transpose", {"perm": (1, 0)})
    turned = Region(Node("transpose", (0,), double, shape=(8, 6)), (RIGHT,))
    job = region_job(turned, ())
    assert "transpose" not in jax.export.deserialize(bytearray(job.artifact)).mlir_module()


def test_a_sample_has_the_regions_flops_and_bytes():
    sample = region_sample(REGION, 0.5)
    assert (sample.op_class, sample.flops, sample.bytes, sample.seconds) == (
        "dot",
        384.0,
        416.0,
        0.5,
    )


def test_wrapping_adds_a_read_and_a_write_of_inputs_and_result():
    assert wrapping_passes(REGION) == 2 * (4 * 32, 4 * 24)  # the weight is not wrapped
    assert wrapping_passes(Region(Node("transpose", (0,), TURN, shape=(6, 4)), (LEFT,))) == ()


def test_small_regions_are_timed_as_copies_that_depend_on_each_other():
    """An element of each copy's result enters the scalar that the next one's inputs are compared
    with.
    """
    assert REGION.copies == 16
    job = region_job(REGION, ())
    exported = jax.export.deserialize(bytearray(job.artifact))
    assert exported.mlir_module().count("stablehlo.while") == 1
    w, x, floor = jnp.ones((6, 8)), -jnp.ones((4, 6)), jnp.float32(-100.0)
    (out,) = exported.call((w,), [x, floor])
    assert (out == -6.0).all()


def convolution() -> Region:
    x, w = jnp.ones((1, 2, 4, 4)), jnp.ones((3, 2, 1, 1))
    fn = functools.partial(jax.lax.conv, window_strides=(1, 1), padding="SAME")
    graph = from_jax(fn, x, w, weights=(1,)).graph
    host = CostView(*(np.asarray(f) for f in view_graph(cost_table({}).sharing, graph)))  # type: ignore[arg-type]
    return region_of(host, (int(np.flatnonzero(host.op == ops.OPS["conv"].code)[0]),), "cpu")


def test_only_weights_of_convolutions_are_constants():
    for region, constants in ((convolution(), 1), (REGION, 0)):
        asked, plain = (region_job(region, (), constants=c) for c in (True, False))
        assert (asked.constants, plain.constants) == (constants, 0)
        assert (asked.key != plain.key) is bool(constants)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2048, 2048), "float32"), ((4, 6), "int32"), ((4, 0), "float32")],
    ids=["large", "integers", "empty"],
)
def test_large_and_empty_regions_and_integers_are_timed_without_copies(shape, dtype):
    sides = tuple(Node("input", shape=shape, dtype=dtype, ref=i) for i in (0, 1))
    assert Region(Node("add", (0, 1), shape=shape, dtype=dtype), sides).copies == 1


def test_convolutions_of_xla_are_timed_without_copies():
    """XLA:CPU compiles convolutions differently inside a loop."""
    image, kernel = Node("input", shape=(1, 3, 4, 4)), Node("weight", shape=(3, 3, 1, 1))
    assert Region(Node("conv", (0, 1), shape=(1, 3, 4, 4)), (image, kernel)).copies == 1


def test_on_a_gpu_a_region_is_a_kernel_of_which_programs_hold_several_copies():
    """The time of a single call would include its launch and the wait for its result."""
    row = Node("input", shape=(64,), ref=0)
    job = region_job(Region(Node("add", (0, 1), shape=(64,)), (row, row), platform="gpu"), ())
    assert (job.slope, job.any_layout) == ((8, 24), EVERYTHING)
    exported = jax.export.deserialize(bytearray(job.artifact))
    assert "while" not in exported.mlir_module()


def test_calibration_loops_are_sums_of_several_sizes():
    assert [r.node.shape for r in loops("cpu")] == [(4096,), (32768,), (262144,), (2097152,)]
    assert [r.copies for r in loops("cpu")] == [16, 16, 12, 1]


def test_the_error_for_an_unknown_lowering_names_the_operator():
    with pytest.raises(Exception, match="dot"):
        region_job(Region(Node("dot", (0, 1), CONTRACT, 99, (4, 8)), (LEFT, RIGHT)), ())


@pytest.mark.skipif(not onednn.available(), reason="jaxlib has no oneDNN here")
def test_a_relu_that_would_lose_nan_is_timed_after_the_lowering(monkeypatch):
    for module in ("calls", "library"):
        monkeypatch.setattr(f"xrl_jax.libraries.onednn.{module}.library", lambda: None)
    number = number_of("dot", "onednn")
    region = replace(REGION, node=replace(DOT, lowering=number))
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 6), (6, 8), ())]
    text = jax.jit(region_fn(region)).lower(*avals).as_text()
    assert "RELU" not in text and text.count("maximum") == 2  # before and after


@pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
def test_kernels_of_a_partition_are_timed_several_per_call():
    region = replace(REGION, node=replace(DOT, lowering=number_of("dot", "onednn")))
    assert (region.in_partition, region.copies, wrapping_passes(region)) == (True, 16, ())
    job = region_job(region, ())
    assert [t.data[1] for t in job.custom_calls] == ["run"]
    assert job.custom_calls[0].data[2].count("Dot") == 16
    large = Node("dot", (0, 1), CONTRACT, region.node.lowering, (4096, 8192))
    sides = (Node("input", shape=(4096, 8192)), Node("weight", shape=(8192, 8192)))
    assert Region(large, sides).copies == 2
