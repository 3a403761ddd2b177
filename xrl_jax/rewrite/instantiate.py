"""From a match to the nodes a rule would make: bind, evaluate conditions and attributes, type the
right-hand side.

Bindings of one entry are worked on together: then the entry's program and its new nodes are the
same for all of them, and of
the opcodes and shape rules only the one at hand runs, not all with one chosen at the end, as under
a plain vmap over entries
(which took eight times as long on BERT). A batch of graphs is one longer list of bindings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.graph import ops, shapes
from xrl_jax.graph.graph import Nodes, TensorGraph, args_of
from xrl_jax.rewrite import bytecode
from xrl_jax.rewrite.table import P, Q, RuleTable

_SHAPE_FAMILY = tuple(shapes.SHAPE_FAMILIES.index(s.shape) for s in ops.OPS.values())
_DTYPE_KIND = tuple(
    ("arg0", "arg1", "bool", "attr", "given").index(s.dtype) for s in ops.OPS.values()
)
_DTYPE_FIELD = tuple(s.field("dtype").offset if s.dtype == "attr" else 0 for s in ops.OPS.values())
_CONST = ops.OPS["const"].code
_GROUP = 32  # bindings of an entry worked on at once


class NewNodes(NamedTuple):
    """Nodes a rule makes at one place; `args` are binding codes as in `RuleTable.new_args`."""

    nodes: Nodes  # fields [Q, ...]; op 0 where not used
    args: jax.Array  # [Q, A] int32
    arg_shapes: jax.Array  # [Q, A, R] int32
    arg_ranks: jax.Array  # [Q, A] int32
    arg_dtypes: jax.Array  # [Q, A] int32
    arg_weight_only: jax.Array  # [Q, A] bool
    ok: jax.Array  # bool, the conditions hold and everything types


def bind_tree(
    table: RuleTable, row: jax.Array, root: jax.Array, graph: TensorGraph
) -> tuple[jax.Array, jax.Array]:
    """Nodes [P] that the positions of a pattern tree stand for at `root`, and whether the tree
    matches."""
    args = args_of(graph)
    code = graph.nodes.op

    def visit(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        bound, ok = carry
        parent, slot = table.pos_parent[row, j], table.pos_slot[row, j]
        want = table.pos_op[row, j]
        node = jnp.where(j == 0, root, args[bound[parent], slot])
        node = jnp.where(want >= 0, node, 0)
        arity = jnp.sum(args[node] > 0)
        operator = (code[node] == want) & (arity == table.pos_arity[row, j])
        fits = jnp.where(want == 0, code[node] != ops.HOLE, operator)
        same = table.pos_same[row, j]
        fits &= (same < 0) | (bound[same] == node)
        return bound.at[j].set(node), ok & (fits | (want < 0))

    start = (jnp.zeros(P, jnp.int32), table.row_role[row] >= 0)
    return jax.lax.fori_loop(0, P, visit, start)


def bind(
    table: RuleTable, entry: jax.Array, root: jax.Array, partner: jax.Array, graph: TensorGraph
) -> tuple[jax.Array, jax.Array]:
    """The joint binding [2P] of an entry at its roots (`partner` 0 where there is one root), and
    whether it matches."""
    rows = table.entry_rows[entry]
    both = jax.vmap(bind_tree, in_axes=(None, 0, 0, None))
    bound, fits = both(table, jnp.maximum(rows, 0), jnp.stack([root, partner]), graph)
    two = rows[1] >= 0
    cross = table.cross_same[entry]
    agree = jnp.all((cross < 0) | (bound[0][jnp.maximum(cross, 0)] == bound[1]))
    ok = fits[0] & jnp.where(two, fits[1] & agree & (root != partner), True)
    return jnp.concatenate([bound[0], jnp.where(two, bound[1], 0)]), ok


def _shape(
    code: jax.Array, attrs: jax.Array, arg_shapes: jax.Array, arg_ranks: jax.Array, n: jax.Array
) -> tuple:
    branches = [
        lambda *a, rule=rule: tuple(
            jnp.asarray(v).astype(t)
            for v, t in zip(rule(jnp, *a), (jnp.int32, jnp.int32, bool), strict=True)
        )
        for rule in shapes.SHAPE_RULES.values()
    ]
    family = jnp.asarray(_SHAPE_FAMILY, jnp.int32)[code]
    return jax.lax.switch(family, branches, attrs, arg_shapes, arg_ranks, n)


def instantiate(
    table: RuleTable, entry: jax.Array, bound: jax.Array, graph: TensorGraph
) -> NewNodes:
    """The nodes an entry makes on a binding; vmap over bindings, graphs or both, the table being
    the same.

    Args:
      entry: scalar index; where it is negative, nothing is computed and the result is not ok.
      bound: [2P] node slots, see `bind`.
    """
    made = _instantiate_many(table, graph.nodes, entry[None], bound[None])
    return jax.tree.map(lambda v: v[0], made)


@jax.custom_batching.custom_vmap
def _instantiate_many(
    table: RuleTable, nodes: Nodes, entry: jax.Array, bound: jax.Array
) -> NewNodes:
    """`NewNodes` [S, ...] for entries [S] and bindings [S, 2P], group by group of equal entries."""
    s = entry.shape[0]
    width = min(s, _GROUP)
    order = jnp.argsort(entry).astype(jnp.int32)
    ordered = entry[order]

    def group(
        carry: tuple[jax.Array, jax.Array, NewNodes],
    ) -> tuple[jax.Array, jax.Array, NewNodes]:
        start, registers, out = carry
        place = start + jnp.arange(width, dtype=jnp.int32)
        current = ordered[start]
        inside = (place < s) & (ordered[jnp.minimum(place, s - 1)] == current)
        at = order[jnp.minimum(place, s - 1)]
        program = (
            table.code[current],
            table.fimm[current],
            table.length[current],
            table.guard[current],
        )
        registers, holds = bytecode.run(
            *program, bytecode.Bound(nodes, bound[at]), inside, registers
        )

        def put() -> NewNodes:
            made = _new_nodes(table, nodes, current, bound[at], registers, holds)
            return jax.tree.map(
                lambda old, new: old.at[jnp.where(inside, at, s)].set(new, mode="drop"), out, made
            )

        return start + jnp.sum(inside), registers, jax.lax.cond(jnp.any(holds), put, lambda: out)

    registers = jnp.zeros((table.code.shape[1], width, bytecode.K), jnp.int32)
    like = jax.eval_shape(
        _new_nodes, table, nodes, entry[0], bound[:width], registers, entry[:width] >= 0
    )
    blank = jax.tree.map(lambda v: jnp.zeros((s, *v.shape[1:]), v.dtype), like)
    start = (jnp.sum(entry < 0), registers, blank)
    return jax.lax.while_loop(lambda c: c[0] < s, group, start)[2]


@_instantiate_many.def_vmap
def _(
    size: int, batched: Any, table: RuleTable, nodes: Nodes, entry: jax.Array, bound: jax.Array
) -> tuple[NewNodes, Any]:
    """A batch is one longer list: of bindings, and where the graphs differ of nodes, too."""
    if any(jax.tree.leaves(batched[0])):
        raise ValueError("a batch has one rule table: do not vmap over the tables")

    def repeat(v: jax.Array, is_batched: bool) -> jax.Array:
        return v if is_batched else jnp.broadcast_to(v, (size, *v.shape))

    entry, bound = repeat(entry, batched[2]), repeat(bound, batched[3])
    if any(jax.tree.leaves(batched[1])):
        nodes = jax.tree.map(repeat, nodes, batched[1])
        n = nodes.op.shape[1]
        bound = bound + n * jnp.arange(size, dtype=jnp.int32)[:, None, None]
        nodes = jax.tree.map(lambda v: v.reshape(size * n, *v.shape[2:]), nodes)
    made = _instantiate_many(table, nodes, entry.reshape(-1), bound.reshape(-1, 2 * P))
    split = jax.tree.map(lambda v: v.reshape(size, -1, *v.shape[1:]), made)
    return split, jax.tree.map(lambda _: True, split)


def _new_nodes(
    table: RuleTable,
    nodes: Nodes,
    entry: jax.Array,
    bound: jax.Array,
    registers: jax.Array,
    holds: jax.Array,
) -> NewNodes:
    """`NewNodes` [C, ...] of one entry on bindings [C, 2P] with their registers [I, C, K]; ok only
    where `holds` [C]."""
    new_op, new_args = table.new_op[entry], table.new_args[entry]
    attrs = jnp.swapaxes(registers[table.new_attrs[entry]], 0, 1)  # [C, Q, K]
    n_new = jnp.sum(new_op != ops.HOLE)
    kind = jnp.asarray(_DTYPE_KIND, jnp.int32)
    place = jnp.asarray(_DTYPE_FIELD, jnp.int32)
    bool_code = ops.DTYPE_CODE["bool"]

    def typed(bound: jax.Array, attrs: jax.Array, holds: jax.Array) -> NewNodes:
        def make(q: jax.Array, carry: tuple) -> tuple:
            shape, rank, dtype, weight_only, ok = carry
            args = new_args[q]
            at = jnp.maximum(args, 0)
            present = args >= 0
            arg_shapes = jnp.where(present[:, None], shape[at], 1)
            arg_ranks = jnp.where(present, rank[at], 0)
            op = new_op[q]
            out_shape, out_rank, fits = _shape(
                op, attrs[q], arg_shapes, arg_ranks, jnp.sum(present)
            )
            given = dtype[jnp.maximum(table.new_dtype[entry, q], 0)]
            choices = jnp.stack(
                [dtype[at[0]], dtype[at[1]], jnp.int32(bool_code), attrs[q, place[op]], given]
            )
            known = jnp.all(~present | (dtype[at] < ops.DTYPE_CODE["extended"]))
            weights = (op == _CONST) | jnp.all(~present | weight_only[at])
            here = 2 * P + q
            return (
                shape.at[here].set(out_shape),
                rank.at[here].set(out_rank),
                dtype.at[here].set(choices[kind[op]]),
                weight_only.at[here].set(weights),
                ok & fits & known & (out_rank <= ops.MAX_RANK),
            )

        def tail(v: jax.Array, fill: int) -> jax.Array:
            return jnp.concatenate([v[bound], jnp.full((Q, *v.shape[1:]), fill, v.dtype)])

        start = (
            tail(nodes.shape, 1),
            tail(nodes.rank, 0),
            tail(nodes.dtype, 0),
            tail(nodes.weight_only, False),
            holds,
        )
        shape, rank, dtype, weight_only, ok = jax.lax.fori_loop(0, n_new, make, start)
        at, present = jnp.maximum(new_args, 0), new_args >= 0
        # Each root's replacement has the shape and dtype of the root.
        for role in range(2):
            to, root = table.root_to[entry, role], role * P
            same = (
                jnp.all(shape[to] == shape[root])
                & (rank[to] == rank[root])
                & (dtype[to] == dtype[root])
            )
            ok &= (to < 0) | same
        made = Nodes(
            new_op,
            jnp.where((new_op == ops.HOLE)[:, None], 0, attrs),
            table.new_lowering[entry],
            shape[2 * P :],
            rank[2 * P :],
            jnp.where(new_op == ops.HOLE, 0, dtype[2 * P :]),
            table.new_value[entry],
            jnp.full(Q, -1, jnp.int32),
            weight_only[2 * P :],
            jnp.zeros(Q, jnp.float32),
        )
        return NewNodes(
            made,
            new_args,
            jnp.where(present[..., None], shape[at], 1),
            jnp.where(present, rank[at], 0),
            jnp.where(present, dtype[at], 0),
            present & weight_only[at],
            ok,
        )

    return jax.vmap(typed)(bound, attrs, holds)
