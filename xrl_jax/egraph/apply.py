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
    full: jax.Array  # bool, whether there was no room for something
    most: jax.Array  # int32, the most slots that may be in use


class NewENodes(NamedTuple):
    """E-nodes that rules create; `args` are codes: a bound position, B + a new e-node, or -1."""

    op: jax.Array  # [C, Q]; a hole where there is none
    args: jax.Array  # [C, Q, A]
    data: jax.Array  # [C, Q, D]
    notes: jax.Array  # [C, Q, X]


def applying(graph: EGraph, n_variants: int, most: jax.Array | int | None = None) -> Applying:
    """Return the start of applying rules to a rebuilt e-graph.

    Args:
      most: the most slots that may be in use, the hole included; the bucket's by default.
    """
    none = jnp.zeros(n_variants, jnp.int32)
    limit = jnp.minimum(graph.bucket if most is None else most, graph.bucket)
    table, _ = arrays.table_of(graph)
    return Applying(graph, table, none, jnp.bool_(False), jnp.bool_(False), limit)


def apply_at(
    state: Applying,
    variant: jax.Array,
    bound: jax.Array,
    ok: jax.Array,
    new: NewENodes,
    replaced: Sequence[tuple[int, jax.Array]],
    commutative: jax.Array | None = None,
) -> Applying:
    """Add new e-nodes, and unite what replaces roots with their classes. Where there is no room for
    an e-node, the variant is not applied.

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

    def one(
        q: jax.Array, carry: tuple[Applying, jax.Array, jax.Array]
    ) -> tuple[Applying, jax.Array, jax.Array]:
        state, classes, ok = carry
        op, codes = new.op[:, q], new.args[:, q]
        args = jnp.take_along_axis(classes, jnp.maximum(codes, 0), axis=1)
        args = arrays.in_order(op, jnp.where(codes >= 0, args, 0), commutative)
        present = ok & (op != HOLE)
        nodes = ENodes(op, args, new.data[:, q], new.notes[:, q])
        graph, table, slots = arrays.add(state.graph, state.table, nodes, present, state.most)
        missing = present & (slots == HOLE)
        changed, full = state.changed | (graph.n > state.graph.n), state.full | jnp.any(missing)
        state = state._replace(graph=graph, table=table, full=full, changed=changed)
        return state, classes.at[:, n_bound + q].set(graph.parent[slots]), ok & ~missing

    used = ok[:, None] & (new.op != HOLE)
    most = jnp.max(jnp.where(used, jnp.arange(n_new) + 1, 0))
    state, classes, ok = jax.lax.fori_loop(0, most, one, (state, classes, ok))
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
