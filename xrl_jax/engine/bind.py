"""Binding: which nodes of a graph the positions of a pattern stand for."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xrl_jax.graph import ops
from xrl_jax.graph.graph import TensorGraph, args_of
from xrl_jax.language.table import P, RuleTable


def bind_tree(
    table: RuleTable, tree: jax.Array, root: jax.Array, graph: TensorGraph
) -> tuple[jax.Array, jax.Array]:
    """Return the nodes [P] bound by a pattern tree at `root`, and whether the tree matches."""
    args = args_of(graph)
    code, arities = graph.nodes.op, jnp.sum(args > 0, axis=1)

    def visit(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        bound, ok = carry
        parent, slot = table.pos_parent[tree, j], table.pos_slot[tree, j]
        want = table.pos_op[tree, j]
        node = jnp.where(j == 0, root, args[bound[parent], slot])
        node = jnp.where(want >= 0, node, 0)
        operator = (code[node] == want) & (arities[node] == table.pos_arity[tree, j])
        fits = jnp.where(want == 0, code[node] != ops.HOLE, operator)
        same = table.pos_same[tree, j]
        fits &= (same < 0) | (bound[same] == node)
        return bound.at[j].set(node), ok & (fits | (want < 0))

    start = (jnp.zeros(P, jnp.int32), table.tree_root[tree] >= 0)
    return jax.lax.fori_loop(0, P, visit, start)


def bind(
    table: RuleTable, variant: jax.Array, root: jax.Array, partner: jax.Array, graph: TensorGraph
) -> tuple[jax.Array, jax.Array]:
    """Return the joint binding [2P] of a variant at its roots, and whether the variant matches.

    `partner` is 0 for a variant with one root.
    """
    trees = table.variant_trees[variant]
    both = jax.vmap(bind_tree, in_axes=(None, 0, 0, None))
    bound, fits = both(table, jnp.maximum(trees, 0), jnp.stack([root, partner]), graph)
    two = trees[1] >= 0
    cross = table.cross_same[variant]
    agree = jnp.all((cross < 0) | (bound[0][jnp.maximum(cross, 0)] == bound[1]))
    ok = fits[0] & jnp.where(two, fits[1] & agree & (root != partner), True)
    return jnp.concatenate([bound[0], jnp.where(two, bound[1], 0)]), ok
