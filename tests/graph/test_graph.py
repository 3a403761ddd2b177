"""Building graphs, reading them back, and buckets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings

from tests.graph.generators import graphs
from xrl_jax.graph import ops
from xrl_jax.graph.graph import (
    GraphError,
    Node,
    args_of,
    bucket_for,
    build,
    grow,
    nodes_of,
    pack_attrs,
    renumber,
    with_args,
    with_room_for_outputs,
)
from xrl_jax.graph.passes import remove_dead

# x, w, x * w, exp(x), (x * w) + x
NODES = [
    Node("input", shape=(3,), ref=0),
    Node("weight", shape=(3,), ref=1),
    Node("mul", (0, 1), shape=(3,)),
    Node("exp", (0,), shape=(3,)),
    Node("add", (2, 0), shape=(3,)),
]
PINNED = Node("opaque", (0,), pack_attrs("opaque", {"pinned": 1, "n_args": 1}), ref=2)


def test_a_built_graph_has_node_i_in_slot_i_plus_one():
    graph = build(NODES, (4,))
    assert [ops.OP_NAMES[c] for c in graph.nodes.op[:7]] == (
        ["hole", "input", "weight", "mul", "exp", "add", "hole"]
    )
    assert args_of(graph)[5].tolist() == [3, 1, 0, 0, 0, 0]
    assert graph.globals.outputs.tolist() == [5] + [-1] * 7
    assert graph.globals.depth[:7].tolist() == [0, 32, 32, 64, 64, 96, 0]
    assert graph.nodes.weight_only[:7].tolist() == [False, False, True, False, False, False, False]
    assert graph.nodes.shape[5].tolist() == [3, 1, 1, 1, 1, 1]


def test_nodes_that_depend_on_weights_and_constants_only_are_weight_only():
    nodes = [
        Node("weight", shape=(3,)),
        Node("const", value=1.0),
        Node("mul", (0, 1), shape=(3,)),
        Node("opaque", (2,), pack_attrs("opaque", {"pinned": 1, "n_args": 1})),
        Node("exp", (2,), shape=(3,)),
    ]
    graph = build(nodes, (4,))
    assert graph.nodes.weight_only[1:6].tolist() == [True, True, True, False, True]


def test_edges_are_in_receiver_and_slot_order():
    graph = build(NODES, (4,))
    assert graph.receivers[:8].tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert graph.edges[:8].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert (graph.n_node.tolist(), graph.n_edge.tolist()) == ([64], [384])


@settings(max_examples=25, deadline=None)
@given(graphs())
def test_nodes_of_returns_the_nodes_as_built(case):
    graph = build(*case, bucket=64)
    nodes, outputs, slots = nodes_of(graph)
    place = {slot - 1: i for i, slot in enumerate(slots)}
    assert outputs == tuple(place[o] for o in case[1])
    for i, slot in enumerate(slots):
        original = case[0][slot - 1]
        assert nodes[i].args == tuple(place[a] for a in original.args)
        assert nodes[i].__dict__ | {"args": ()} == original.__dict__ | {"args": ()}


def test_nodes_of_returns_live_and_pinned_nodes_only():
    nodes, outputs, slots = nodes_of(build([*NODES, PINNED], (2,)))
    assert [n.op for n in nodes] == ["input", "weight", "mul", "opaque"]
    assert (outputs, slots) == ((2,), [1, 2, 3, 6])


def test_nodes_of_refuses_a_cycle():
    graph = build(NODES, (4,))
    closed = with_args(graph, args_of(graph).at[3, 1].set(5))
    with pytest.raises(GraphError, match="cycle through node %"):
        nodes_of(closed)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([Node("neg", (0,))], "comes before its arguments"),
        ([Node("neg", (1,)), Node("input")], "comes before its arguments"),
        ([Node("input"), Node("concat", (0,) * 7)], "has 7 arguments"),
    ],
)
def test_nodes_out_of_order_or_too_wide_are_refused(nodes, message):
    with pytest.raises(GraphError, match=message):
        build(nodes, (0,))


@pytest.mark.parametrize(("n_nodes", "bucket"), [(1, 64), (39, 64), (40, 128), (999, 1024)])
def test_the_bucket_leaves_room_for_rewrites(n_nodes, bucket):
    assert bucket_for(n_nodes) == bucket


def test_a_graph_that_exceeds_its_bucket_is_refused():
    with pytest.raises(GraphError, match="5 nodes do not fit into a bucket of 5"):
        build(NODES, (4,), bucket=5)
    with pytest.raises(GraphError, match="largest bucket, 16384"):
        bucket_for(20_000)


def test_growing_compacts_and_keeps_costs():
    graph = build(NODES, (2,))
    graph = graph._replace(nodes=graph.nodes._replace(cost=jnp.arange(64, dtype=jnp.float32)))
    grown = grow(jax.jit(remove_dead)(graph))
    assert grown.nodes.op.shape == (128,)
    assert [ops.OP_NAMES[c] for c in grown.nodes.op[1:5]] == ["input", "weight", "mul", "hole"]
    assert grown.nodes.cost[:5].tolist() == [0, 1, 2, 3, 0]


def test_growing_keeps_the_room_for_outputs():
    graph = with_room_for_outputs(build(NODES, (2,)), 16)
    assert graph.globals.outputs.tolist() == [3, *[-1] * 15]
    assert grow(graph).globals.outputs.tolist() == [3, *[-1] * 15]


def test_renumbering_keeps_a_closed_sublist():
    nodes, outputs = renumber(NODES, (3,), [0, 3])
    assert nodes == [NODES[0], NODES[3]]
    assert outputs == (1,)
    assert renumber(NODES, (4,), [0, 1, 2, 4])[0][3].args == (2, 0)
