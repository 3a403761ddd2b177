"""Whether graphs are well formed, inside jit: one boolean each for many graphs at once.

The host's `check` also inspects attribute ranges, lowerings and references, and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops, shapes
from xrl_jax.graph.graph import TensorGraph, args_of

_DTYPE_KINDS = ("given", "arg0", "arg1", "bool", "attr")


def _table(column: str) -> jax.Array:
    specs = ops.OPS.values()
    match column:
        case "shape":
            rows: list[Any] = [shapes.SHAPE_FAMILIES.index(s.shape) for s in specs]
        case "arity":
            rows = [s.arity for s in specs]
        case "dtype":
            rows = [_DTYPE_KINDS.index(s.dtype) for s in specs]
        case "dtype_at":
            rows = [s.field("dtype").offset if s.dtype == "attr" else 0 for s in specs]
        case _:
            rows = [[i in s.one_dtype for i in range(ops.MAX_ARGS)] for s in specs]
    return jnp.asarray(np.asarray(rows))


def _is_op(code: jax.Array, names: Sequence[str]) -> jax.Array:
    return jnp.isin(code, jnp.asarray([ops.OPS[n].code for n in names]))


def is_valid(graph: TensorGraph) -> jax.Array:
    """Whether arguments, shapes, dtypes, depths and weight-only flags are right; a scalar bool."""
    f, depth, table = graph.nodes, graph.globals.depth, args_of(graph)
    n = f.op.shape[0]
    inside = jnp.all((f.op >= 0) & (f.op < ops.N_OPS)) & jnp.all((table >= 0) & (table < n))
    families, arity, kinds = _table("shape"), _table("arity"), _table("dtype")
    dtype_at, same_dtype = _table("dtype_at"), _table("same_dtype")

    def typed(rule: shapes.ShapeRule) -> Any:
        def call(attrs: Any, sizes: Any, ranks: Any, n_args: Any) -> Any:
            shape, rank, ok = rule(jnp, attrs, sizes, ranks, n_args)
            return shape.astype(jnp.int32), jnp.asarray(rank, jnp.int32), jnp.asarray(ok, bool)

        return call

    rules = [typed(rule) for rule in shapes.SHAPE_RULES.values()]

    def one(slot: jax.Array) -> jax.Array:
        op, attrs, args = f.op[slot], f.attrs[slot], table[slot]
        present = args > 0
        n_args = jnp.sum(present)
        ok = jnp.all(present == (jnp.arange(ops.MAX_ARGS) < n_args))
        ok &= jnp.all((f.op[args] != ops.HOLE) | ~present)
        ok &= (n_args >= arity[op, 0]) & (n_args <= arity[op, 1])

        sizes = jnp.where(present[:, None], f.shape[args], 1)
        ranks = jnp.where(present, f.rank[args], 0)
        shape, rank, fits = jax.lax.switch(families[op], rules, attrs, sizes, ranks, n_args)
        fits &= jnp.all(shape == f.shape[slot]) & (rank == f.rank[slot])
        fits &= jnp.all(ranks <= ops.MAX_RANK)
        ok &= fits | (families[op] == shapes.SHAPE_FAMILIES.index("given"))

        dtypes = jnp.where(present, f.dtype[args], 0)
        own = f.dtype[slot]
        wanted = jnp.stack(
            [own, dtypes[0], dtypes[1], jnp.int32(ops.DTYPE_CODE["bool"]), attrs[dtype_at[op]]]
        )
        same = same_dtype[op] & present
        ok &= own == wanted[kinds[op]]
        ok &= jnp.all((dtypes == dtypes[jnp.argmax(same)]) | ~same)

        ok &= jnp.all((depth[args] < depth[slot]) | ~present)
        pinned = _is_op(op, ("opaque", "call")) & (attrs[0] == 1)
        constant = _is_op(op, ("weight", "array", "const", "iota"))
        from_weights = jnp.all(f.weight_only[args] | ~present) & (op != ops.OPS["input"].code)
        ok &= f.weight_only[slot] == (constant | (from_weights & ~pinned))
        return jnp.where(op == ops.HOLE, n_args == 0, ok)

    outputs = graph.globals.outputs
    shown = (outputs == -1) | ((outputs > 0) & (outputs < n) & (f.op[outputs] != ops.HOLE))
    return inside & (f.op[0] == ops.HOLE) & jnp.all(jax.vmap(one)(jnp.arange(n))) & jnp.all(shown)


def is_acyclic(graph: TensorGraph) -> jax.Array:
    """Whether every node's `depth` is above those of its arguments; a cycle has no such depths."""
    table = args_of(graph)
    depth = graph.globals.depth
    live = graph.nodes.op != ops.HOLE
    return jnp.all((depth[:, None] > depth[table]) | (table == 0) | ~live[:, None])
