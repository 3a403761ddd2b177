"""The identity hash depends on all that matters and nothing else; the timing key ignores values."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from tests.graph.generators import graphs, shuffled
from tests.graph.parsed import parse_graph
from xrl_jax.graph.bindings import Array, Call, Equation, Input
from xrl_jax.graph.graph import Node, build, nodes_of, pack_attrs
from xrl_jax.graph.hash import identity, node_hashes, timing_key
from xrl_jax.graph.passes import raise_depths
from xrl_jax.program.program import Program

_DIGESTS = np.random.default_rng(0).integers(0, 2**32, (64, 2), np.uint32)
_hash = jax.jit(identity)


def _identity(graph, digests=_DIGESTS) -> tuple[int, ...]:
    return tuple(_hash(graph, digests).tolist())


@settings(max_examples=25, deadline=None)
@given(graphs())
def test_the_order_of_nodes_does_not_matter(case):
    nodes, outputs = case
    moved = shuffled(np.random.default_rng(1), nodes, outputs)
    assert _identity(build(*moved, bucket=64)) == _identity(build(nodes, outputs, bucket=64))


def _with_slots(graph, place):
    """Return the graph with slot i moved to place[i]."""
    back = np.argsort(place)
    table = place[np.asarray(graph.senders).reshape(-1, 6)][back]
    outputs = np.asarray(graph.globals.outputs)
    return graph._replace(
        nodes=jax.tree.map(lambda leaf: leaf[back], graph.nodes),
        senders=jnp.asarray(table.reshape(-1)),
        globals=graph.globals._replace(
            outputs=jnp.asarray(np.where(outputs >= 0, place[outputs], -1)),
            depth=graph.globals.depth[back],
        ),
    )


@settings(max_examples=15, deadline=None)
@given(graphs())
def test_the_slots_of_nodes_and_their_depths_do_not_matter(case):
    graph = build(*case, bucket=64)
    place = np.concatenate([[0], 1 + np.random.default_rng(2).permutation(63)]).astype(np.int32)
    moved = _with_slots(graph, place)
    depth = moved.globals.depth * 3
    moved = moved._replace(globals=moved.globals._replace(depth=depth))
    assert _identity(moved) == _identity(graph)


def test_neither_dead_nodes_nor_their_features_matter():
    nodes = [Node("input", shape=(3,), ref=0), Node("neg", (0,), shape=(3,))]
    dead = [nodes[0], Node("exp", (0,), shape=(3,)), replace(nodes[1], args=(0,))]
    assert _identity(build(dead, (2,))) == _identity(build(nodes, (1,)))


_BASE = [
    Node("input", shape=(4, 4), ref=0),
    Node("weight", shape=(4, 4), ref=1),
    Node("const", value=2.0),
    Node("mul", (0, 2), shape=(4, 4)),
    Node("transpose", (3,), pack_attrs("transpose", {"perm": (1, 0)}), shape=(4, 4)),
    Node("sub", (4, 1), shape=(4, 4)),
]


@pytest.mark.parametrize(
    ("at", "change"),
    [
        (4, dict(attrs=pack_attrs("transpose", {"perm": (0, 1)}))),
        (5, dict(args=(1, 4))),
        (5, dict(args=(4, 4))),
        (5, dict(lowering=1)),
        (5, dict(op="add")),
        (5, dict(shape=(4, 5))),
        (5, dict(shape=(4, 4, 1))),
        (5, dict(dtype="float16")),
        (2, dict(value=2.0000002)),
        (2, dict(value=-2.0)),
        (1, dict(ref=2)),
        (1, dict(op="array")),
    ],
)
def test_any_literal_edit_changes_the_identity(at, change):
    edited = list(_BASE)
    edited[at] = replace(edited[at], **change)
    assert _identity(build(edited, (5,))) != _identity(build(_BASE, (5,)))


def test_zero_and_minus_zero_are_different_constants():
    plus, minus = ([Node("const", value=v)] for v in (0.0, -0.0))
    assert _identity(build(plus, (0,))) != _identity(build(minus, (0,)))


def test_the_identity_depends_on_outputs_and_their_order():
    swapped, doubled = build(_BASE, (4, 5)), build(_BASE, (5, 5))
    base = build(_BASE, (5, 4))
    assert len({_identity(g) for g in (base, swapped, doubled, build(_BASE, (5,)))}) == 4


def test_the_identity_depends_on_pinned_nodes_without_users():
    pinned = Node("opaque", (0,), pack_attrs("opaque", {"pinned": 1, "n_args": 1}), ref=3)
    assert _identity(build([*_BASE, pinned], (5,))) != _identity(build(_BASE, (5,)))


def test_the_hash_of_a_node_is_that_of_its_subgraph():
    nodes = [*_BASE, Node("mul", (0, 2), shape=(4, 4)), Node("mul", (2, 0), shape=(4, 4))]
    hashes = np.asarray(jax.jit(node_hashes)(build(nodes, (5,)), _DIGESTS))
    assert hashes[4].tolist() == hashes[7].tolist()
    assert hashes[4].tolist() != hashes[8].tolist()
    assert not hashes[9:].any()


def _program(*bindings):
    graph = parse_graph("graph {\n  %1: float32[2] = array() ref=@0\n  return %1\n}")
    return Program(graph, (), bindings, (), (), None, None, 1)


@pytest.mark.parametrize(
    "other",
    [
        Array(np.array([1.0, 3.0], np.float32)),
        Array(np.array([[1.0], [2.0]], np.float32)),
        Array(np.array([1.0, 2.0], np.float64)),
        Input(0),
        Input(1),
        Call("inline", (0,)),
        Call("scan", (0,)),
        Call("inline", (1,)),
        Equation(jax.lax.sort_p, {"dimension": 0}, 1, ()),
        Equation(jax.lax.sort_p, {"dimension": 1}, 1, ()),
        Equation(jax.lax.top_k_p, {"dimension": 0}, 1, ()),
    ],
)
def test_the_identity_depends_on_the_content_of_bindings(other):
    one = Array(np.array([1.0, 2.0], np.float32))
    base, same = _program(one), _program(Array(jnp.array([1.0, 2.0], jnp.float32)))
    edited = _program(other)
    assert _identity(base.graph, base.digests()) == _identity(same.graph, same.digests())
    assert _identity(base.graph, base.digests()) != _identity(edited.graph, edited.digests())


def test_raising_depths_does_not_change_the_identity():
    graph = build(_BASE, (5,))
    flat = graph._replace(globals=graph.globals._replace(depth=graph.globals.depth * 0))
    assert _identity(jax.jit(raise_depths)(flat)) == _identity(graph)


def test_the_identity_works_under_vmap():
    pair = [build(_BASE, (5,)), build(_BASE, (4,))]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pair)
    hashes = jax.jit(jax.vmap(identity, in_axes=(0, None)))(batch, _DIGESTS)
    assert [tuple(h.tolist()) for h in hashes] == [_identity(g) for g in pair]


@pytest.mark.parametrize(
    ("at", "change"), [(2, dict(value=7.0)), (1, dict(ref=2)), (0, dict(ref=9))]
)
def test_the_timing_key_ignores_values(at, change):
    edited = list(_BASE)
    edited[at] = replace(edited[at], **change)
    assert timing_key(edited, (5,)) == timing_key(_BASE, (5,))


@pytest.mark.parametrize(
    ("at", "change"),
    [
        (4, dict(attrs=pack_attrs("transpose", {"perm": (0, 1)}))),
        (5, dict(lowering=1)),
        (5, dict(shape=(4, 5))),
        (5, dict(dtype="float16")),
        (5, dict(args=(1, 4))),
    ],
)
def test_the_timing_key_depends_on_structure(at, change):
    edited = list(_BASE)
    edited[at] = replace(edited[at], **change)
    assert timing_key(edited, (5,)) != timing_key(_BASE, (5,))


def test_the_timing_key_depends_on_outputs_and_options():
    keys = {
        timing_key(_BASE, (5,)),
        timing_key(_BASE, (4,)),
        timing_key(_BASE, (5,), extra=["fast"]),
        timing_key(_BASE, (5,), extra=["fast", "cpu"]),
    }
    assert len(keys) == 4
    assert all(len(key) == 32 for key in keys)


def test_equal_graphs_built_apart_have_one_timing_key():
    nodes, outputs, _ = nodes_of(build(_BASE, (5,)))
    again, again_outputs, _ = nodes_of(build(nodes, outputs, bucket=128))
    assert timing_key(nodes, outputs) == timing_key(again, again_outputs)
