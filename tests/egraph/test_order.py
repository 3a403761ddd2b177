"""Orders of e-nodes in which arguments come first."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from xrl_jax.egraph.arrays import EGraph
from xrl_jax.egraph.order import Order, order_chosen, order_of
from xrl_jax.egraph.tree_cost import cheapest_now
from xrl_jax.runtime.engine_jit import engine_jit

BUCKET = 2048
order_of_now, order_chosen_now = engine_jit(order_of), engine_jit(order_chosen)


def egraph(*enodes: tuple[int, tuple[int, ...]], root: int) -> EGraph:
    """Return the e-graph of (class, arguments) in slots 1, 2, ..."""
    ops, names = np.zeros(BUCKET, np.int32), np.arange(BUCKET, dtype=np.int32)
    reads = np.zeros((BUCKET, 6), np.int32)
    for slot, (c, read) in enumerate(enodes, start=1):
        ops[slot], names[slot], reads[slot, : len(read)] = 1, c, read
    none = jnp.zeros((BUCKET, 2), jnp.int32)
    n = jnp.int32(len(enodes) + 1)
    roots = jnp.asarray([root], jnp.int32)
    op, args, parent = (jnp.asarray(x) for x in (ops, reads, names))
    return EGraph(op, args, none, none, parent, n, roots)


def slots(order: Order) -> list[int]:
    return np.asarray(order.slots)[: int(order.n)].tolist()


def chosen(graph: EGraph, **nodes: int) -> Order:
    """Return the order of a choice, as c1=slot, c2=slot, ..."""
    node = np.zeros(BUCKET, np.int32)
    for c, slot in nodes.items():
        node[int(c[1:])] = slot
    return order_chosen_now(graph, jnp.asarray(node))


def test_arguments_come_before_their_readers_whatever_their_slots():
    """1 reads 2, which reads 3."""
    graph = egraph((1, (2,)), (2, (3,)), (3, ()), root=1)
    assert slots(order_of_now(graph)) == [3, 2, 1]


def test_all_enodes_of_a_class_count():
    """1 is f(2) or g(3)."""
    graph = egraph((1, (2,)), (2, ()), (3, ()), (1, (3,)), root=1)
    assert slots(order_of_now(graph)) == [2, 1, 3, 4]


def test_what_no_root_needs_is_left_out():
    graph = egraph((1, ()), (2, (1,)), (3, (2,)), root=2)
    assert slots(order_of_now(graph)) == [1, 2]


def test_a_choice_has_one_enode_of_each_class_that_it_needs():
    """1 is f(2) or g(3)."""
    graph = egraph((1, (2,)), (2, ()), (3, ()), (1, (3,)), root=1)
    assert slots(chosen(graph, c1=4, c2=2, c3=3)) == [3, 4]


def test_what_is_read_twice_is_no_cycle():
    """1 is f(2, 3), and 2 reads 3."""
    order = order_of_now(egraph((1, (2, 3)), (2, (3,)), (3, ()), root=1))
    assert slots(order) == [3, 2, 1]
    assert not bool(order.cyclic)


def test_a_cycle_is_noticed():
    graph = egraph((1, (2,)), (2, (1,)), (2, ()), root=1)
    assert bool(chosen(graph, c1=1, c2=2).cyclic)
    assert not bool(chosen(graph, c1=1, c2=3).cyclic)


def test_rounding_makes_no_cycle_the_cheapest():
    """2 is a view of 3, 3 is a view of 2, and 2 is also made of 1 at a cost that hides a view's."""
    graph = egraph((1, ()), (2, (3,)), (3, (2,)), (2, (1,)), root=3)
    costs = jnp.full(BUCKET, 1e-9, jnp.float32).at[4].set(1.0)
    assert np.asarray(cheapest_now(graph, costs).node)[1:4].tolist() == [1, 4, 3]
