"""The nodes that rules create on bindings.

Their attributes come from registers, their shapes and dtypes from the operators' own rules.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.engine import interpreter
from xrl_jax.graph import ops, shapes
from xrl_jax.graph.graph import Nodes
from xrl_jax.language.table import P, Q, RuleTable

_SHAPE_FAMILY = tuple(shapes.SHAPE_FAMILIES.index(s.shape) for s in ops.OPS.values())
_DTYPE_KIND = tuple(
    ("arg0", "arg1", "bool", "attr", "given").index(s.dtype) for s in ops.OPS.values()
)
_DTYPE_FIELD = tuple(s.field("dtype").offset if s.dtype == "attr" else 0 for s in ops.OPS.values())
_CONST = ops.OPS["const"].code
# A type is a vector: shape [R], rank, dtype, and whether the value is weight-only. XLA compiles one
# array faster than four.
_RANK, _DTYPE, _WEIGHT_ONLY = (ops.MAX_RANK + i for i in range(3))
_BLANK = np.array([1] * ops.MAX_RANK + [0, 0, 0], np.int32)  # the type of a missing node


class NewNodes(NamedTuple):
    """Nodes that a rule creates at a place; `args` are binding codes as in `RuleTable.new_args`."""

    nodes: Nodes  # fields [Q, ...]; op 0 for unused ones
    args: jax.Array  # [Q, A] int32
    arg_shapes: jax.Array  # [Q, A, R] int32
    arg_ranks: jax.Array  # [Q, A] int32
    arg_dtypes: jax.Array  # [Q, A] int32
    arg_weight_only: jax.Array  # [Q, A] bool
    ok: jax.Array  # bool, the conditions hold and all types are valid


def _shapes(code: jax.Array, attrs: jax.Array, args: jax.Array, n: jax.Array) -> jax.Array:
    """Return the shapes, ranks and whether the arguments fit, concatenated to [C, R + 2].

    The nodes have operators `code` [C] and `n` [C] arguments of types `args` [C, A, T].
    """
    family = jnp.asarray(_SHAPE_FAMILY, jnp.int32)[code]

    def inferred(i: int, rule: shapes.ShapeRule, old: jax.Array) -> jax.Array:
        inputs = attrs, args[:, :, :_RANK], args[:, :, _RANK], n
        shape, rank, fits = jax.vmap(functools.partial(rule, jnp))(*inputs)
        new = jnp.concatenate([shape, rank[:, None], fits[:, None]], axis=1, dtype=jnp.int32)
        return jnp.where((family == i)[:, None], new, old)

    branches = [
        functools.partial(inferred, i, rule) for i, rule in enumerate(shapes.SHAPE_RULES.values())
    ]
    return interpreter.apply_present(family, branches, jnp.zeros((len(code), _RANK + 2), jnp.int32))


def _types(
    table: RuleTable,
    nodes: Nodes,
    variant: jax.Array,
    bound: jax.Array,
    attrs: jax.Array,
    holds: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return types [C, 2P + Q + 1, T] by binding code, and whether all of them are valid [C].

    The last type of each binding is blank. `attrs` [C, Q, K] are those of the new nodes.
    """
    each = jnp.arange(len(variant))
    new_op, new_args, new_dtype = (
        table.new_op[variant],
        table.new_args[variant],
        table.new_dtype[variant],
    )
    kind, place = (jnp.asarray(v, jnp.int32) for v in (_DTYPE_KIND, _DTYPE_FIELD))

    def make(q: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        types, ok = carry
        op, here, present = new_op[:, q], attrs[:, q], new_args[:, q] >= 0
        args = types[each[:, None], new_args[:, q]]
        found = _shapes(op, here, args, jnp.sum(present, axis=1, dtype=jnp.int32))
        choices = [
            args[:, 0, _DTYPE],
            args[:, 1, _DTYPE],
            jnp.full_like(op, ops.DTYPE_CODE["bool"]),
            here[each, place[op]],
            types[each, new_dtype[:, q], _DTYPE],
        ]
        dtype = jnp.select([kind[op] == i for i in range(len(choices))], choices)
        fits = (found[:, _RANK + 1] != 0) & (found[:, _RANK] <= ops.MAX_RANK)
        known = jnp.all(args[:, :, _DTYPE] < ops.DTYPE_CODE["extended"], axis=1)
        weights = (op == _CONST) | jnp.all(~present | (args[:, :, _WEIGHT_ONLY] != 0), axis=1)
        new = jnp.concatenate([found[:, :_DTYPE], dtype[:, None], weights[:, None]], axis=1)
        none = op == ops.HOLE
        types = types.at[:, 2 * P + q].set(jnp.where(none[:, None], _BLANK, new))
        return types, ok & (none | (fits & known))

    columns = [c[:, None] for c in (nodes.rank, nodes.dtype, nodes.weight_only.astype(jnp.int32))]
    old = jnp.concatenate([nodes.shape, *columns], axis=1)[bound]
    types = jnp.concatenate(
        [old, jnp.broadcast_to(_BLANK, (len(variant), Q + 1, len(_BLANK)))], axis=1
    )
    n_new = jnp.sum(new_op != ops.HOLE, axis=1)
    most = jnp.max(jnp.where(holds, n_new, 0))
    types, ok = jax.lax.fori_loop(0, most, make, (types, holds))
    # Each root's replacement must have the shape and dtype of the root, and be weight-only exactly
    # if the root is: then the consumers keep their `weight_only` flag and their cost.
    to = table.root_to[variant]
    same = jnp.all(types[each[:, None], to] == types[:, : 2 * P : P], axis=2)
    return types, ok & jnp.all((to < 0) | same, axis=1)


@jax.jit  # traced once for all callers
def new_nodes(
    table: RuleTable,
    nodes: Nodes,
    variant: jax.Array,
    bound: jax.Array,
    registers: jax.Array,
    holds: jax.Array,
) -> NewNodes:
    """Return `NewNodes` [C, ...] of variants [C] on bindings [C, 2P] with registers [I, C, K].

    The result is ok only where `holds` [C].
    """
    variant = jnp.maximum(variant, 0)
    each = jnp.arange(len(variant))[:, None]
    new_op, new_args = table.new_op[variant], table.new_args[variant]
    attrs = registers[table.new_attrs[variant], each]  # [C, Q, K]
    types, ok = _types(table, nodes, variant, bound, attrs, holds)
    new = types[:, 2 * P : -1]
    args, like_args = (
        types[each[:, None], codes] for codes in (new_args, table.like_args[variant])
    )
    # A lowering may be kept only if the operator's attributes and operand types are the same.
    like = table.new_like[variant]
    was = jnp.take_along_axis(bound, jnp.maximum(like, 0), axis=1)
    alike = (like >= 0) & jnp.all(args == like_args, axis=(2, 3))
    keeps = alike & jnp.all(attrs == nodes.attrs[was], axis=2)
    made = Nodes(
        new_op,
        jnp.where((new_op != ops.HOLE)[:, :, None], attrs, 0),
        jnp.where(keeps, nodes.lowering[was], table.new_lowering[variant]),
        new[:, :, :_RANK],
        new[:, :, _RANK],
        new[:, :, _DTYPE],
        table.new_value[variant],
        jnp.full((len(variant), Q), -1, jnp.int32),
        new[:, :, _WEIGHT_ONLY] != 0,
        jnp.zeros((len(variant), Q), jnp.float32),
    )
    return NewNodes(
        made,
        new_args,
        args[..., :_RANK],
        args[..., _RANK],
        args[..., _DTYPE],
        args[..., _WEIGHT_ONLY] != 0,
        ok,
    )
