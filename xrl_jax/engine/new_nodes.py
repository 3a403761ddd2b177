"""The nodes that rules make of bindings: attributes from registers, shapes and dtypes by the
operators' own rules.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.engine import interpreter
from xrl_jax.graph import ops, shapes
from xrl_jax.graph.graph import Nodes
from xrl_jax.graph.view import view_with
from xrl_jax.language.table import P, Q, RuleTable
from xrl_jax.lower.table import fits

_SHAPE_FAMILY = tuple(shapes.SHAPE_FAMILIES.index(s.shape) for s in ops.OPS.values())
_DTYPE_KIND = tuple(
    ("arg0", "arg1", "bool", "attr", "given").index(s.dtype) for s in ops.OPS.values()
)
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


def _shape(
    code: jax.Array, attrs: jax.Array, arg_shapes: jax.Array, arg_ranks: jax.Array, n: jax.Array
) -> tuple[jax.Array, ...]:
    """Shape [C, R], rank [C] and whether the arguments fit, of nodes with operators `code` [C]."""
    family = jnp.asarray(_SHAPE_FAMILY, jnp.int32)[code]
    start = (jnp.ones_like(arg_shapes[:, 0]), jnp.zeros_like(n), jnp.zeros(n.shape, bool))

    def inferred(i: int, rule: shapes.ShapeRule, old: tuple) -> tuple[jax.Array, ...]:
        new = jax.vmap(functools.partial(rule, jnp))(attrs, arg_shapes, arg_ranks, n)
        here = family == i
        return tuple(
            jnp.where(here.reshape(-1, *[1] * (o.ndim - 1)), v.astype(o.dtype), o)
            for v, o in zip(new, old, strict=True)
        )

    branches = [
        functools.partial(inferred, i, rule) for i, rule in enumerate(shapes.SHAPE_RULES.values())
    ]
    return interpreter.at_hand(family, branches, start)


def _may_choose(table: RuleTable, nodes: Nodes, entry: jax.Array, bound: jax.Array) -> jax.Array:
    """Whether entries [C] that choose a lowering for their root may do so; True for others."""
    choice = table.entry_choice[entry]

    def asked() -> jax.Array:
        # The arguments of the root stand behind it: a lowering is chosen for a node as it is.
        views = view_with(nodes, bound[:, 0], bound[:, 1 : 1 + ops.MAX_ARGS])
        found = jax.vmap(fits)(views)
        chosen = jnp.take_along_axis(found, jnp.maximum(choice, 0)[:, None], axis=1)[:, 0]
        return (choice < 0) | chosen

    return jax.lax.cond(jnp.any(choice >= 0), asked, lambda: jnp.ones(len(entry), bool))


@jax.jit  # traced once for all that ask
def new_nodes(
    table: RuleTable,
    nodes: Nodes,
    entry: jax.Array,
    bound: jax.Array,
    registers: jax.Array,
    holds: jax.Array,
) -> NewNodes:
    """`NewNodes` [C, ...] of entries [C] on bindings [C, 2P] with their registers [I, C, K]; ok
    only where `holds` [C]."""
    entry = jnp.maximum(entry, 0)
    holds &= _may_choose(table, nodes, entry, bound)
    each = jnp.arange(len(entry))
    new_op, new_args, new_dtype = table.new_op[entry], table.new_args[entry], table.new_dtype[entry]
    attrs = registers[table.new_attrs[entry], each[:, None]]  # [C, Q, K]
    n_new = jnp.sum(new_op != ops.HOLE, axis=1)
    kind = jnp.asarray(_DTYPE_KIND, jnp.int32)
    place = jnp.asarray(_DTYPE_FIELD, jnp.int32)

    def make(q: jax.Array, carry: tuple) -> tuple:
        shape, rank, dtype, weight_only, ok = carry
        args, op, here = new_args[:, q], new_op[:, q], attrs[:, q]
        present = args >= 0
        at = (each[:, None], jnp.maximum(args, 0))
        arg_dtypes = dtype[at]
        out_shape, out_rank, typed = _shape(
            op,
            here,
            jnp.where(present[:, :, None], shape[at], 1),
            jnp.where(present, rank[at], 0),
            jnp.sum(present, axis=1, dtype=jnp.int32),
        )
        choices = [
            arg_dtypes[:, 0],
            arg_dtypes[:, 1],
            jnp.full_like(op, ops.DTYPE_CODE["bool"]),
            here[each, place[op]],
            dtype[each, jnp.maximum(new_dtype[:, q], 0)],
        ]
        out_dtype = jnp.select([kind[op] == i for i in range(len(choices))], choices)
        known = jnp.all(~present | (arg_dtypes < ops.DTYPE_CODE["extended"]), axis=1)
        weights = (op == _CONST) | jnp.all(~present | weight_only[at], axis=1)
        return (
            shape.at[:, 2 * P + q].set(out_shape),
            rank.at[:, 2 * P + q].set(out_rank),
            dtype.at[:, 2 * P + q].set(out_dtype),
            weight_only.at[:, 2 * P + q].set(weights),
            ok & ((op == ops.HOLE) | (typed & known & (out_rank <= ops.MAX_RANK))),
        )

    def tail(v: jax.Array, fill: int) -> jax.Array:
        new = jnp.full((len(entry), Q, *v.shape[1:]), fill, v.dtype)
        return jnp.concatenate([v[bound], new], axis=1)

    start = (
        tail(nodes.shape, 1),
        tail(nodes.rank, 0),
        tail(nodes.dtype, 0),
        tail(nodes.weight_only, False),
        holds,
    )
    most = jnp.max(jnp.where(holds, n_new, 0))
    shape, rank, dtype, weight_only, ok = jax.lax.fori_loop(0, most, make, start)
    # Each root's replacement has the shape and dtype of the root, and depends on inputs only if the
    # root does: what reads it keeps its flag and its cost.
    for role in range(2):
        to, root = table.root_to[entry, role], role * P
        same = (
            jnp.all(shape[each, to] == shape[:, root], axis=1)
            & (rank[each, to] == rank[:, root])
            & (dtype[each, to] == dtype[:, root])
            & (weight_only[each, to] == weight_only[:, root])
        )
        ok &= (to < 0) | same
    present, used = new_args >= 0, new_op != ops.HOLE

    def types(codes: jax.Array) -> tuple[jax.Array, ...]:
        """Shapes, ranks, dtypes and whether they are weights, of bindings [C, Q, A]."""
        at = (each[:, None, None], jnp.maximum(codes, 0))
        return shape[at], rank[at], dtype[at], weight_only[at]

    args = types(new_args)
    # A lowering is right for an operator with these attributes on operands of these types.
    like, like_args = table.new_like[entry], table.like_args[entry]
    was = jnp.take_along_axis(bound, jnp.maximum(like, 0), axis=1)
    same_shape, *same = (a == b for a, b in zip(args, types(like_args), strict=True))
    alike = functools.reduce(jnp.logical_and, same, jnp.all(same_shape, axis=3))
    alike = jnp.all((present == (like_args >= 0)) & (~present | alike), axis=2)
    keeps = (like >= 0) & alike & jnp.all(attrs == nodes.attrs[was], axis=2)
    made = Nodes(
        new_op,
        jnp.where(used[:, :, None], attrs, 0),
        jnp.where(keeps, nodes.lowering[was], table.new_lowering[entry]),
        jnp.where(used[:, :, None], shape[:, 2 * P :], 1),
        jnp.where(used, rank[:, 2 * P :], 0),
        jnp.where(used, dtype[:, 2 * P :], 0),
        table.new_value[entry],
        jnp.full((len(entry), Q), -1, jnp.int32),
        used & weight_only[:, 2 * P :],
        jnp.zeros((len(entry), Q), jnp.float32),
    )
    return NewNodes(
        made,
        new_args,
        jnp.where(present[..., None], args[0], 1),
        jnp.where(present, args[1], 0),
        jnp.where(present, args[2], 0),
        present & args[3],
        ok,
    )
