"""The cost of a node depends on where its arguments come from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.cost import fusion, roofline
from xrl_jax.cost.rates import DEFAULT_RATES
from xrl_jax.cost.view import CORRECTED
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, TensorGraph, build, pack_attrs
from xrl_jax.libraries.onednn.costs import COSTS
from xrl_jax.lower.table import number_of
from xrl_jax.runtime.engine_jit import engine_jit

SHAPE = (4, 8)
PASS = 4 * 8 * 4 / 1.5e10  # seconds to read or to write an array of this shape
ONE = 4 * 8 / 5e10  # seconds for an operation on each element
STEP = 2e-7  # overhead of an elementwise node
X, W = Node("input", ref=0, shape=(4, 4)), Node("weight", ref=0, shape=(4, 8))
SUMMED = pack_attrs("dot", {"lhs_contract": 1, "rhs_contract": 0})
DOT = Node("dot", (0, 1), SUMMED, shape=SHAPE)
ZERO = Node("const", shape=(), value=0.0)


def product_that_absorbs() -> np.ndarray:
    """Return [operators, lowerings] bool, true for one lowering of the product."""
    table = np.zeros((len(ops.OP_NAMES), fusion.MOST_LOWERINGS), bool)
    table[ops.OPS["dot"].code, number_of("dot", "onednn")] = True
    return table


ABSORBS = jnp.asarray(product_that_absorbs())
# Sharing on machines where a library's kernels are single calls, and where a call holds many.
ALONE = fusion.Sharing(
    absorbs=ABSORBS,
    members=jnp.zeros_like(ABSORBS),
    fused=jnp.zeros(len(ops.OP_NAMES), bool),
    enter=jnp.float32(0.0),
    leave=jnp.float32(0.0),
    joined=jnp.float32(1.0),
    in_loop=jnp.float32(1.0),
    loops=fusion.computed_in_loops("cpu"),
    library=None,
)
IN_CALLS = fusion.Sharing(
    absorbs=ABSORBS,
    members=ABSORBS,
    fused=jnp.asarray([op in COSTS.fused for op in ops.OP_NAMES]),
    **{n: jnp.float32(getattr(COSTS, n)) for n in ("enter", "leave", "joined", "in_loop")},
    loops=fusion.computed_in_loops("cpu"),
    library="onednn",
)
TABLE = roofline.cost_table({}, sharing=ALONE)


def absorbing() -> int:
    """Return a lowering of the product that takes an epilogue."""
    return number_of("dot", "onednn")


PRICED = engine_jit(lambda table, graph: table.priced(graph))
ORIGINS = engine_jit(fusion.origins)


def priced(nodes: Sequence[Node], table: roofline.CostTable | None = None) -> TensorGraph:
    """Return the priced graph of these nodes, with the last as output."""
    graph = build(nodes, [len(nodes) - 1], bucket=64)
    return PRICED(TABLE if table is None else table, graph)


def costs(nodes: Sequence[Node], table: roofline.CostTable | None = None) -> list[float]:
    """Return the costs of the nodes, with the last as output."""
    return np.asarray(priced(nodes, table).nodes.cost)[1 : len(nodes) + 1].tolist()


def node(op: str, *args: int) -> Node:
    return Node(op, args, shape=SHAPE)


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Price as on a machine that has the library, and so calls of many kernels."""
    monkeypatch.setattr(sys.modules[__name__], "TABLE", replace(TABLE, sharing=IN_CALLS))


def test_only_the_first_operator_of_a_fused_chain_reads_memory() -> None:
    _, _, _, first, second = costs([X, W, DOT, node("neg", 2), node("sign", 3)])
    assert first == pytest.approx(STEP + PASS + ONE)
    assert second == pytest.approx(STEP + ONE)


def test_a_call_pays_for_writing_the_fused_chain_it_reads() -> None:
    square = Node("input", ref=1, shape=SHAPE)
    weight = Node("weight", ref=0, shape=(8, 8))
    plain = costs([square, weight, Node("dot", (0, 1), SUMMED, shape=SHAPE)])[-1]
    after = costs([square, weight, node("neg", 0), Node("dot", (2, 1), SUMMED, shape=SHAPE)])[-1]
    assert after - plain == pytest.approx(PASS, rel=1e-3)


def test_a_reduction_in_the_same_loop_does_not_read_again() -> None:
    total = Node("reduce_sum", (1,), pack_attrs("reduce_sum", {"axes": 1}), shape=(8,))
    x = Node("input", ref=0, shape=SHAPE)
    alone = costs([x, Node("reduce_sum", (0,), total.attrs, shape=(8,))])[-1]
    fused = costs([x, node("neg", 0), total])[-1]
    assert fused == pytest.approx(alone - PASS, rel=1e-3)


