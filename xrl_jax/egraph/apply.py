"""Application of rules to an e-graph that is being grown: the same for terms and tensors.

Letters: C places where rules are applied, B bound positions, Q new e-nodes, V variants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.egraph import arrays
from xrl_jax.egraph.arrays import HOLE, EGraph, ENodes, Table


class Applying(NamedTuple):
    """An e-graph to which rules are applied; it needs rebuilding afterwards."""

    graph: EGraph
    table: Table
    matches: jax.Array  # [V] int32, number of places where each variant was applied
    changed: jax.Array  # bool, whether an e-node or a union is new
    full: jax.Array  # bool, whether the bucket is too small; then nothing more is applied


class NewENodes(NamedTuple):
    """E-nodes that rules create; `args` are codes: a bound position, B + a new e-node, or -1."""

    op: jax.Array  # [C, Q]; a hole where there is none
    args: jax.Array  # [C, Q, A]
    data: jax.Array  # [C, Q, D]
    notes: jax.Array  # [C, Q, X]


def applying(graph: EGraph, n_variants: int) -> Applying:
    """Return the start of applying rules to a rebuilt e-graph."""
    none = jnp.zeros(n_variants, jnp.int32)
    return Applying(graph, arrays.table_of(graph)[0], none, jnp.bool_(False), jnp.bool_(False))


def apply_at(
    state: Applying,
    variant: jax.Array,
    bound: jax.Array,
    ok: jax.Array,
    new: NewENodes,
    replaced: Sequence[tuple[int, jax.Array]],
    commutative: jax.Array | None = None,
) -> Applying:
    """Add new e-nodes, and unite what replaces roots with their classes.

    Args:
      variant: [C].
      bound: [C, B] e-nodes or names of classes.
      ok: [C] bool, where variants apply.
      replaced: for each root its position, and the codes [C] of what replaces it; -1 for nothing.
      commutative: see `arrays.rebuild`.
    """
    n_bound, n_new = bound.shape[1], new.op.shape[1]
    free = jnp.zeros((len(variant), n_new), jnp.int32)
    classes = jnp.concatenate([state.graph.parent[bound], free], axis=1)

    def one(q: jax.Array, carry: tuple[Applying, jax.Array]) -> tuple[Applying, jax.Array]:
        state, classes = carry
        op, codes = new.op[:, q], new.args[:, q]
        args = jnp.take_along_axis(classes, jnp.maximum(codes, 0), axis=1)
        args = arrays.in_order(op, jnp.where(codes >= 0, args, 0), commutative)
        present = ok & (op != HOLE) & ~state.full
        nodes = ENodes(op, args, new.data[:, q], new.notes[:, q])
        graph, table, slots, full = arrays.add(state.graph, state.table, nodes, present)
        changed = state.changed | (graph.n > state.graph.n)
        state = state._replace(graph=graph, table=table, full=state.full | full, changed=changed)
        return state, classes.at[:, n_bound + q].set(graph.parent[slots])

    used = ok[:, None] & (new.op != HOLE)
    most = jnp.max(jnp.where(used, jnp.arange(n_new) + 1, 0))
    state, classes = jax.lax.fori_loop(0, most, one, (state, classes))
    ok &= ~state.full
    before = parent = state.graph.parent
    for position, codes in replaced:
        to = jnp.take_along_axis(classes, jnp.maximum(codes, 0)[:, None], axis=1)[:, 0]
        where = ok & (codes >= 0)
        root = classes[:, position]
        parent = arrays.unite(parent, jnp.where(where, root, 0), jnp.where(where, to, 0))
    return state._replace(
        graph=state.graph._replace(parent=parent),
        matches=state.matches.at[variant].add(ok.astype(jnp.int32)),
        changed=state.changed | jnp.any(parent != before),
    )


def differ(one: EGraph, other: EGraph) -> jax.Array:
    """Return whether two e-graphs of one bucket differ."""
    same = [jnp.all(a == b) for a, b in zip(one, other, strict=True)]
    return ~jnp.all(jnp.stack(same))
