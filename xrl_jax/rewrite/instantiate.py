"""From a match to the nodes a rule would make: bind, evaluate conditions and attributes, type the
right-hand side.

All bindings run together, each its entry's program, instruction by instruction; of the opcodes and
shape rules only those at hand are computed. Networks repeat themselves, so that most bindings are
like another one in all that programs and types can see: only different ones are worked on, short
programs first. A batch of graphs is one longer list of bindings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from xrl_jax.graph import ops, shapes
from xrl_jax.graph.graph import Nodes, TensorGraph, args_of
from xrl_jax.graph.hash import dot_words
from xrl_jax.rewrite import bytecode
from xrl_jax.rewrite.table import P, Q, RuleTable

_SHAPE_FAMILY = tuple(shapes.SHAPE_FAMILIES.index(s.shape) for s in ops.OPS.values())
_DTYPE_KIND = tuple(
    ("arg0", "arg1", "bool", "attr", "given").index(s.dtype) for s in ops.OPS.values()
)
_DTYPE_FIELD = tuple(s.field("dtype").offset if s.dtype == "attr" else 0 for s in ops.OPS.values())
_CONST = ops.OPS["const"].code
_CHUNK = 64  # bindings worked on at once
_FIRST = 4  # instructions at which half of the bindings fail that a pattern's operators allow
_NOWHERE = jnp.iinfo(jnp.int32).max


T = TypeVar("T")


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
    code, arities = graph.nodes.op, jnp.sum(args > 0, axis=1)

    def visit(j: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        bound, ok = carry
        parent, slot = table.pos_parent[row, j], table.pos_slot[row, j]
        want = table.pos_op[row, j]
        node = jnp.where(j == 0, root, args[bound[parent], slot])
        node = jnp.where(want >= 0, node, 0)
        operator = (code[node] == want) & (arities[node] == table.pos_arity[row, j])
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


class Asked(NamedTuple):
    """What `wanted` of `ask` is told of bindings [C] that are all different."""

    made: NewNodes  # [C, Q, ...]
    marks: jax.Array  # [C, 2P] of the bound nodes; 0 where there are none
    to: jax.Array  # [C, 2] binding codes of what replaces the roots; -1 for none


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
    return bytecode.at_hand(family, branches, start)


def instantiate(
    table: RuleTable, entry: jax.Array, bound: jax.Array, graph: TensorGraph
) -> NewNodes:
    """The nodes an entry makes on a binding; vmap over bindings, graphs or both, the table being
    the same.

    Args:
      entry: scalar index; where it is negative, nothing is computed and the result is not ok.
      bound: [2P] node slots, see `bind`.
    """
    return ask(_everything, table, entry, bound, graph)


def applies(table: RuleTable, entry: jax.Array, bound: jax.Array, graph: TensorGraph) -> jax.Array:
    """Whether the nodes of `instantiate` are ok, a scalar: many times cheaper than the nodes."""
    return ask(_whether, table, entry, bound, graph)


def _everything(_: None, asked: Asked) -> NewNodes:
    return asked.made


def _whether(_: None, asked: Asked) -> jax.Array:
    return asked.made.ok


def ask(
    wanted: Callable[[Any, Asked], T],
    table: RuleTable,
    entry: jax.Array,
    bound: jax.Array,
    graph: TensorGraph,
    *,
    marks: jax.Array | None = None,
    context: Any = None,
) -> T:
    """What is wanted of the nodes that an entry makes on a binding: the less that is, the faster.
    Zero or meaningless where it does not hold. vmap as for `instantiate`.

    Args:
      wanted: (context, [C] bindings) -> arrays [C, ...]; it is asked once for bindings that are
        alike.
      marks: [N] int32, what of a node `wanted` goes by beside what programs can see.
      context: arrays that it goes by, the same for all.
    """
    seen = _Seen(graph.nodes, marks)
    made = _ask_many(wanted, table, context, seen, entry[None], bound[None])
    return jax.tree.map(lambda v: v[0], made)


class _Seen(NamedTuple):
    """What bindings are looked at by."""

    nodes: Nodes  # [N, ...]
    marks: jax.Array | None  # [N]


def _ask_many(
    wanted: Callable[[Any, Asked], T],
    table: RuleTable,
    context: Any,
    seen: _Seen,
    entry: jax.Array,
    bound: jax.Array,
) -> T:
    """`ask` of entries [S] on bindings [S, 2P]."""

    @jax.custom_batching.custom_vmap
    def many(table: RuleTable, context: Any, seen: _Seen, entry: jax.Array, bound: jax.Array) -> T:
        return _ask_different(wanted, table, context, seen, entry, bound)

    @many.def_vmap
    def _(
        size: int,
        batched: Any,
        table: RuleTable,
        context: Any,
        seen: _Seen,
        entry: jax.Array,
        bound: jax.Array,
    ) -> tuple[T, Any]:
        """A batch is one longer list: of bindings, and where the graphs differ of nodes, too."""
        if any(jax.tree.leaves(batched[:2])):
            raise ValueError("a batch has one rule table and one cost table: do not vmap over them")

        def repeat(v: jax.Array, is_batched: bool) -> jax.Array:
            return v if is_batched else jnp.broadcast_to(v, (size, *v.shape))

        entry, bound = repeat(entry, batched[3]), repeat(bound, batched[4])
        if any(jax.tree.leaves(batched[2])):
            seen = jax.tree.map(repeat, seen, batched[2])
            n = seen.nodes.op.shape[1]
            bound = bound + n * jnp.arange(size, dtype=jnp.int32)[:, None, None]
            seen = jax.tree.map(lambda v: v.reshape(size * n, *v.shape[2:]), seen)
        made = _ask_many(wanted, table, context, seen, entry.reshape(-1), bound.reshape(-1, 2 * P))
        split = jax.tree.map(lambda v: v.reshape(size, -1, *v.shape[1:]), made)
        return split, jax.tree.map(lambda _: True, split)

    return many(table, context, seen, entry, bound)


def _ask_different(
    wanted: Callable[[Any, Asked], T],
    table: RuleTable,
    context: Any,
    seen: _Seen,
    entry: jax.Array,
    bound: jax.Array,
) -> T:
    """A chunk of different bindings at a time.

    Where all that is asked is whether they hold, many do not, and those that fail at once are left
    out before the others' programs are run: a chunk takes as long as its longest.
    """
    s = entry.shape[0]
    width = min(s, _CHUNK)
    if bound.size < seen.nodes.op.size:
        seen = jax.tree.map(lambda v: v[bound.reshape(-1)], seen)
        bound = jnp.arange(bound.size, dtype=jnp.int32).reshape(bound.shape)
    nodes, marks = seen
    features = bytecode.features(nodes)
    if marks is not None:  # behind what programs read
        features = jnp.concatenate([features, marks[:, None]], axis=1)
    leaders, like, count = _different(table, features, entry, bound)
    leaders = jnp.pad(leaders, (0, -s % width))

    def answer(at: jax.Array, registers: jax.Array, holds: jax.Array) -> T:
        made = _new_nodes(table, nodes, entry[at], bound[at], registers, holds)
        to = table.root_to[jnp.maximum(entry[at], 0)]
        of_bound = jnp.zeros_like(bound[at]) if marks is None else marks[bound[at]]
        return wanted(context, Asked(made, of_bound, to))

    def put(old: Any, new: Any, start: jax.Array) -> Any:
        return jax.tree.map(
            lambda o, n: jax.lax.dynamic_update_slice_in_dim(o, n, start, 0), old, new
        )

    def phase(n: jax.Array, carry: tuple) -> tuple:
        """All of the last phase that have passed: their first instructions, or to the end."""
        leaders, like, passed, registers, out = carry
        place, count = jnp.where(passed, jnp.cumsum(passed) - 1, _NOWHERE), jnp.sum(passed)
        leaders = jnp.zeros_like(leaders).at[place].set(leaders, mode="drop")
        like = place.at[like].get(mode="fill", fill_value=_NOWHERE)
        length = jnp.where(n == 0, jnp.minimum(table.length, _FIRST), table.length)

        def chunk(carry: tuple) -> tuple:
            start, registers, passed, out = carry
            at = jax.lax.dynamic_slice_in_dim(leaders, start, width)
            present = (start + jnp.arange(width) < count) & (entry[at] >= 0)
            registers, holds = bytecode.run(
                table.code, length, entry[at], features, bound[at], present, registers
            )

            def more() -> T:
                return put(out, answer(at, registers, holds), start)

            out = jax.lax.cond((n > 0) & jnp.any(holds), more, lambda: out)
            return start + width, registers, put(passed, holds, start), out

        begin = jnp.int32(0), registers, jnp.zeros(leaders.shape, bool), out
        _, registers, passed, out = jax.lax.while_loop(lambda c: c[0] < count, chunk, begin)
        return leaders, like, passed, registers, out

    registers = jnp.zeros((table.code.shape[1], width, bytecode.K), jnp.int32)
    example = jax.eval_shape(answer, leaders[:width], registers, entry[:width] >= 0)
    blank = jax.tree.map(lambda v: jnp.zeros((len(leaders), *v.shape[1:]), v.dtype), example)
    first = 0 if wanted is _whether and s >= 4 * width else 1
    begin = leaders, like, jnp.arange(len(leaders)) < count, registers, blank
    _, like, _, _, made = jax.lax.fori_loop(first, 2, phase, begin)
    return jax.tree.map(lambda v: v.at[like].get(mode="fill", fill_value=0), made)


def _different(
    table: RuleTable, features: jax.Array, entry: jax.Array, bound: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One of each kind of binding, by entry, short programs first: indices [S], for each the
    place of its like among these [S] (out of range where `entry` is negative), and how many.

    Bindings are alike if their entries are equal and their nodes have equal features, by a hash of
    64 bits.
    """
    s = entry.shape[0]
    if s <= _CHUNK:  # one pass does them all
        every = jnp.arange(s, dtype=jnp.int32)
        return every, every, jnp.int32(s)
    hashes = dot_words(features.astype(jnp.uint32))
    position = 2 * jnp.arange(2 * P, dtype=jnp.uint32)[:, None] + 1
    seen = jnp.sum(hashes[bound] * position, axis=1, dtype=jnp.uint32)
    identity = jnp.concatenate([seen, entry[:, None].astype(jnp.uint32)], axis=1)
    # Sorted are words of entry, hash and index: sorting indices along takes five times as long.
    # Of the hash a few bits suffice to bring equal bindings together. Bindings of one entry go
    # together, too: they have the same instructions, and mostly fail at the same ones.
    index_bits, entry_bits = (s - 1).bit_length(), len(table.by_length).bit_length()
    rank = jnp.where(entry >= 0, table.by_length[entry], len(table.by_length)).astype(jnp.uint32)
    key = (rank << (32 - entry_bits)) | (dot_words(identity)[:, 0] >> entry_bits)
    key = (key >> index_bits << index_bits) | jnp.arange(s, dtype=jnp.uint32)
    order = (jnp.sort(key) & ((1 << index_bits) - 1)).astype(jnp.int32)
    ordered = identity[order]
    new = jnp.any(ordered != jnp.roll(ordered, 1, axis=0), axis=1).at[0].set(True)
    new &= entry[order] >= 0
    place = jnp.cumsum(new) - 1
    leaders = jnp.zeros(s, jnp.int32).at[jnp.where(new, place, s)].set(order, mode="drop")
    like = jnp.zeros(s, jnp.int32).at[order].set(place)
    like = jnp.where(entry >= 0, like, _NOWHERE)
    return leaders, like, jnp.sum(new)


def _new_nodes(
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
        out_shape, out_rank, fits = _shape(
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
            ok & ((op == ops.HOLE) | (fits & known & (out_rank <= ops.MAX_RANK))),
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
    at, present, used = jnp.maximum(new_args, 0), new_args >= 0, new_op != ops.HOLE
    rows = each[:, None, None]
    made = Nodes(
        new_op,
        jnp.where(used[:, :, None], attrs, 0),
        table.new_lowering[entry],
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
        jnp.where(present[..., None], shape[rows, at], 1),
        jnp.where(present, rank[rows, at], 0),
        jnp.where(present, dtype[rows, at], 0),
        present & weight_only[rows, at],
        ok,
    )
