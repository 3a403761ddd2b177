"""One iteration of equality saturation on terms: find all matches, apply them, rebuild, fold.

Letters as in `match` and `patterns`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.egraph import arrays
from xrl_jax.egraph.apply import Applying, NewENodes, apply_at, applying, differ
from xrl_jax.egraph.arrays import HOLE, EGraph, ENodes
from xrl_jax.egraph.match import Matching, begin, take
from xrl_jax.egraph.patterns import NO_VALUE, Q, TermTable
from xrl_jax.language.terms import FOLD_ARITY, FOLDS, Language
from xrl_jax.runtime.engine_jit import engine_jit

# Codes of leaves, the same in each language of terms (`language.terms`).
NUMBER, SYMBOL = 1, 2
Folds = tuple[tuple[int, str], ...]  # code of an operator, and the name of its function in `FOLDS`


def folds_of(language: Language) -> Folds:
    """Return the operators of a language that can be computed."""
    operators = language.vocabulary.operators
    return tuple((operators[op].code, name) for op, name in language.folds.items())


class Step(NamedTuple):
    """The result of an iteration."""

    graph: EGraph
    matches: jax.Array  # [V] int32, number of matches of each rule
    changed: jax.Array  # bool, whether the e-graph differs from the one before
    full: jax.Array  # bool, whether the bucket had no room for some matches, which were not applied


class _Known(NamedTuple):
    """What is known about classes, in the slots of their names."""

    value: jax.Array  # [N] int32, bits of a number; NO_VALUE for none
    symbol: jax.Array  # [N] bool, whether a symbol is among the e-nodes


def iterate(
    table: TermTable,
    active: jax.Array,
    graph: EGraph,
    counting: jax.Array,
    *,
    n_ops: int,
    window: int,
    folds: Folds = (),
) -> Step:
    """Do one iteration with the active rules [V] on a rebuilt e-graph.

    Args:
      counting: whether to count matches only, and leave the e-graph as it is.
      n_ops, window: see `match.begin`.
      folds: operators of numbers to compute.
    """
    known = _known(graph)

    def some(carry: tuple[Matching, Applying]) -> tuple[Matching, Applying]:
        matching, state = carry
        matching, (tree, bound, ok) = take(table.patterns, graph, n_ops, matching)
        variant = table.patterns.variant[tree]
        ok &= _guarded(table, known, variant, bound)
        counted = state._replace(matches=state.matches.at[variant].add(ok.astype(jnp.int32)))
        new = NewENodes(
            table.new_op[variant],
            table.new_args[variant],
            table.new_data[variant][:, :, None],
            jnp.zeros((len(variant), Q, 0), jnp.int32),
        )
        replaced = [(0, table.root_to[variant])]
        return matching, jax.lax.cond(
            counting,
            lambda: counted,
            lambda: apply_at(state, variant, bound, ok, new, replaced),
        )

    def going(carry: tuple[Matching, Applying]) -> jax.Array:
        matching, state = carry
        return matching.more & ~state.full

    first = begin(table.patterns, active, graph, n_ops, window)
    done = jax.lax.while_loop(going, some, (first, applying(graph, len(table.rule))))[1]

    def restored() -> tuple[EGraph, jax.Array, jax.Array]:
        rebuilt, too_full = rebuild_and_fold(done.graph, folds)
        # Folding removes e-nodes that rules add in each iteration.
        return rebuilt, done.full | too_full, differ(rebuilt, graph)

    rebuilt, full, changed = jax.lax.cond(
        done.changed, restored, lambda: (graph, done.full, jnp.bool_(False))
    )
    return Step(rebuilt, done.matches, changed, full)


iterate_now = engine_jit(iterate, static_argnames=("n_ops", "window", "folds"))


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


def is_contradictory(graph: EGraph) -> jax.Array:
    """Return whether two different numbers are known to be equal, so that the rules are wrong."""
    value = _known(graph).value[graph.parent]
    return jnp.any((graph.op == NUMBER) & (graph.data[:, 0] != value))


is_contradictory_now = engine_jit(is_contradictory)


def _guarded(table: TermTable, known: _Known, variant: jax.Array, bound: jax.Array) -> jax.Array:
    """Return where all guards hold [C]."""
    guards = table.guards[variant]  # [C, G, 3]
    kind = guards[..., 0]
    a, b = (jnp.take_along_axis(bound, jnp.maximum(guards[..., i], 0), axis=1) for i in (1, 2))
    holds = jnp.select(
        [kind == 0, kind == 1, kind == 2, kind == 3],
        [known.value[a] != NO_VALUE, known.symbol[a], known.value[a] != 0, a != b],
        True,
    )
    return jnp.all(holds, axis=1)


def rebuild_and_fold(graph: EGraph, folds: Folds) -> tuple[EGraph, jax.Array]:
    """Rebuild an e-graph, and compute operators of numbers until nothing changes. A class that
    equals a number then keeps its leaves only, as in egg's tests.

    Returns:
      The e-graph, and whether there was no room for some numbers.
    """
    if not folds:
        return arrays.rebuild(graph), jnp.bool_(False)

    def once(carry: tuple[EGraph, jax.Array, jax.Array]) -> tuple[EGraph, jax.Array, jax.Array]:
        graph = arrays.rebuild(carry[0])
        known = _known(graph)
        found = _computed(graph, known, folds)
        new = ~jnp.isnan(found) & (known.value[graph.parent] == NO_VALUE)
        bits = jax.lax.bitcast_convert_type(found + 0.0, jnp.int32)[:, None]
        op = jnp.full(graph.bucket, NUMBER, jnp.int32)
        numbers = ENodes(op, jnp.zeros_like(graph.args), bits, graph.notes)
        table, most = arrays.table_of(graph)[0], jnp.int32(graph.bucket)
        added, _, slot = arrays.add(graph, table, numbers, new, most)
        there = new & (slot > 0)
        parent = arrays.unite(added.parent, jnp.where(there, graph.parent, 0), slot)
        return added._replace(parent=parent), jnp.any(there), jnp.any(new & ~there)

    start = graph, jnp.bool_(True), jnp.bool_(False)
    graph, _, full = jax.lax.while_loop(lambda c: c[1], once, start)
    has_number = _known(graph).value[graph.parent] != NO_VALUE
    kept = ~has_number | (graph.op == NUMBER) | (graph.op == SYMBOL)
    return arrays.compact(graph._replace(op=jnp.where(kept, graph.op, HOLE))), full


def _computed(graph: EGraph, known: _Known, folds: Folds) -> jax.Array:
    """Return the number that each e-node computes [N]; NaN for none.

    Only integers below 2^24 are computed from integers: float32 holds these exactly, and rounded
    results would make different numbers equal.
    """
    numbers = _integers(jax.lax.bitcast_convert_type(known.value, jnp.float32))
    numbers = jnp.where(known.value != NO_VALUE, numbers, jnp.nan)
    found = jnp.full(graph.bucket, jnp.nan, jnp.float32)
    for code, name in folds:
        args = [numbers[graph.args[:, i]] for i in range(FOLD_ARITY[name])]
        found = jnp.where(graph.op == code, _integers(FOLDS[name](*args)), found)
    return found


def _integers(x: jax.Array) -> jax.Array:
    """Return NaN for all but integers that float32 holds exactly, with their neighbours."""
    return jnp.where((x == jnp.round(x)) & (jnp.abs(x) < 2.0**24), x, jnp.nan)


def _folded(graph: EGraph, *, folds: Folds) -> EGraph:
    return rebuild_and_fold(graph, folds)[0]


folded_now = engine_jit(_folded, static_argnames="folds")