def test_an_absorbed_epilogue_costs_its_overhead_and_other_operands_only() -> None:
    call = Node("dot", (0, 1), SUMMED, lowering=absorbing(), shape=SHAPE)
    other = Node("input", ref=1, shape=SHAPE)
    zeros = Node("broadcast", (3,), pack_attrs("broadcast", {"dims": []}), shape=SHAPE)
    nodes = [X, W, call, ZERO, zeros, other, node("add", 2, 5), node("max", 6, 4), node("neg", 7)]
    *_, added, rectified, negated = costs(nodes)
    assert added == pytest.approx(STEP + PASS)
    assert rectified == pytest.approx(STEP)
    assert negated == pytest.approx(STEP + PASS + ONE)  # it cannot be in an epilogue


def test_on_a_gpu_a_slice_costs_what_its_loop_reads() -> None:
    """On a CPU it is a copy, and has the overhead of a movement."""
    half = pack_attrs("slice", {"start": (0, 0), "limit": (4, 8), "stride": (1, 1)})
    nodes = [X, Node("slice", (0,), half, shape=(4, 8)), Node("neg", (1,), shape=(4, 8))]
    on_gpu = replace(TABLE.sharing, loops=fusion.computed_in_loops("gpu"))
    _, taken, negated = costs(nodes, replace(TABLE, sharing=on_gpu))
    assert STEP < taken <= STEP + PASS
    assert negated < STEP + PASS  # the slice is computed in its loop
    _, copied, _ = costs(nodes)
    assert copied > 2 * taken


def test_on_a_gpu_convolutions_and_products_compute_their_epilogue() -> None:
    absorbs = fusion.sharing("gpu").absorbs
    assert [bool(absorbs[ops.OPS[op].code, 0]) for op in ("conv", "dot", "window_max")] == [
        *(True, True, False)
    ]
    assert not fusion.sharing("cpu").absorbs[ops.OPS["conv"].code, 0]


def test_work_on_weights_is_in_memory_except_for_broadcasts() -> None:
    row = Node("weight", ref=1, shape=(8,))
    twice = Node("mul", (2, 2), shape=(8,))
    repeated = Node("broadcast", (3,), pack_attrs("broadcast", {"dims": [1]}), shape=SHAPE)
    graph = build([X, W, row, twice, repeated, DOT, node("add", 5, 4)], [6], bucket=64)
    found = np.asarray(ORIGINS(TABLE.sharing, graph))[1:8].tolist()
    memory, loop = fusion.MEMORY, fusion.LOOP
    assert found == [memory, memory, memory, memory, loop, memory, loop]


def test_a_product_of_weights_is_in_memory(partitions: None) -> None:
    """Whatever its lowering, it is computed before the call; the sum is fused into the other
    product.
    """
    fixed = Node("weight", ref=1, shape=(4, 4))
    product = replace(DOT, lowering=absorbing())
    nodes = [X, W, fixed, product, replace(product, args=(2, 1)), node("add", 4, 3)]
    graph = build(nodes, [5], bucket=64)
    *_, first, second, _ = np.asarray(ORIGINS(TABLE.sharing, graph))[1:7].tolist()
    assert (first, second) == (fusion.KERNEL, fusion.MEMORY)
    assert costs(nodes)[-1] == pytest.approx(STEP + PASS)


def test_connected_kernels_pay_for_entering_a_partition_once(partitions: None) -> None:
    """Product, sum with an input, transpose and product form one call; the product after a sine is
    another. The sum is fused into the first product and reads the input.
    """
    square, weight = Node("input", ref=0, shape=(8, 8)), Node("weight", ref=0, shape=(8, 8))
    turn = pack_attrs("transpose", {"perm": (1, 0)})

    def one(op: str, *args: int) -> Node:
        fields = {"dot": {"attrs": SUMMED, "lowering": absorbing()}, "transpose": {"attrs": turn}}
        return Node(op, args, **fields.get(op, {}), shape=(8, 8))

    read = 256 / 1.5e10
    chain = [one("dot", 0, 1), one("add", 2, 0), one("transpose", 3), one("dot", 4, 1)]
    *_, first, added, turned, second, waved, third = costs(
        [square, weight, *chain, one("sin", 5), one("dot", 6, 1)]
    )
    compute = max(1024 / 1e11, 3 * 256 / 1.5e10) + 1e-6
    assert first == pytest.approx(compute + COSTS.enter)
    assert added == pytest.approx(STEP + read)
    assert turned == pytest.approx(0.4 * read)
    assert second == pytest.approx(compute)
    assert waved > read
    assert third == pytest.approx(compute + COSTS.enter + read)


def test_an_xla_call_pays_for_leaving_a_partition(partitions: None) -> None:
    """The graph has a product by the library, its sine, and XLA's products of each of these."""
    square, weight = Node("input", ref=0, shape=(8, 8)), Node("weight", ref=0, shape=(8, 8))
    ours = Node("dot", (0, 1), SUMMED, lowering=absorbing(), shape=(8, 8))
    nodes = [square, weight, ours]
    nodes += [Node("sin", (2,), shape=(8, 8))]
    nodes += [Node("dot", (a, 1), SUMMED, shape=(8, 8)) for a in (2, 3)]
    *_, direct, behind = costs(nodes)
    compute, write = max(1024 / 1e11, 3 * 256 / 1.5e10) + 1e-6, 256 / 1.5e10
    assert direct == pytest.approx(compute + COSTS.leave)
    assert behind == pytest.approx(compute + write)


