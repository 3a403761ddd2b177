"""Instantiation: which nodes a rule creates on a match, and whether the rule's conditions hold.

All bindings run together, each executing the program of its variant, in lockstep; per instruction,
only the opcodes and shape rules in use are computed. Networks repeat themselves, so most bindings
equal another one in everything that programs and types can see. Only distinct bindings are
evaluated, grouped by variant. A batch of graphs is treated as one longer list of bindings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from xrl_jax.engine import interpreter
from xrl_jax.engine.new_nodes import NewNodes, new_nodes
from xrl_jax.graph.graph import Nodes, TensorGraph
from xrl_jax.graph.hash import dot_words, fold_words
from xrl_jax.language import bytecode
from xrl_jax.language.table import P, RuleTable
from xrl_jax.runtime.engine_jit import wide

_CHUNK, _WIDE_CHUNK = 64, 1 << 16  # bindings per chunk
_FIRST = 4  # half of the bindings whose operators match fail within so many instructions
_NOWHERE = jnp.iinfo(jnp.int32).max
T = TypeVar("T")


class BindingBatch(NamedTuple):
    """What `evaluate_on` passes to `fn`: distinct bindings [C] and the nodes created on them."""

    made: NewNodes  # [C, Q, ...]
    marks: jax.Array  # [C, 2P] of the bound nodes; 0 if no marks are given
    to: jax.Array  # [C, 2] binding codes of what replaces the roots; -1 for none


def instantiate(
    table: RuleTable, variant: jax.Array, bound: jax.Array, graph: TensorGraph
) -> NewNodes:
    """Return the nodes that a variant creates on a binding.

    May be mapped by vmap over bindings, graphs or both; the table is shared.

    Args:
      variant: scalar index; if negative, nothing is computed and the result is not ok.
      bound: [2P] node slots, see `bind`.
    """
    return evaluate_on(_all_nodes, table, variant, bound, graph)


def applies(
    table: RuleTable, variant: jax.Array, bound: jax.Array, graph: TensorGraph
) -> jax.Array:
    """Return whether `instantiate` would be ok (a scalar), many times cheaper than the nodes."""
    return evaluate_on(_only_ok, table, variant, bound, graph)


def _all_nodes(_: None, batch: BindingBatch) -> NewNodes:
    return batch.made


def _only_ok(_: None, batch: BindingBatch) -> jax.Array:
    return batch.made.ok


def evaluate_on(
    fn: Callable[[Any, BindingBatch], T],
    table: RuleTable,
    variant: jax.Array,
    bound: jax.Array,
    graph: TensorGraph,
    *,
    marks: jax.Array | None = None,
    context: Any = None,
) -> T:
    """Return what `fn` computes from the nodes that a variant creates on a binding.

    The less `fn` returns, the faster. The result is zero or meaningless where the variant does
    not apply. For vmap see `instantiate`.

    Args:
      fn: (context, [C] bindings) -> arrays [C, ...]; called once for equal bindings.
      marks: [N] int32, a label of each node that `fn` may use, beside what programs can see.
      context: arrays that `fn` may use, the same for all bindings.
    """
    data = _NodeData(graph.nodes, marks)
    made = _evaluate_many(fn, table, context, data, variant[None], bound[None])
    return jax.tree.map(lambda v: v[0], made)


class _NodeData(NamedTuple):
    """The node data by which bindings are compared and evaluated."""

    nodes: Nodes  # [N, ...]
    marks: jax.Array | None  # [N]


def _evaluate_many(
    fn: Callable[[Any, BindingBatch], T],
    table: RuleTable,
    context: Any,
    data: _NodeData,
    variant: jax.Array,
    bound: jax.Array,
) -> T:
    """Do `evaluate_on` for variants [S] on bindings [S, 2P]."""

    @jax.custom_batching.custom_vmap
    def many(
        table: RuleTable, context: Any, data: _NodeData, variant: jax.Array, bound: jax.Array
    ) -> T:
        return _evaluate_distinct(fn, table, context, data, variant, bound)

    @many.def_vmap
    def _(
        size: int,
        batched: Any,
        table: RuleTable,
        context: Any,
        data: _NodeData,
        variant: jax.Array,
        bound: jax.Array,
    ) -> tuple[T, Any]:
        """Treat a batch as one longer list of bindings and, if the graphs differ, of nodes."""
        if any(jax.tree.leaves(batched[:2])):
            raise ValueError("a batch has one rule table and one cost table: do not vmap over them")

        def repeat(v: jax.Array, is_batched: bool) -> jax.Array:
            return v if is_batched else jnp.broadcast_to(v, (size, *v.shape))

        variant, bound = repeat(variant, batched[3]), repeat(bound, batched[4])
        if any(jax.tree.leaves(batched[2])):
            data = jax.tree.map(repeat, data, batched[2])
            n = data.nodes.op.shape[1]
            bound = bound + n * jnp.arange(size, dtype=jnp.int32)[:, None, None]
            data = jax.tree.map(lambda v: v.reshape(size * n, *v.shape[2:]), data)
        made = _evaluate_many(
            fn, table, context, data, variant.reshape(-1), bound.reshape(-1, 2 * P)
        )
        split = jax.tree.map(lambda v: v.reshape(size, -1, *v.shape[1:]), made)
        return split, jax.tree.map(lambda _: True, split)

    return many(table, context, data, variant, bound)


def _evaluate_distinct(
    fn: Callable[[Any, BindingBatch], T],
    table: RuleTable,
    context: Any,
    data: _NodeData,
    variant: jax.Array,
    bound: jax.Array,
) -> T:
    """Evaluate the distinct bindings, one chunk at a time.

    If only `ok` is asked for, many bindings fail. Those that fail within the first instructions are
    then removed before the others' programs run, because a chunk takes as long as its longest
    program.
    """
    s = variant.shape[0]
    width = min(s, _WIDE_CHUNK if wide() else _CHUNK)
    if bound.size < data.nodes.op.size:
        data = jax.tree.map(lambda v: v[bound.reshape(-1)], data)
        bound = jnp.arange(bound.size, dtype=jnp.int32).reshape(bound.shape)
    nodes, marks = data
    features = interpreter.features(nodes)
    if marks is not None:  # behind the columns that programs read
        features = jnp.concatenate([features, marks[:, None]], axis=1)
    representatives, group, count = _distinct(table, features, variant, bound)
    representatives = jnp.pad(representatives, (0, -s % width))

    def answer(at: jax.Array, registers: jax.Array, holds: jax.Array) -> T:
        made = new_nodes(table, nodes, variant[at], bound[at], registers, holds)
        to = table.root_to[jnp.maximum(variant[at], 0)]
        of_bound = jnp.zeros_like(bound[at]) if marks is None else marks[bound[at]]
        return fn(context, BindingBatch(made, of_bound, to))

    def put(old: Any, new: Any, start: jax.Array) -> Any:
        return jax.tree.map(
            lambda o, n: jax.lax.dynamic_update_slice_in_dim(o, n, start, 0), old, new
        )

    def phase(n: jax.Array, carry: tuple) -> tuple:
        """Process the bindings that passed the last phase; phase 0 runs program prefixes only."""
        representatives, group, passed, registers, out = carry
        place, count = _packed(passed), jnp.sum(passed)
        representatives = (
            jnp.zeros_like(representatives)
            .at[place]
            .set(representatives, mode="drop", unique_indices=True)
        )
        group = place.at[group].get(mode="fill", fill_value=_NOWHERE)
        length = jnp.where(n == 0, jnp.minimum(table.length, _FIRST), table.length)

        def chunk(carry: tuple) -> tuple:
            start, registers, passed, out = carry
            at = jax.lax.dynamic_slice_in_dim(representatives, start, width)
            present = (start + jnp.arange(width) < count) & (variant[at] >= 0)
            registers, holds = interpreter.run(
                table.code, length, variant[at], features, bound[at], present, registers
            )

            def more() -> T:
                return put(out, answer(at, registers, holds), start)

            out = jax.lax.cond((n > 0) & jnp.any(holds), more, lambda: out)
            return start + width, registers, put(passed, holds, start), out

        begin = jnp.int32(0), registers, jnp.zeros(representatives.shape, bool), out
        _, registers, passed, out = jax.lax.while_loop(lambda c: c[0] < count, chunk, begin)
        return representatives, group, passed, registers, out

    registers = jnp.zeros((table.code.shape[1], width, bytecode.K), jnp.int32)
    example = jax.eval_shape(answer, representatives[:width], registers, variant[:width] >= 0)
    blank = jax.tree.map(
        lambda v: jnp.zeros((len(representatives), *v.shape[1:]), v.dtype), example
    )
    first = 0 if fn is _only_ok and s >= 4 * width else 1
    begin = representatives, group, jnp.arange(len(representatives)) < count, registers, blank
    _, group, _, _, made = jax.lax.fori_loop(first, 2, phase, begin)
    return jax.tree.map(lambda v: v.at[group].get(mode="fill", fill_value=0), made)


def _packed(flags: jax.Array) -> jax.Array:
    """Return targets [S] that pack the elements flagged in `flags` [S] to the front.

    All other targets are out of range. No two targets are equal, so a scatter to them may assume
    unique indices and need not sort them.
    """
    each = jnp.arange(len(flags), dtype=jnp.int32)
    return jnp.where(flags, jnp.cumsum(flags, dtype=jnp.int32) - 1, len(flags) + each)


def _distinct(
    table: RuleTable, features: jax.Array, variant: jax.Array, bound: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return one representative of each group of equal bindings.

    Bindings are equal if their variants are equal and their nodes have equal features, compared by
    a 64-bit hash.

    Returns:
      Indices [S] of the representatives, by variant, short programs first; for each binding the
      place of its representative among them [S] (out of range where `variant` is negative); and the
      number of representatives.
    """
    s = variant.shape[0]
    if s <= _CHUNK:  # one chunk holds them all
        every = jnp.arange(s, dtype=jnp.int32)
        return every, every, jnp.int32(s)
    hashes = dot_words(features.astype(jnp.uint32))
    # Random factors: under 1, 3, 5, ... two nodes in places 1 and 4 would look as in 2 and 3.
    factors = fold_words(jnp.arange(2 * P, dtype=jnp.uint32)[:, None]) | 1
    seen = jnp.sum(hashes[bound] * factors, axis=1, dtype=jnp.uint32)
    identity = jnp.concatenate([seen, variant[:, None].astype(jnp.uint32)], axis=1)
    # The sort keys are words that combine variant, hash and index: sorting indices along with
    # separate keys takes five times as long. A few bits of the hash suffice to bring equal bindings
    # together. The variant comes first because bindings of one variant have the same instructions,
    # and mostly fail at the same ones.
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
    representatives = none.at[_packed(new)].set(order, mode="drop", unique_indices=True)
    group = none.at[order].set(jnp.cumsum(new) - 1, unique_indices=True)
    group = jnp.where(variant >= 0, group, _NOWHERE)
    return representatives, group, jnp.sum(new)
