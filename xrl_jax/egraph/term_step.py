"""One iteration of equality saturation on terms: find all matches, apply them, rebuild, fold.

Letters as in `match` and `patterns`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.egraph import arrays
from xrl_jax.egraph.arrays import HOLE, EGraph, Table
from xrl_jax.egraph.match import Matches, match_into
from xrl_jax.egraph.patterns import NO_VALUE, P, Q, TermTable
from xrl_jax.language.terms import FOLDS
from xrl_jax.runtime.engine_jit import engine_jit

# Codes of leaves, the same in each language of terms (`language.terms`).
NUMBER, SYMBOL = 1, 2
Folds = tuple[tuple[int, str], ...]  # code of an operator, and the name of its function in `FOLDS`


class Step(NamedTuple):
    """The result of an iteration.

    `full`: the bucket was too small, and `graph` is worth nothing; `matches` [V] counts those that
    were applied.
    """

    graph: EGraph
    matches: jax.Array
    changed: jax.Array
    full: jax.Array


class _Known(NamedTuple):
    """What is known about classes, in the slots of their names."""

    value: jax.Array  # [N] int32, bits of a number; NO_VALUE for none
    symbol: jax.Array  # [N] bool, whether a symbol is among the e-nodes


class _Applying(NamedTuple):
    graph: EGraph
    table: Table
    matches: jax.Array
    changed: jax.Array
    full: jax.Array


@functools.partial(engine_jit, static_argnames=("n_ops", "window", "folds"))
def step(
    table: TermTable,
    active: jax.Array,
    graph: EGraph,
    *,
    n_ops: int,
    window: int,
    folds: Folds = (),
) -> Step:
    """Do one iteration with the active rules [V] on a rebuilt e-graph."""
    known = _known(graph)

    def consume(matches: Matches, state: _Applying) -> _Applying:
        return _apply(table, known, matches, state)

    start = _Applying(
        graph,
        arrays.table_of(graph)[0],
        jnp.zeros(table.rule.shape, jnp.int32),
        jnp.bool_(False),
        jnp.bool_(False),
    )
    done = match_into(
        table.patterns, active, graph, n_ops, window, consume, lambda s: ~s.full, start
    )
    rebuilt, full = arrays.rebuild(done.graph)[0], done.full
    if folds:
        rebuilt, too_full = fold(rebuilt, folds)
        full |= too_full
    return Step(rebuilt, done.matches, done.changed, full)


@functools.partial(engine_jit, static_argnames=("n_ops", "window"))
def count(
    table: TermTable, active: jax.Array, graph: EGraph, *, n_ops: int, window: int
) -> jax.Array:
    """Return the number of matches of each active rule [V]."""
    known = _known(graph)

    def consume(matches: Matches, counts: jax.Array) -> jax.Array:
        variant = table.patterns.variant[matches.tree]
        ok = matches.ok & _guarded(table, known, variant, matches.bound)
        return counts.at[variant].add(ok.astype(jnp.int32))

    zeros = jnp.zeros(table.rule.shape, jnp.int32)
    return match_into(
        table.patterns, active, graph, n_ops, window, consume, lambda _: jnp.bool_(True), zeros
    )


def _known(graph: EGraph) -> _Known:
    n = graph.bucket
    is_number = graph.op == NUMBER
    first = jnp.full(n, n, jnp.int32)
    first = first.at[jnp.where(is_number, graph.parent, n)].min(
        jnp.arange(n, dtype=jnp.int32), mode="drop"
    )
    value = jnp.where(first < n, graph.data[jnp.minimum(first, n - 1), 0], NO_VALUE)
    place = jnp.where(graph.op == SYMBOL, graph.parent, n)
    return _Known(value, jnp.zeros(n, bool).at[place].set(True, mode="drop"))


def _guarded(
    table: TermTable, known: _Known, variant: jax.Array, bound: jax.Array
) -> jax.Array:
    """Return where all guards hold [C]."""
    guards = table.guards[variant]  # [C, G, 3]
    kind = guards[..., 0]
    a, b = (
        jnp.take_along_axis(bound, jnp.maximum(guards[..., i], 0), axis=1) for i in (1, 2)
    )
    holds = jnp.select(
        [kind == 0, kind == 1, kind == 2, kind == 3],
        [known.value[a] != NO_VALUE, known.symbol[a], known.value[a] != 0, a != b],
        True,
    )
    return jnp.all(holds, axis=1)


def _apply(table: TermTable, known: _Known, matches: Matches, state: _Applying) -> _Applying:
    """Add the right-hand sides of matches, and unite them with the matched classes."""
    variant = table.patterns.variant[matches.tree]
    ok = matches.ok & _guarded(table, known, variant, matches.bound)
    n_rows = len(variant)
    classes = jnp.concatenate(
        [state.graph.parent[matches.bound], jnp.zeros((n_rows, Q), jnp.int32)], axis=1
    )
    new_op, new_args = table.new_op[variant], table.new_args[variant]

    def one(q: jax.Array, carry: tuple[_Applying, jax.Array]) -> tuple[_Applying, jax.Array]:
        state, classes = carry
        present = ok & (new_op[:, q] != HOLE) & ~state.full
        codes = new_args[:, q]
        args = jnp.take_along_axis(classes, jnp.maximum(codes, 0), axis=1)
        args = jnp.where(codes >= 0, args, 0)
        data = table.new_data[variant, q][:, None]
        graph, slots, made, full = arrays.add(
            state.graph, state.table, new_op[:, q], args, data, present
        )
        changed = state.changed | (graph.n > state.graph.n)
        state = state._replace(graph=graph, table=slots, full=state.full | full, changed=changed)
        return state, classes.at[:, P + q].set(graph.parent[made])

    most = jnp.max(jnp.where(ok[:, None] & (new_op != HOLE), jnp.arange(Q) + 1, 0))
    state, classes = jax.lax.fori_loop(0, most, one, (state, classes))
    to = jnp.take_along_axis(classes, table.root_to[variant][:, None], axis=1)[:, 0]
    ok &= ~state.full
    before = state.graph.parent
    parent = arrays.unite(before, jnp.where(ok, classes[:, 0], 0), jnp.where(ok, to, 0))
    return state._replace(
        graph=state.graph._replace(parent=parent),
        matches=state.matches.at[variant].add(ok.astype(jnp.int32)),
        changed=state.changed | jnp.any(parent != before),
    )


def _n_arguments(name: str) -> int:
    return 1 if name in ("not", "neg") else 2


def fold(graph: EGraph, folds: Folds) -> tuple[EGraph, jax.Array]:
    """Compute operators of numbers, until nothing changes; a class that equals a number keeps its
    leaves only, as in egg's tests.

    Args:
      graph: rebuilt.

    Returns:
      The e-graph, rebuilt, and whether the bucket was too small.
    """

    def once(carry: tuple[EGraph, jax.Array, jax.Array]) -> tuple[EGraph, jax.Array, jax.Array]:
        graph, _, full = carry
        known = _known(graph)
        numbers = jnp.where(
            known.value != NO_VALUE,
            jax.lax.bitcast_convert_type(known.value, jnp.float32),
            jnp.nan,
        )
        found = jnp.full(graph.bucket, jnp.nan, jnp.float32)
        for code, name in folds:
            args = [numbers[graph.args[:, i]] for i in range(_n_arguments(name))]
            found = jnp.where(graph.op == code, FOLDS[name](*args), found)
        new = ~jnp.isnan(found) & (known.value[graph.parent] == NO_VALUE)
        bits = jax.lax.bitcast_convert_type(found + 0.0, jnp.int32)
        op = jnp.full(graph.bucket, NUMBER, jnp.int32)
        added, _, slot, too_full = arrays.add(
            graph, arrays.table_of(graph)[0], op, jnp.zeros_like(graph.args), bits[:, None], new
        )
        parent = arrays.unite(added.parent, jnp.where(new, graph.parent, 0), slot)
        rebuilt, _ = arrays.rebuild(added._replace(parent=parent))
        return rebuilt, jnp.any(new) & ~too_full, full | too_full

    start = graph, jnp.bool_(True), jnp.bool_(False)
    graph, _, full = jax.lax.while_loop(lambda c: c[1], once, start)
    has_number = _known(graph).value[graph.parent] != NO_VALUE
    kept = ~has_number | (graph.op == NUMBER) | (graph.op == SYMBOL)
    return arrays.compact(graph._replace(op=jnp.where(kept, graph.op, HOLE)))[0], full