@pytest.mark.parametrize(("again", "is_ours"), [(0, False), (1, True)])
def test_a_bodys_result_of_the_previous_call_is_still_in_its_partition(
    again: int, is_ours: bool, partitions: None
) -> None:
    """The product takes the negative of the input. If the input is the body's result of the
    previous call, both are in that call's partition.
    """
    x = Node("input", attrs=pack_attrs("input", {"carried": again}), ref=0, shape=(8, 8))
    weight = Node("weight", ref=0, shape=(8, 8))
    ours = Node("dot", (2, 1), SUMMED, lowering=absorbing(), shape=(8, 8))
    _, _, negative, product = costs([x, weight, Node("neg", (0,), shape=(8, 8)), ours])
    read = 256 / 1.5e10
    compute = max(1024 / 1e11, 3 * read) + 1e-6
    if is_ours:
        assert (negative, product) == pytest.approx((0.1 * read, compute))
    else:
        assert negative == pytest.approx(read + 64 / 5e10 + STEP)
        assert product == pytest.approx(compute + COSTS.enter + read)  # the negative is written


def test_elementwise_operators_and_last_axis_reductions_join_a_partition(partitions: None) -> None:
    """Exponentials and reductions over the last axis of a product join its partition; reductions
    over the first axis leave it.
    """
    square, weight = Node("input", ref=0, shape=(8, 8)), Node("weight", ref=0, shape=(8, 8))
    ours = Node("dot", (0, 1), SUMMED, lowering=absorbing(), shape=(8, 8))

    def reduced(op: str, axis: int, shape: tuple[int, ...]) -> Node:
        return Node(op, (3,), pack_attrs(op, {"axes": 1 << axis}), shape=shape)

    nodes = [square, weight, ours, Node("exp", (2,), shape=(8, 8))]
    nodes += [reduced("reduce_sum", axis, (8,)) for axis in (1, 0)]
    nodes += [reduced("softmax", axis, (8, 8)) for axis in (1, 0)]
    *_, exponential, of_trees, of_columns, softmax_of_rows, softmax_of_columns = costs(nodes)
    in_loop = 0.1 * 256 / 1.5e10
    assert (exponential, of_trees, softmax_of_rows) == pytest.approx((in_loop,) * 3)
    assert of_columns > COSTS.leave
    assert softmax_of_columns > COSTS.leave


def test_operators_in_a_partition_have_separate_corrections(partitions: None) -> None:
    """A product by the library and its negative have them, a product by XLA and its negative do
    not.
    """
    scale = {**DEFAULT_RATES.scale, "partition": 2.0, "partition dot": 3.0}
    doubled = roofline.cost_table({}, replace(DEFAULT_RATES, scale=scale), sharing=TABLE.sharing)
    ours = [X, W, replace(DOT, lowering=absorbing()), node("neg", 2)]
    *_, product, negative = costs(ours)
    *_, thrice_the_product, twice_the_negative = costs(ours, doubled)
    thrice = 3 * (product - COSTS.enter)
    assert thrice_the_product - COSTS.enter == pytest.approx(thrice, rel=1e-4)
    assert twice_the_negative == pytest.approx(2 * negative)
    assert costs([X, W, DOT, node("neg", 2)], doubled) == costs([X, W, DOT, node("neg", 2)])


def test_entering_and_leaving_a_partition_has_a_separate_correction(partitions: None) -> None:
    """The graph has a product by the library and XLA's product of it."""
    scale = {**DEFAULT_RATES.scale, "crossing": 3.0}
    dearer = roofline.cost_table({}, replace(DEFAULT_RATES, scale=scale), sharing=TABLE.sharing)
    nodes = [X, W, replace(DOT, lowering=absorbing()), Node("dot", (2, 1), SUMMED, shape=(8, 8))]
    once, thrice = np.array(costs(nodes)), np.array(costs(nodes, dearer))
    both = [2 * COSTS.enter, 2 * COSTS.leave]
    np.testing.assert_allclose((thrice - once)[-2:], both, rtol=1e-3)


def test_shares_are_grouped_by_correction(partitions: None) -> None:
    """The graph has a product by the library, its negative, and its sine, which XLA computes."""
    nodes = [X, W, replace(DOT, lowering=absorbing()), node("neg", 2), node("sin", 2)]
    *_, product, negative, sine = costs(nodes)
    found = engine_jit(lambda table, graph: table.shares(graph))(TABLE, priced(nodes))
    expected = {"partition dot": product - COSTS.enter, "crossing": COSTS.enter}
    expected |= {"partition": negative, "elementwise": sine}
    np.testing.assert_allclose(found, [expected.get(c, 0.0) for c in CORRECTED], rtol=1e-5)
