"""From a match to the nodes a rule would make: bind, evaluate conditions and attributes, type the right-hand side."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.graph import ops, shapes
from xrl_jax.graph.graph import Nodes, TensorGraph, args_of
from xrl_jax.rewrite import bytecode
from xrl_jax.rewrite.table import P, Q, RuleTable

_SHAPE_FAMILY = tuple(shapes.SHAPE_FAMILIES.index(s.shape) for s in ops.OPS.values())
_DTYPE_KIND = tuple(("arg0", "arg1", "bool", "attr", "given").index(s.dtype) for s in ops.OPS.values())
_DTYPE_FIELD = tuple(s.field("dtype").offset if s.dtype == "attr" else 0 for s in ops.OPS.values())
_CONST = ops.OPS["const"].code


class NewNodes(NamedTuple):
    """Nodes a rule makes at one place; `args` are binding codes as in `RuleTable.new_args`."""

    nodes: Nodes  # fields [Q, ...]; op 0 where not used
    args: jax.Array  # [Q, A] int32
    arg_shapes: jax.Array  # [Q, A, R] int32
    arg_ranks: jax.Array  # [Q, A] int32
    arg_dtypes: jax.Array  # [Q, A] int32
    arg_weight_only: jax.Array  # [Q, A] bool
    ok: jax.Array  # bool, the conditions hold and everything types


def bind_tree(table: RuleTable, row: jax.Array, root: jax.Array, graph: TensorGraph) -> tuple[jax.Array, jax.Array]:
    """Nodes [P] that the positions of a pattern tree stand for at `root`, and whether the tree matches."""
    args = args_of(graph)
    code = graph.nodes.op
    arity = jnp.sum(args > 0, axis=1)

    def visit(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        bound, ok = carry
        parent, slot = table.pos_parent[row, j], table.pos_slot[row, j]
        want = table.pos_op[row, j]
        node = jnp.where(j == 0, root, args[bound[parent], slot])
        node = jnp.where(want >= 0, node, 0)
        operator = (code[node] == want) & (arity[node] == table.pos_arity[row, j])
        fits = jnp.where(want == 0, code[node] != ops.HOLE, operator)
        same = table.pos_same[row, j]
        fits &= (same < 0) | (bound[same] == node)
        return bound.at[j].set(node), ok & (fits | (want < 0))

    start = (jnp.zeros(P, jnp.int32), table.row_role[row] >= 0)
    return jax.lax.fori_loop(0, P, visit, start)


def bind(
    table: RuleTable, entry: jax.Array, root: jax.Array, partner: jax.Array, graph: TensorGraph
) -> tuple[jax.Array, jax.Array]:
    """The joint binding [2P] of an entry at its roots (`partner` 0 where there is one root), and whether it matches."""
    first, second = table.entry_rows[entry, 0], table.entry_rows[entry, 1]
    bound0, ok0 = bind_tree(table, first, root, graph)
    bound1, ok1 = bind_tree(table, jnp.maximum(second, 0), partner, graph)
    two = second >= 0
    cross = table.cross_same[entry]
    agree = jnp.all((cross < 0) | (bound0[jnp.maximum(cross, 0)] == bound1))
    ok = ok0 & jnp.where(two, ok1 & agree & (root != partner), True)
    return jnp.concatenate([bound0, jnp.where(two, bound1, 0)]), ok


def _shape(code: jax.Array, attrs: jax.Array, arg_shapes: jax.Array, arg_ranks: jax.Array, n: jax.Array) -> tuple:
    branches = [
        lambda *a, rule=rule: tuple(
            jnp.asarray(v).astype(t) for v, t in zip(rule(jnp, *a), (jnp.int32, jnp.int32, bool), strict=True)
        )
        for rule in shapes.SHAPE_RULES.values()
    ]
    family = jnp.asarray(_SHAPE_FAMILY, jnp.int32)[code]
    return jax.lax.switch(family, branches, attrs, arg_shapes, arg_ranks, n)


def instantiate(table: RuleTable, entry: jax.Array, bound: jax.Array, graph: TensorGraph, length: jax.Array) -> NewNodes:
    """The nodes an entry makes on a binding.

    Args:
      entry: scalar index.
      bound: [2P] node slots, see `bind`.
      length: how many instructions to run (at least the entry's own; the same over a batch keeps the loop short).
    """
    f = graph.nodes
    properties = bytecode.properties_of(
        f.op[bound], f.attrs[bound], f.lowering[bound], f.shape[bound], f.rank[bound], f.dtype[bound],
        f.weight_only[bound],
    )  # fmt: skip
    # Only a constant has a value that conditions may rely on; NaN equals nothing.
    known = (f.op[bound] == _CONST) & (f.ref[bound] < 0)
    values = jnp.where(known, f.value[bound], jnp.nan)
    registers = bytecode.run(
        table.code[entry], length, table.fimm[entry], properties, f.attrs[bound], values
    )
    guard = jnp.all(registers[table.guard[entry]] != 0)
    new_op, new_args = table.new_op[entry], table.new_args[entry]
    attrs = registers[table.new_attrs[entry]]
    kind = jnp.asarray(_DTYPE_KIND, jnp.int32)
    place = jnp.asarray(_DTYPE_FIELD, jnp.int32)
    bool_code = ops.DTYPE_CODE["bool"]

    def make(q: jax.Array, carry: tuple) -> tuple:
        shape, rank, dtype, weight_only, ok = carry
        args = new_args[q]
        at = jnp.maximum(args, 0)
        present = args >= 0
        arg_shapes = jnp.where(present[:, None], shape[at], 1)
        arg_ranks = jnp.where(present, rank[at], 0)
        op = new_op[q]
        out_shape, out_rank, fits = _shape(op, attrs[q], arg_shapes, arg_ranks, jnp.sum(present))
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
            ok & ((op == ops.HOLE) | (fits & known & (out_rank <= ops.MAX_RANK))),
        )

    tail = lambda v, fill: jnp.concatenate([v, jnp.full((Q, *v.shape[1:]), fill, v.dtype)])  # noqa: E731
    start = (tail(f.shape[bound], 1), tail(f.rank[bound], 0), tail(f.dtype[bound], 0), tail(f.weight_only[bound], False), guard)
    shape, rank, dtype, weight_only, ok = jax.lax.fori_loop(0, Q, make, start)
    at, present = jnp.maximum(new_args, 0), new_args >= 0
    # Each root's replacement has the shape and dtype of the root.
    for role in range(2):
        to = table.root_to[entry, role]
        root = bound[role * P]
        same = jnp.all(shape[to] == f.shape[root]) & (rank[to] == f.rank[root]) & (dtype[to] == f.dtype[root])
        ok &= (to < 0) | same
    nodes = Nodes(
        new_op, jnp.where((new_op == ops.HOLE)[:, None], 0, attrs), table.new_lowering[entry], shape[2 * P :], rank[2 * P :],
        jnp.where(new_op == ops.HOLE, 0, dtype[2 * P :]), table.new_value[entry], jnp.full(Q, -1, jnp.int32),
        weight_only[2 * P :], jnp.zeros(Q, jnp.float32),
    )  # fmt: skip
    return NewNodes(
        nodes, new_args, jnp.where(present[..., None], shape[at], 1), jnp.where(present, rank[at], 0),
        jnp.where(present, dtype[at], 0), present & weight_only[at], ok,
    )  # fmt: skip


