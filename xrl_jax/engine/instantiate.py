"""From a match to what a rule would make there: do its conditions hold, which nodes are made, what
do they cost.

All bindings run together, each its variant's program, instruction by instruction; of opcodes and
shape rules only those at hand are computed. Networks repeat themselves, so that most bindings are
like another one in all that programs and types can see: only different ones are worked on, those of
one variant together. A batch of graphs is one longer list of bindings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from xrl_jax.engine import interpreter
from xrl_jax.engine.new_nodes import NewNodes, new_nodes
from xrl_jax.graph.graph import Nodes, TensorGraph
from xrl_jax.graph.hash import dot_words
from xrl_jax.language import bytecode
from xrl_jax.language.table import P, RuleTable
from xrl_jax.runtime.engine_jit import wide

_CHUNK, _WIDE_CHUNK = 64, 1 << 16  # bindings worked on at once
_FIRST = 4  # instructions at which half of the bindings fail that a pattern's operators allow
_NOWHERE = jnp.iinfo(jnp.int32).max
T = TypeVar("T")


class Asked(NamedTuple):
    """What `wanted` of `ask` is told of bindings [C] that are all different."""

    made: NewNodes  # [C, Q, ...]
    marks: jax.Array  # [C, 2P] of the bound nodes; 0 where there are none
    to: jax.Array  # [C, 2] binding codes of what replaces the roots; -1 for none


def instantiate(
    table: RuleTable, variant: jax.Array, bound: jax.Array, graph: TensorGraph
) -> NewNodes:
    """The nodes a variant makes on a binding; vmap over bindings, graphs or both, the table being
    the same.

    Args:
      variant: scalar index; where it is negative, nothing is computed and the result is not ok.
      bound: [2P] node slots, see `bind`.
    """
    return ask(_everything, table, variant, bound, graph)


def applies(
    table: RuleTable, variant: jax.Array, bound: jax.Array, graph: TensorGraph
) -> jax.Array:
    """Whether the nodes of `instantiate` are ok, a scalar: many times cheaper than the nodes."""
    return ask(_whether, table, variant, bound, graph)


def _everything(_: None, asked: Asked) -> NewNodes:
    return asked.made


def _whether(_: None, asked: Asked) -> jax.Array:
    return asked.made.ok


def ask(
    wanted: Callable[[Any, Asked], T],
    table: RuleTable,
    variant: jax.Array,
    bound: jax.Array,
    graph: TensorGraph,
    *,
    marks: jax.Array | None = None,
    context: Any = None,
) -> T:
    """What is wanted of the nodes that a variant makes on a binding: the less that is, the faster.
    Zero or meaningless where it does not hold. vmap as for `instantiate`.

    Args:
      wanted: (context, [C] bindings) -> arrays [C, ...]; it is asked once for bindings that are
        alike.
      marks: [N] int32, what of a node `wanted` goes by beside what programs can see.
      context: arrays that it goes by, the same for all.
    """
    seen = _Seen(graph.nodes, marks)
    made = _ask_many(wanted, table, context, seen, variant[None], bound[None])
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
    variant: jax.Array,
    bound: jax.Array,
) -> T:
    """`ask` of variants [S] on bindings [S, 2P]."""

    @jax.custom_batching.custom_vmap
    def many(
        table: RuleTable, context: Any, seen: _Seen, variant: jax.Array, bound: jax.Array
    ) -> T:
        return _ask_different(wanted, table, context, seen, variant, bound)

    @many.def_vmap
    def _(
        size: int,
        batched: Any,
        table: RuleTable,
        context: Any,
        seen: _Seen,
        variant: jax.Array,
        bound: jax.Array,
    ) -> tuple[T, Any]:
        """A batch is one longer list: of bindings, and where the graphs differ of nodes, too."""
        if any(jax.tree.leaves(batched[:2])):
            raise ValueError("a batch has one rule table and one cost table: do not vmap over them")

        def repeat(v: jax.Array, is_batched: bool) -> jax.Array:
            return v if is_batched else jnp.broadcast_to(v, (size, *v.shape))

        variant, bound = repeat(variant, batched[3]), repeat(bound, batched[4])
        if any(jax.tree.leaves(batched[2])):
            seen = jax.tree.map(repeat, seen, batched[2])
            n = seen.nodes.op.shape[1]
            bound = bound + n * jnp.arange(size, dtype=jnp.int32)[:, None, None]
            seen = jax.tree.map(lambda v: v.reshape(size * n, *v.shape[2:]), seen)
        made = _ask_many(
            wanted, table, context, seen, variant.reshape(-1), bound.reshape(-1, 2 * P)
        )
        split = jax.tree.map(lambda v: v.reshape(size, -1, *v.shape[1:]), made)
        return split, jax.tree.map(lambda _: True, split)

    return many(table, context, seen, variant, bound)


def _ask_different(
    wanted: Callable[[Any, Asked], T],
    table: RuleTable,
    context: Any,
    seen: _Seen,
    variant: jax.Array,
    bound: jax.Array,
) -> T:
    """A chunk of different bindings at a time.

    Where all that is asked is whether they hold, many do not, and those that fail at once are left
    out before the others' programs are run: a chunk takes as long as its longest.
    """
    s = variant.shape[0]
    width = min(s, _WIDE_CHUNK if wide() else _CHUNK)
    if bound.size < seen.nodes.op.size:
        seen = jax.tree.map(lambda v: v[bound.reshape(-1)], seen)
        bound = jnp.arange(bound.size, dtype=jnp.int32).reshape(bound.shape)
    nodes, marks = seen
    features = interpreter.features(nodes)
    if marks is not None:  # behind what programs read
        features = jnp.concatenate([features, marks[:, None]], axis=1)
    leaders, like, count = _different(table, features, variant, bound)
    leaders = jnp.pad(leaders, (0, -s % width))

    def answer(at: jax.Array, registers: jax.Array, holds: jax.Array) -> T:
        made = new_nodes(table, nodes, variant[at], bound[at], registers, holds)
        to = table.root_to[jnp.maximum(variant[at], 0)]
        of_bound = jnp.zeros_like(bound[at]) if marks is None else marks[bound[at]]
        return wanted(context, Asked(made, of_bound, to))

    def put(old: Any, new: Any, start: jax.Array) -> Any:
        return jax.tree.map(
            lambda o, n: jax.lax.dynamic_update_slice_in_dim(o, n, start, 0), old, new
        )

    def phase(n: jax.Array, carry: tuple) -> tuple:
        """All of the last phase that have passed: their first instructions, or to the end."""
        leaders, like, passed, registers, out = carry
        place, count = _packed(passed), jnp.sum(passed)
        leaders = jnp.zeros_like(leaders).at[place].set(leaders, mode="drop", unique_indices=True)
        like = place.at[like].get(mode="fill", fill_value=_NOWHERE)
        length = jnp.where(n == 0, jnp.minimum(table.length, _FIRST), table.length)

        def chunk(carry: tuple) -> tuple:
            start, registers, passed, out = carry
            at = jax.lax.dynamic_slice_in_dim(leaders, start, width)
            present = (start + jnp.arange(width) < count) & (variant[at] >= 0)
            registers, holds = interpreter.run(
                table.code, length, variant[at], features, bound[at], present, registers
            )

            def more() -> T:
                return put(out, answer(at, registers, holds), start)

            out = jax.lax.cond((n > 0) & jnp.any(holds), more, lambda: out)
            return start + width, registers, put(passed, holds, start), out

        begin = jnp.int32(0), registers, jnp.zeros(leaders.shape, bool), out
        _, registers, passed, out = jax.lax.while_loop(lambda c: c[0] < count, chunk, begin)
        return leaders, like, passed, registers, out

    registers = jnp.zeros((table.code.shape[1], width, bytecode.K), jnp.int32)
    example = jax.eval_shape(answer, leaders[:width], registers, variant[:width] >= 0)
    blank = jax.tree.map(lambda v: jnp.zeros((len(leaders), *v.shape[1:]), v.dtype), example)
    first = 0 if wanted is _whether and s >= 4 * width else 1
    begin = leaders, like, jnp.arange(len(leaders)) < count, registers, blank
    _, like, _, _, made = jax.lax.fori_loop(first, 2, phase, begin)
    return jax.tree.map(lambda v: v.at[like].get(mode="fill", fill_value=0), made)


def _packed(wanted: jax.Array) -> jax.Array:
    """[S] places of those wanted [S], the first at 0; of the others out of range. No two are alike,
    so that what is put there need not be put into an order first.
    """
    each = jnp.arange(len(wanted), dtype=jnp.int32)
    return jnp.where(wanted, jnp.cumsum(wanted, dtype=jnp.int32) - 1, len(wanted) + each)


def _different(
    table: RuleTable, features: jax.Array, variant: jax.Array, bound: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One of each kind of binding, by variant, short programs first: indices [S], for each the
    place of its like among these [S] (out of range where `variant` is negative), and how many.

    Bindings are alike if their variants are equal and their nodes have equal features, by a hash of
    64 bits.
    """
    s = variant.shape[0]
    if s <= _CHUNK:  # one pass does them all
        every = jnp.arange(s, dtype=jnp.int32)
        return every, every, jnp.int32(s)
    hashes = dot_words(features.astype(jnp.uint32))
    position = 2 * jnp.arange(2 * P, dtype=jnp.uint32)[:, None] + 1
    seen = jnp.sum(hashes[bound] * position, axis=1, dtype=jnp.uint32)
    identity = jnp.concatenate([seen, variant[:, None].astype(jnp.uint32)], axis=1)
    # Sorted are words of variant, hash and index: sorting indices along takes five times as long.
    # Of the hash a few bits suffice to bring equal bindings together. Bindings of one variant go
    # together, too: they have the same instructions, and mostly fail at the same ones.
    index_bits, entry_bits = (s - 1).bit_length(), len(table.by_length).bit_length()
    rank = jnp.where(variant >= 0, table.by_length[variant], len(table.by_length)).astype(
        jnp.uint32
    )
    key = (rank << (32 - entry_bits)) | (dot_words(identity)[:, 0] >> entry_bits)
    key = (key >> index_bits << index_bits) | jnp.arange(s, dtype=jnp.uint32)
    order = (jnp.sort(key) & ((1 << index_bits) - 1)).astype(jnp.int32)
    ordered = identity[order]
    new = jnp.any(ordered != jnp.roll(ordered, 1, axis=0), axis=1).at[0].set(True)
    new &= variant[order] >= 0
    none = jnp.zeros(s, jnp.int32)
    leaders = none.at[_packed(new)].set(order, mode="drop", unique_indices=True)
    like = none.at[order].set(jnp.cumsum(new) - 1, unique_indices=True)
    like = jnp.where(variant >= 0, like, _NOWHERE)
    return leaders, like, jnp.sum(new)
