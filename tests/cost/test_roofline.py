"""Costs inside jit: signatures, the table of timings, the roofline, and its calibrated rates."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.cost import roofline
from xrl_jax.cost.config import CostConfig
from xrl_jax.cost.rates import DEFAULT_RATES, Rates, first_rates
from xrl_jax.cost.view import (
    CLASSES,
    CORRECTED,
    CostView,
    in_other_layout,
    lowering_kind_of,
    signature,
    view_graph,
)
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, build, pack_attrs
from xrl_jax.lower.table import number_of
from xrl_jax.runtime import engine_jit

SUM = pack_attrs("reduce_sum", {"axes": 1})  # of axis 0
TABLE = roofline.cost_table({})
VIEW = jax.jit(functools.partial(view_graph, TABLE.sharing))
SIGNATURES = jax.jit(signature)
SECONDS = jax.jit(lambda table, view: table.seconds(view))
# A machine with round numbers.
PLAIN = Rates(
    flop_rate=dict.fromkeys(CLASSES, 1000.0),
    bandwidth=dict.fromkeys(CLASSES, 100.0),
    overhead=dict.fromkeys(CLASSES, 0.5),
    scale=dict.fromkeys(CORRECTED, 1.0),
)


def matrix(op="input", shape=(4, 6), dtype="float32", ref=0) -> Node:
    return Node(op, shape=shape, dtype=dtype, ref=ref)


def dot(shape=(4, 8), lowering=0, dtype="float32") -> Node:
    attrs = pack_attrs(
        "dot",
        {"lhs_contract": ops.pack_dims((1,)), "rhs_contract": ops.pack_dims((0,))},
    )
    return Node("dot", (0, 1), attrs, lowering, shape, dtype)


def view(*nodes: Node) -> CostView:
    """Return the views of a graph of these nodes; the last one is its output."""
    return VIEW(build(nodes, [len(nodes) - 1], bucket=64))


def of_last(nodes, values) -> jax.Array:
    return values[len(nodes)]


def key(*nodes: Node) -> tuple[int, int]:
    a, b = of_last(nodes, SIGNATURES(view(*nodes))).tolist()
    return a, b


def cost(nodes, timings=None, rates: Rates = PLAIN) -> float:
    return float(of_last(nodes, SECONDS(roofline.cost_table(timings or {}, rates), view(*nodes))))


DOT = (matrix(), matrix(shape=(6, 8), ref=1), dot())


# Signatures -------------------------------------------------------------------------------------


def test_the_signature_ignores_place_and_binding():
    elsewhere = (matrix(ref=7), matrix(shape=(6, 8), ref=3), dot())
    assert key(*DOT) == key(*elsewhere)


@pytest.mark.parametrize(
    "other",
    [
        (matrix(), matrix(shape=(6, 8)), dot(lowering=1)),
        (matrix(shape=(5, 6)), matrix(shape=(6, 8)), dot(shape=(5, 8))),
        (matrix(dtype="bfloat16"), matrix(shape=(6, 8), dtype="bfloat16"), dot(dtype="bfloat16")),
        (matrix(), matrix("weight", (6, 8)), dot()),
        (matrix("weight"), matrix(shape=(6, 8)), dot()),
    ],
    ids=["lowering", "shape", "dtype", "right argument is a weight", "left argument is a weight"],
)
def test_the_signature_depends_on_lowering_shapes_dtypes_and_weights(other):
    assert key(*DOT) != key(*other)


def test_the_signature_depends_on_attributes():
    other = pack_attrs("reduce_sum", {"axes": 2})
    square = matrix(shape=(6, 6))
    rows = key(square, Node("reduce_sum", (0,), SUM, shape=(6,)))
    assert rows != key(square, Node("reduce_sum", (0,), other, shape=(6,)))


# The table --------------------------------------------------------------------------------------


def test_a_timing_is_found_by_both_words_of_its_signature():
    table = roofline.cost_table({(5, 9): 0.25, (2, 4): 0.5, (7, 7): 1.0})
    keys = jnp.asarray([[5, 9], [2, 4], [5, 8], [6, 0]], jnp.uint32)
    seconds, known = jax.jit(lambda table, keys: table.lookup(keys))(table, keys)
    assert known.tolist() == [True, True, False, False]
    assert seconds[:2].tolist() == [0.25, 0.5]


def test_timings_within_a_bucket_do_not_change_the_tables_shape():
    assert roofline.cost_table({}).keys.shape == roofline.cost_table({(1, 1): 1.0}).keys.shape


def test_a_measured_time_replaces_the_roofline():
    assert cost(DOT, {key(*DOT): 3.0}) == 3.0


def test_the_scale_of_a_class_applies_to_measured_times_too():
    scaled = Rates(PLAIN.flop_rate, PLAIN.bandwidth, PLAIN.overhead, {**PLAIN.scale, "dot": 2.0})
    assert cost(DOT, {key(*DOT): 3.0}, scaled) == 6.0


# The roofline -----------------------------------------------------------------------------------


def test_a_contraction_is_bound_by_the_slower_of_flops_and_bytes():
    # 2 * 4 * 6 * 8 flops at 1000 per second; 4 (24 + 48 + 32) bytes at 100 per second.
    assert cost(DOT) == pytest.approx(max(0.384, 4.16) + 0.5)
    fast_memory = Rates(
        PLAIN.flop_rate, {**PLAIN.bandwidth, "dot": 1e6}, PLAIN.overhead, PLAIN.scale
    )
    assert cost(DOT, rates=fast_memory) == pytest.approx(0.384 + 0.5)


def test_a_reduction_reads_its_argument_and_writes_its_result():
    nodes = (matrix(), Node("reduce_sum", (0,), SUM, shape=(6,)))
    assert cost(nodes) == pytest.approx(4 * (24 + 6) / 100 + 0.5)


def test_a_scalar_is_read_for_nothing():
    rates = Rates(
        PLAIN.flop_rate, PLAIN.bandwidth, PLAIN.overhead, PLAIN.scale, pass_overhead=100.0
    )
    scalar = matrix(shape=(), ref=1)
    with_scalar = cost((matrix(), scalar, Node("max", (0, 1), shape=(4, 6))), rates=rates)
    with_matrix = cost((matrix(), matrix(ref=1), Node("max", (0, 1), shape=(4, 6))), rates=rates)
    assert 100 < with_scalar < 110 < 200 < with_matrix


def test_rates_start_from_those_of_the_platform():
    assert first_rates("cpu") is DEFAULT_RATES
    assert first_rates("gpu").bandwidth["conv"] > 1e12


def test_a_slice_reads_no_more_than_it_writes():
    attrs = pack_attrs("slice", {"start": (0, 0), "limit": (2, 6), "stride": (1, 1)})
    nodes = (matrix(), Node("slice", (0,), attrs, shape=(2, 6)))
    assert cost(nodes) == pytest.approx(4 * (12 + 12) / 100 + 0.5)


def test_work_on_weights_alone_costs_a_thousandth_of_its_roofline():
    nodes = (matrix("weight"), Node("reduce_sum", (0,), SUM, shape=(6,)))
    each_call = (matrix("input"), Node("reduce_sum", (0,), SUM, shape=(6,)))
    assert cost(nodes) == pytest.approx(1e-3 * cost(each_call))
    assert cost(nodes, {key(*nodes): 3.0}) == pytest.approx(1e-3 * cost(each_call))


@pytest.mark.parametrize("op", ["input", "weight"])
def test_sources_are_free(op):
    assert cost((matrix(op),)) == 0.0


def test_a_reshape_is_free():
    attrs = pack_attrs("reshape", {"shape": (24,), "rank": 1})
    assert cost((matrix(), Node("reshape", (0,), attrs, shape=(24,)))) == 0.0


@pytest.mark.parametrize("platform", ["cpu", "gpu"])  # with narrow and with wide steps
def test_pricing_some_nodes_gives_their_seconds_and_0_elsewhere(monkeypatch, platform):
    monkeypatch.setattr(engine_jit, "platform", lambda: platform)
    table, nodes = roofline.cost_table({}, PLAIN), (*DOT, Node("tanh", (2,), shape=(4, 8)))
    graph = view(*nodes)
    alone = jnp.arange(64) == len(DOT)
    found = jax.jit(lambda where: table.costs_where(graph, where))(alone)
    assert float(found[len(DOT)]) == float(SECONDS(table, graph)[len(DOT)]) > 0
    assert np.flatnonzero(found).tolist() == [len(DOT)]


def test_the_total_of_a_priced_graph_is_the_sum_of_its_nodes():
    nodes = (*DOT, Node("tanh", (2,), shape=(4, 8)))
    table = roofline.cost_table({}, PLAIN)
    priced = jax.jit(lambda t, g: t.priced(g))(table, build(nodes, [3], bucket=64))
    # tanh: 17 * 32 flops and reading 128 bytes.
    assert float(roofline.total(priced)) == pytest.approx((4.16 + 0.5) + (0.544 + 1.28 + 0.5))


# Lowerings --------------------------------------------------------------------------------------

CONV_LAST = {
    "lhs_layout": ops.LAYOUT_CODE[0, 3, 1, 2],
    "rhs_layout": ops.LAYOUT_CODE[3, 2, 0, 1],
    "out_layout": ops.LAYOUT_CODE[0, 3, 1, 2],
    "stride": (1, 1),
    "lhs_dilation": (1, 1),
    "rhs_dilation": (1, 1),
    "batch_groups": 1,
    "dtype": ops.DTYPE_CODE["float32"],
}


@pytest.mark.parametrize(
    ("kernel", "groups", "kind"), [((3, 3), 1, 3), ((1, 1), 1, 4), ((3, 3), 2, 5)]
)
def test_convolutions_1x1_grouped_and_others_are_distinct_kinds(kernel, groups, kind):
    """Features are last here; with features elsewhere they are kinds 0, 1 and 2."""
    attrs = pack_attrs("conv", {**CONV_LAST, "groups": groups, "high": [k - 1 for k in kernel]})
    x = Node("input", shape=(1, 8, 8, 4), ref=0)
    w = Node("weight", shape=(*kernel, 4 // groups, 6), ref=1)
    conv = Node("conv", (0, 1), attrs, 5, shape=(1, 8, 8, 6))
    seen = VIEW(build([x, w, conv], [2], bucket=16))
    kinds = jax.vmap(lowering_kind_of)(seen)
    assert np.asarray(kinds[3]).tolist() == [conv.spec.code, kind, 5]
    assert in_other_layout((conv.spec.code, kind, 5)) == (conv.spec.code, kind - 3, 5)


def test_a_convolution_with_features_first_is_of_another_kind():
    layouts = {f"{n}_layout": ops.LAYOUT_CODE[0, 1, 2, 3] for n in ("lhs", "out")}
    attrs = pack_attrs("conv", {**CONV_LAST, **layouts, "high": [2, 2]})
    x = Node("input", shape=(1, 4, 8, 8), ref=0)
    w = Node("weight", shape=(3, 3, 4, 6), ref=1)
    conv = Node("conv", (0, 1), attrs, 5, shape=(1, 6, 8, 8))
    kinds = jax.vmap(lowering_kind_of)(VIEW(build([x, w, conv], [2], bucket=16)))
    assert np.asarray(kinds[3]).tolist() == [conv.spec.code, 0, 5]


def test_an_untimed_node_is_priced_by_the_multiple_of_its_lowering():
    rates = replace(PLAIN, multiple={(dot().spec.code, 0, 1): 3.0})
    nodes = [matrix(), matrix(shape=(6, 8), ref=1), dot(), dot(lowering=1)]
    graph = build(nodes, [2, 3], bucket=16)
    cost = SECONDS(roofline.cost_table({}, rates), VIEW(graph))
    assert float(cost[4]) == pytest.approx(3 * float(cost[3]))


def test_work_on_weights_counts_by_the_configured_share():
    graph = build([Node("weight", shape=(64, 64)), Node("tanh", (0,), shape=(64, 64))], [1])
    tables = [roofline.cost_table({}, PLAIN, config=CostConfig(weight_only=w)) for w in (1, 0.5)]
    whole, half = (float(SECONDS(table, VIEW(graph))[2]) for table in tables)
    assert half == pytest.approx(0.5 * whole) and half > 0


def test_the_numerical_error_of_a_lowering_adds_to_its_cost():
    """Sums of transformed tiles add an error; another order of the same sums adds none."""
    x = Node("input", shape=(1, 8, 8, 4), ref=0)
    w = Node("weight", shape=(3, 3, 4, 6), ref=1)
    attrs = pack_attrs("conv", {**CONV_LAST, "groups": 1, "high": [2, 2]})

    def parts(lowering: str, weight: float) -> tuple[float, float]:
        """Return the error of the graph, and the cost of its convolution beyond its seconds."""
        number = number_of("conv", lowering)
        graph = build([x, w, Node("conv", (0, 1), attrs, number, (1, 8, 8, 6))], [2], bucket=16)
        table = roofline.cost_table({}, PLAIN, config=CostConfig(error_weight=weight))
        more = table.priced(graph).nodes.cost[3] - table.seconds(VIEW(graph))[3]
        return float(table.error(graph)), float(more)

    assert parts("taps", 1e6) == (0.0, 0.0)
    assert parts("winograd2", 0.0) == (pytest.approx(16 * 2.0**-23), 0.0)
    assert parts("winograd2", 1e6)[1] == pytest.approx(16 * 2.0**-23 * 1e6, rel=1e-3)
