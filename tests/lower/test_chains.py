"""Which nodes are fused with the product or convolution before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from xrl_jax.graph.graph import Node, build, pack_attrs
from xrl_jax.lower import chains as epilogue
from xrl_jax.lower.chains import Chain, chains

SHAPE = (2, 4)
X = Node("input", shape=(2, 3), ref=0)
W = Node("weight", shape=(3, 4), ref=1)
BIAS = Node("weight", shape=(4,), ref=2)
ZERO = Node("const", value=0.0)
PRODUCT = Node(
    "dot", (0, 1), pack_attrs("dot", {"lhs_contract": 2, "rhs_contract": 1}), shape=SHAPE
)


@pytest.fixture(autouse=True)
def every_product_absorbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epilogue, "absorbs", lambda node, args: node.op == "dot")


def repeated(vector: int, *axes: int) -> Node:
    attrs = pack_attrs("broadcast", {"shape": SHAPE, "rank": 2, "dims": axes or (1,)})
    return Node("broadcast", (vector,), attrs, shape=SHAPE)


def add(a: int, b: int) -> Node:
    return Node("add", (a, b), shape=SHAPE)


def maximum(a: int, b: int) -> Node:
    return Node("max", (a, b), shape=SHAPE)


def every(nodes: Sequence[Node], outputs: Sequence[int]) -> tuple[dict[int, Chain], set[int]]:
    flags = build(nodes, outputs).nodes.weight_only
    return chains(nodes, outputs, flags[1 : len(nodes) + 1].tolist())


def found(nodes: Sequence[Node], *outputs: int) -> list[Chain]:
    return list(every(nodes, outputs)[0].values())


def test_a_bias_and_a_rectifier_are_absorbed() -> None:
    nodes = [X, W, BIAS, ZERO, PRODUCT, repeated(2), add(4, 5), maximum(6, 3)]
    chained, inner = every(nodes, [7])
    assert chained == {7: Chain(anchor=4, last=7, bias=2, relu=True)}
    assert inner == {4, 6}


def test_a_bias_may_be_a_row() -> None:
    """`jnp` reshapes a vector to a row, for it to have the rank of the product."""
    nodes = [X, W, Node("weight", shape=(1, 4), ref=2), PRODUCT, repeated(2, 0, 1), add(3, 4)]
    assert found(nodes, 5) == [Chain(3, 5, bias=2)]


def test_a_residual_is_absorbed_between_bias_and_rectifier() -> None:
    residual = Node("input", shape=SHAPE, ref=3)
    nodes = [X, W, BIAS, ZERO, residual, PRODUCT, repeated(2)]
    nodes += [add(6, 5), add(4, 7), maximum(3, 8)]
    assert found(nodes, 9) == [Chain(5, 9, bias=2, addend=4, relu=True)]


def test_a_sum_of_two_products_is_absorbed_by_one_of_them() -> None:
    nodes = [X, W, BIAS, PRODUCT, PRODUCT, repeated(2), repeated(2)]
    nodes += [add(3, 5), add(4, 6), add(7, 8)]
    assert found(nodes, 9) == [Chain(3, 7, bias=2), Chain(4, 9, bias=2, addend=7)]


@pytest.mark.parametrize("order", [(4, 3), (3, 4)])
def test_a_product_of_weights_is_an_addend_and_absorbs_nothing(order: tuple[int, int]) -> None:
    """It is computed once, before the call; merged into the other, it would be in each call."""
    nodes = [X, W, Node("weight", shape=(2, 3), ref=2), replace(PRODUCT, args=(2, 1)), PRODUCT]
    assert found([*nodes, add(*order)], 5) == [Chain(4, 5, addend=3)]


def test_an_array_computed_from_weights_may_be_an_addend() -> None:
    array = Node("weight", shape=SHAPE, ref=2)
    nodes = [X, W, array, Node("exp", (2,), shape=SHAPE), PRODUCT, add(3, 4)]
    assert found(nodes, 5) == [Chain(4, 5, addend=3)]


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([repeated(2), add(4, 5), maximum(6, 5)], id="a maximum with other than zero"),
        pytest.param([repeated(2), add(4, 5), add(6, 5)], id="a second bias"),
        pytest.param([repeated(2), add(4, 5), Node("exp", (6,), shape=SHAPE)], id="an operator"),
        pytest.param([repeated(2), add(4, 5), add(6, 6)], id="a sum with itself"),
    ],
)
def test_a_chain_ends_before(nodes: list[Node]) -> None:
    assert found([X, W, BIAS, ZERO, PRODUCT, *nodes], 7) == [Chain(4, 6, bias=2)]


def test_nothing_is_absorbed_by_a_value_that_is_used_twice_or_returned() -> None:
    assert found([X, W, ZERO, PRODUCT, maximum(3, 2), add(3, 4)], 5) == []
    assert found([X, W, ZERO, PRODUCT, maximum(3, 2)], 3, 4) == []


def test_a_vector_along_another_axis_is_no_bias() -> None:
    nodes = [X, W, Node("weight", shape=(2,), ref=2), PRODUCT, repeated(2, 0), add(3, 4)]
    assert found(nodes, 5) == []


def test_an_addend_that_xla_fuses_into_the_sum_is_not_absorbed() -> None:
    """XLA computes exp(y) in the loop of the sum; writing it to memory first would cost a pass."""
    y = Node("input", shape=SHAPE, ref=3)
    nodes = [X, W, y, Node("exp", (2,), shape=SHAPE), PRODUCT, add(3, 4)]
    assert found(nodes, 5) == []
    assert found([*nodes, maximum(3, 5)], 6) == [Chain(4, 5, addend=3)]
