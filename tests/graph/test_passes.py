"""Use counts, dead code and depths."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.graph.test_graph import NODES, PINNED
from tests.graph.valid import is_acyclic
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, args_of, build, n_live, pack_attrs, with_args
from xrl_jax.graph.passes import raise_depths, remove_dead, use_counts
from xrl_jax.runtime.engine_jit import engine_jit


def test_dead_nodes_become_holes_and_slots_stay():
    graph = build(NODES, (2,))
    cleaned = engine_jit(remove_dead)(graph)
    assert [ops.OP_NAMES[c] for c in cleaned.nodes.op[:6]] == (
        ["hole", "input", "weight", "mul", "hole", "hole"]
    )
    assert args_of(cleaned)[4:6].tolist() == [[0] * 6, [0] * 6]
    assert cleaned.globals.depth[:6].tolist() == [0, 32, 32, 64, 0, 0]
    assert int(n_live(cleaned)) == 3


def test_dead_chains_are_removed_except_operands_of_pinned_nodes():
    nodes = [
        Node("input", shape=(3,), ref=0),
        Node("exp", (0,), shape=(3,)),
        Node("neg", (1,), shape=(3,)),
        Node("opaque", (1,), pack_attrs("opaque", {"pinned": 1, "n_args": 1}), ref=1),
        Node("tanh", (2,), shape=(3,)),
        Node("input", shape=(), ref=2),
    ]
    cleaned = engine_jit(remove_dead)(build(nodes, (5,)))
    assert np.flatnonzero(cleaned.nodes.op).tolist() == [1, 2, 4, 6]


def test_uses_count_arguments_outputs_and_pins():
    graph = build([*NODES, PINNED], (4, 4))
    assert use_counts(graph)[:8].tolist() == [0, 4, 1, 1, 0, 2, 1, 0]


def test_dead_code_and_depths_work_under_vmap():
    pair = [build(NODES, (2,)), build(NODES, (3,))]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pair)
    cleaned = engine_jit(jax.vmap(lambda g: raise_depths(remove_dead(g))))(batch)
    assert jax.vmap(n_live)(cleaned).tolist() == [3, 2]
    assert jax.vmap(is_acyclic)(cleaned).tolist() == [True, True]


def test_depths_are_raised_only_where_necessary():
    graph = build(NODES, (4,))
    depth = graph.globals.depth.at[3].set(20)
    lifted = engine_jit(raise_depths)(graph._replace(globals=graph.globals._replace(depth=depth)))
    assert lifted.globals.depth[:6].tolist() == [0, 32, 32, 33, 64, 96]


def test_depths_known_to_be_in_order_are_not_changed():
    graph = build(NODES, (4,))
    depth = graph.globals.depth.at[3].set(20)
    given = graph._replace(globals=graph.globals._replace(depth=depth))
    left = engine_jit(lambda g, n: raise_depths(g, needed=n))(given, False)
    np.testing.assert_array_equal(left.globals.depth, depth)


def test_raising_depths_does_not_hide_a_cycle():
    graph = build(NODES, (4,))
    closed = with_args(graph, args_of(graph).at[3, 1].set(5))
    assert bool(is_acyclic(graph))
    assert not bool(is_acyclic(engine_jit(raise_depths)(closed)))
