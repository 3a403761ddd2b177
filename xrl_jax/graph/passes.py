"""Jitted passes over tensor graphs: use counts, dead nodes, depths, and joining a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xrl_jax.graph import ops
from xrl_jax.graph.batch import largest_of_batch
from xrl_jax.graph.bits import first_set
from xrl_jax.graph.graph import DEPTH_STEP, Globals, TensorGraph, args_of, with_args

_DEAD_AT_ONCE = 8  # nodes removed per step: more gather needless padding, fewer take more steps


def use_counts(graph: TensorGraph) -> jax.Array:
    """Return how often each node is an argument or an output, [N]; pinned nodes count once more."""
    table, code = args_of(graph), graph.nodes.op
    alive = (code != ops.HOLE)[:, None] & (table > 0)
    uses = jnp.zeros(code.shape, jnp.int32).at[table].add(alive.astype(jnp.int32))
    outputs = graph.globals.outputs
    uses = uses.at[jnp.maximum(outputs, 0)].add((outputs > 0).astype(jnp.int32))
    opaque = (code == ops.OPS["opaque"].code) | (code == ops.OPS["call"].code)
    return uses + (opaque & (graph.nodes.attrs[:, 0] == 1)).astype(jnp.int32)


def remove_dead(graph: TensorGraph) -> TensorGraph:
    """Turn nodes that no output or pinned node depends on into holes; slots do not move."""
    return remove_dead_with_counts(graph, use_counts(graph))[0]


def remove_dead_with_counts(graph: TensorGraph, uses: jax.Array) -> tuple[TensorGraph, jax.Array]:
    """Do `remove_dead`, given the graph's `use_counts` [N]; also return the updated counts."""
    table, code = args_of(graph), graph.nodes.op

    def dead(uses: jax.Array, live: jax.Array) -> jax.Array:
        return live & (uses == 0)

    def some(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        uses, live = carry
        gone = first_set(dead(uses, live), _DEAD_AT_ONCE)
        return uses.at[table[gone]].add(-1), live.at[gone].min(False)

    start = (uses, code != ops.HOLE)
    uses, live = jax.lax.while_loop(lambda c: jnp.any(dead(*c)), some, start)
    nodes = graph.nodes._replace(
        op=jnp.where(live, code, ops.HOLE), cost=jnp.where(live, graph.nodes.cost, 0.0)
    )
    depth = jnp.where(live, graph.globals.depth, 0)
    graph = graph._replace(nodes=nodes, globals=graph.globals._replace(depth=depth))
    # Padding of `gone` and absent arguments lowered the count of slot 0, which is a hole.
    return with_args(graph, jnp.where(live[:, None], table, 0)), uses.at[0].set(0)


def join_batch(graphs: TensorGraph) -> TensorGraph:
    """Join a batch of graphs [B, ...] into one of B * N slots: node n of graph b is b * N + n."""
    size, n = graphs.nodes.op.shape
    first = n * jnp.arange(size, dtype=jnp.int32)[:, None]

    def shifted(slots: jax.Array, none: int) -> jax.Array:
        return jnp.where(slots == none, none, slots + first).reshape(-1)

    return TensorGraph(
        nodes=jax.tree.map(lambda v: v.reshape(size * n, *v.shape[2:]), graphs.nodes),
        edges=graphs.edges.reshape(-1),
        senders=shifted(graphs.senders, 0),
        receivers=(graphs.receivers + first).reshape(-1),
        globals=Globals(shifted(graphs.globals.outputs, -1), graphs.globals.depth.reshape(-1)),
        n_node=jnp.sum(graphs.n_node, axis=0),
        n_edge=jnp.sum(graphs.n_edge, axis=0),
    )


def raise_depths(graph: TensorGraph, *, needed: jax.Array | bool = True) -> TensorGraph:
    """Raise `depth` above that of the arguments, to restore topological order after a rewrite.

    On a cyclic graph depths would grow without bound; raising stops at a limit, and then some depth
    is not above those of the node's arguments.

    Args:
      needed: false if all depths are known to be in order; then nothing is computed.
    """
    table = args_of(graph)
    n = table.shape[0]
    live = graph.nodes.op != ops.HOLE

    def lift(depth: jax.Array) -> jax.Array:
        need = jnp.max(jnp.where(table > 0, depth[table], 0), axis=1) + 1
        return jnp.where(live, jnp.maximum(depth, need), 0)

    def again(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        old = carry[1]
        new = lift(old)
        return jnp.any(old != new) & (jnp.max(new) < 4 * n * DEPTH_STEP), new

    def raised(needed: jax.Array, depth: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c[0], again, (needed, depth))[1]

    needed, depth = jnp.asarray(needed), graph.globals.depth
    # Even a loop of zero iterations would compute its gather indices.
    depth = jax.lax.cond(largest_of_batch(needed), raised, lambda _, depth: depth, needed, depth)
    return graph._replace(globals=graph.globals._replace(depth=depth))
