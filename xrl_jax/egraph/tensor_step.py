"""One iteration of equality saturation on tensors, with the rule table of the other searches.

A rule with one root is applied at its matches. The two roots of a rule with two are matched
separately; the halves are then paired by the operand that they share.

Letters: C rows of a window, V variants, S halves, P positions of a pattern, Q new nodes, A
arguments; N slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.egraph import arrays
from xrl_jax.egraph.apply import Applying, NewENodes, apply_at, applying, differ
from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.match import Matching, begin, take
from xrl_jax.egraph.patterns import NO_VALUE, Patterns
from xrl_jax.egraph.seminaive import Stamps, after, differing, is_new, no_stamps
from xrl_jax.egraph.tensor_graph import (
    COMMUTATIVE,
    as_tensor_graph,
    data_of,
    features_of,
    notes_of,
)
from xrl_jax.engine.instantiate import BindingBatch, evaluate_on
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Nodes
from xrl_jax.language.table import P, RuleTable
from xrl_jax.runtime.engine_jit import engine_jit


def patterns_of(table: RuleTable) -> Patterns:
    """Return the pattern trees of a rule table."""
    op, parent, slot = (np.asarray(x) for x in (table.pos_op, table.pos_parent, table.pos_slot))
    used = np.asarray(table.tree_root) >= 0
    is_op = (op > 0) & used[:, None]
    number = np.cumsum(is_op, axis=1) - 1  # of an operator among those of its tree
    n_levels = max(1, int(is_op.sum(1).max()))
    rows, places = np.nonzero(is_op)
    to = rows, number[is_op]

    def of_ops(values: np.ndarray, blank: int) -> np.ndarray:
        new = np.full((len(op), n_levels), blank, np.int32)
        new[to] = values[rows, places]
        return new

    under = np.take_along_axis(number, parent, axis=1)
    variable = (op == 0) & used[:, None]
    arrays_of = {
        "variant": np.asarray(table.tree_variant),
        "op": of_ops(op, -1),
        "arity": of_ops(np.asarray(table.pos_arity), 0),
        "value": np.full((len(op), n_levels), NO_VALUE, np.int32),
        "under": of_ops(under, 0),
        "slot": of_ops(slot, 0),
        "at": np.where(is_op, number, np.where(variable, under, -1)),
        "at_slot": np.where(variable, slot, -1),
        "same": np.where(variable, np.asarray(table.pos_same), -1),
    }
    return Patterns(**{name: jnp.asarray(x, jnp.int32) for name, x in arrays_of.items()})


class TensorStep(NamedTuple):
    """The result of an iteration."""

    graph: EGraph
    stamps: Stamps
    place: jax.Array  # [N] int32, where each e-node of the e-graph before is now; 0 for holes
    matches: jax.Array  # [V] int32, number of new places where each variant was applied
    changed: jax.Array  # bool, whether the e-graph differs from the one before
    full: jax.Array  # bool, whether there was no room for some matches, which were not applied
    missing: jax.Array  # int32, halves for which there was no room; their pairs were not tried


class _Halves(NamedTuple):
    """Matches of one root of rules with two, in runs of the same variant and shared operand."""

    tree: jax.Array  # [S]
    bound: jax.Array  # [S, P]
    n: jax.Array  # int32, number of halves; those above S are missing
    order: jax.Array  # [S] indices of the second roots, sorted by run
    low: jax.Array  # [S] of a first root: where its run begins in `order`
    ends: jax.Array  # [S] number of pairs up to and including this first root
    taken: jax.Array  # int32, number of pairs taken


class _Rows(NamedTuple):
    """Places where variants may be applied."""

    variant: jax.Array  # [C]
    bound: jax.Array  # [C, 2 P] e-nodes
    ok: jax.Array  # [C]


class _Frozen(NamedTuple):
    """The e-graph that is matched, and what conditions see of it."""

    rules: RuleTable
    patterns: Patterns
    graph: EGraph
    features: Nodes
    seen: jax.Array  # [N] the e-node by which conditions see a class: a constant if there is one
    stamps: Stamps


def iterate(
    rules: RuleTable,
    patterns: Patterns,
    active: jax.Array,
    graph: EGraph,
    stamps: Stamps,
    most: jax.Array | int,
    *,
    window: int,
    n_halves: int,
) -> TensorStep:
    """Do one iteration with the active variants [V] on a rebuilt e-graph.

    Args:
      stamps: of the e-graph; matches that were applied before are left out.
      most: the most slots that may be in use afterwards, the hole included.
      window: C, at least the number of trees.
      n_halves: S, room for matches of rules with two roots.
    """
    frozen = _frozen(rules, patterns, graph, stamps)
    first = applying(graph, len(rules.variant_rule), most)
    halves, done = _over_rows(
        frozen,
        active,
        first,
        lambda rows, state: _apply(frozen, rows, state),
        lambda state: state.full,
        window=window,
        n_halves=n_halves,
    )
    missing = jnp.maximum(halves.n - n_halves, 0)
    applied = active & ~done.full & ((rules.variant_trees[:, 1] < 0) | (missing == 0))

    def restored() -> tuple[EGraph, Stamps, jax.Array, jax.Array]:
        closed, left = arrays.closed(done.graph, jnp.asarray(COMMUTATIVE))
        place = arrays.places(closed, left)
        new = after(stamps, _differing(frozen, closed), applied)
        moved = jnp.zeros_like(new.changed).at[place].max(new.changed)
        rebuilt = arrays.compact(closed)
        return rebuilt, new._replace(changed=moved), place, differ(rebuilt, graph)

    def same() -> tuple[EGraph, Stamps, jax.Array, jax.Array]:
        none, each = jnp.zeros(graph.bucket, bool), jnp.arange(graph.bucket, dtype=jnp.int32)
        place = jnp.where(graph.op != HOLE, each, HOLE)
        return graph, after(stamps, none, applied), place, jnp.bool_(False)

    rebuilt, stamps, place, changed = jax.lax.cond(done.changed, restored, same)
    return TensorStep(rebuilt, stamps, place, done.matches, changed, done.full, missing)


iterate_now = engine_jit(iterate, static_argnames=("window", "n_halves"))


class Applications(NamedTuple):
    """Where rules are applied in an iteration, in order; R rows."""

    n: jax.Array  # int32, number of applications; those above R are missing
    variant: jax.Array  # [R]
    bound: jax.Array  # [R, 2 P] e-nodes of both trees' positions
    op: jax.Array  # [R, Q] of new e-nodes; a hole where there is none
    args: jax.Array  # [R, Q, A] as in `NewENodes`
    data: jax.Array  # [R, Q, D]


def applications(
    rules: RuleTable,
    patterns: Patterns,
    active: jax.Array,
    graph: EGraph,
    *,
    window: int,
    n_halves: int,
    room: int,
) -> Applications:
    """Return where `iterate` applies rules, without applying them; it does not apply those for
    which it has no room.

    Args:
      room: R, at least the window.
    """
    frozen = _frozen(rules, patterns, graph, no_stamps(graph.bucket, len(rules.variant_rule)))
    n_bound = 2 * P

    def record(rows: _Rows, log: Applications) -> Applications:
        holds, new = _evaluated(frozen, rows)
        ok = rows.ok & holds
        at = jnp.where(ok, log.n + jnp.cumsum(ok) - 1, room)
        found = rows.variant, rows.bound, new.op, new.args, new.data
        put = [old.at[at].set(x, mode="drop") for old, x in zip(log[1:], found, strict=True)]
        return Applications(log.n + jnp.sum(ok, dtype=jnp.int32), *put)

    blank = jnp.zeros(room, jnp.int32), jnp.zeros((room, n_bound), jnp.int32)
    shapes = jax.eval_shape(
        lambda: _evaluated(frozen, _Rows(blank[0][:1], blank[1][:1], blank[0][:1] > 0))[1]
    )
    made = [jnp.zeros((room, *x.shape[1:]), x.dtype) for x in (shapes.op, shapes.args, shapes.data)]
    start = Applications(jnp.int32(0), *blank, *made)
    never = jnp.bool_(False)
    return _over_rows(
        frozen, active, start, record, lambda _: never, window=window, n_halves=n_halves
    )[1]


applications_now = engine_jit(applications, static_argnames=("window", "n_halves", "room"))


def _frozen(rules: RuleTable, patterns: Patterns, graph: EGraph, stamps: Stamps) -> _Frozen:
    features = features_of(graph)
    return _Frozen(rules, patterns, graph, features, _seen(graph, features), stamps)


def _differing(frozen: _Frozen, graph: EGraph) -> jax.Array:
    """Return which e-nodes differ from those that are matched, or are seen differently [N]."""
    features = features_of(graph)
    fixed = features.weight_only != frozen.features.weight_only
    return differing(frozen.graph, graph) | fixed | (_seen(graph, features) != frozen.seen)


S = TypeVar("S")


def _over_rows(
    frozen: _Frozen,
    active: jax.Array,
    state: S,
    use: Callable[[_Rows, S], S],
    over: Callable[[S], jax.Array],
    *,
    window: int,
    n_halves: int,
) -> tuple[_Halves, S]:
    """Go through the places where active variants may be applied, a window of them at a time, until
    `over`.
    """
    rules, patterns, graph = frozen.rules, frozen.patterns, frozen.graph
    matching = begin(
        patterns, active[rules.tree_variant] & (rules.tree_root >= 0), graph, ops.N_OPS, window
    )
    none = jnp.zeros(n_halves, jnp.int32)
    halves = _Halves(
        none, jnp.zeros((n_halves, P), jnp.int32), jnp.int32(0), none, none, none, jnp.int32(0)
    )

    def going(carry: tuple[Matching, _Halves, S]) -> jax.Array:
        matching, halves, state = carry
        left = matching.more | (halves.taken < halves.ends[-1])
        return left & ~over(state)

    def some(carry: tuple[Matching, _Halves, S]) -> tuple[Matching, _Halves, S]:
        matching, halves, state = carry
        matching, halves, rows = jax.lax.cond(
            matching.more,
            lambda: _from_matching(frozen, matching, halves),
            lambda: (matching, *_from_pairs(frozen, halves, window)),
        )
        return matching, halves, use(rows, state)

    _, halves, state = jax.lax.while_loop(going, some, (matching, halves, state))
    return halves, state


def _seen(graph: EGraph, features: Nodes) -> jax.Array:
    n = graph.bucket
    each = jnp.arange(n, dtype=jnp.int32)
    is_number = (graph.op == ops.OPS["const"].code) & (features.ref < 0)
    first = jnp.full(n, n, jnp.int32)
    first = first.at[jnp.where(is_number, graph.parent, n)].min(each, mode="drop")
    return jnp.where(first < n, first, each)


def _from_matching(
    frozen: _Frozen, matching: Matching, halves: _Halves
) -> tuple[Matching, _Halves, _Rows]:
    """Take matches: those of one root to be applied, others to be paired."""
    rules, patterns = frozen.rules, frozen.patterns

    def wanted(tree: jax.Array, bound: jax.Array) -> jax.Array:
        variant = rules.tree_variant[tree]
        paired = rules.variant_trees[variant, 1] >= 0  # with halves that may be new
        return paired | is_new(frozen.stamps, variant, bound)

    matching, (tree, bound, ok) = take(patterns, frozen.graph, ops.N_OPS, matching, wanted)
    bound = jnp.where(patterns.at_slot[tree] >= 0, frozen.seen[bound], bound)
    variant = rules.tree_variant[tree]
    single = rules.variant_trees[variant, 1] < 0
    size = halves.tree.shape[0]
    half = ok & ~single
    at = jnp.where(half, halves.n + jnp.cumsum(half) - 1, size)
    halves = halves._replace(
        tree=halves.tree.at[at].set(tree, mode="drop"),
        bound=halves.bound.at[at].set(bound, mode="drop"),
        n=halves.n + jnp.sum(half, dtype=jnp.int32),
    )
    halves = jax.lax.cond(matching.more, lambda: halves, lambda: _in_runs(frozen, halves))
    both = jnp.pad(bound, ((0, 0), (0, P)))
    return matching, halves, _Rows(variant, both, ok & single)


def _in_runs(frozen: _Frozen, halves: _Halves) -> _Halves:
    """Sort all halves into runs."""
    rules, size = frozen.rules, halves.tree.shape[0]
    variant, which = rules.tree_variant[halves.tree], rules.tree_root[halves.tree]
    exists = jnp.arange(size) < halves.n
    shared = jnp.take_along_axis(halves.bound, rules.shared[variant, which][:, None], axis=1)[:, 0]
    n_variants = rules.variant_rule.shape[0]
    most = frozen.graph.bucket * n_variants
    key = jnp.where(exists, frozen.graph.parent[shared] * n_variants + variant, most)
    first_key = jnp.where(exists & (which == 0), key, -1)
    second_key = jnp.where(exists & (which == 1), key, most)
    ordered, order = jax.lax.sort_key_val(second_key, jnp.arange(size, dtype=jnp.int32))
    low = jnp.searchsorted(ordered, first_key, side="left").astype(jnp.int32)
    high = jnp.searchsorted(ordered, first_key, side="right").astype(jnp.int32)
    ends = jnp.cumsum(jnp.where(first_key >= 0, high - low, 0), dtype=jnp.int32)
    return halves._replace(order=order, low=low, ends=ends)


def _from_pairs(frozen: _Frozen, halves: _Halves, window: int) -> tuple[_Halves, _Rows]:
    """Take the next pairs of halves."""
    rules, size = frozen.rules, halves.tree.shape[0]
    number = halves.taken + jnp.arange(window, dtype=jnp.int32)
    ok = number < halves.ends[-1]
    left = jnp.searchsorted(halves.ends, number, side="right").astype(jnp.int32)
    left = jnp.minimum(left, size - 1)
    offset = number - jnp.where(left > 0, halves.ends[left - 1], 0)
    right = halves.order[jnp.clip(halves.low[left] + offset, 0, size - 1)]
    variant = rules.tree_variant[halves.tree[left]]
    one, other = halves.bound[left], halves.bound[right]
    both = jnp.concatenate([one, other], axis=1)
    classes, others = frozen.graph.parent[one], frozen.graph.parent[other]
    ok &= is_new(frozen.stamps, variant, jnp.concatenate([both, classes, others], axis=1))
    ok &= classes[:, 0] != others[:, 0]
    ok &= ~rules.symmetric[variant] | (one[:, 0] < other[:, 0])
    cross = rules.cross_same[variant]
    equal = jnp.take_along_axis(classes, jnp.maximum(cross, 0), axis=1) == others
    ok &= jnp.all((cross < 0) | equal, axis=1)
    rows = _Rows(variant, both, ok)
    return halves._replace(taken=halves.taken + window), rows


def _created(_: None, batch: BindingBatch) -> tuple[jax.Array, NewENodes]:
    """Return where variants apply [C], and the e-nodes that they create."""
    made = batch.made
    notes = jax.vmap(notes_of)(made.nodes)
    return made.ok, NewENodes(made.nodes.op, made.args, jax.vmap(data_of)(notes), notes)


def _evaluated(frozen: _Frozen, rows: _Rows) -> tuple[jax.Array, NewENodes]:
    """Return where conditions hold [C], and the e-nodes that variants create."""
    seen = as_tensor_graph(frozen.features, frozen.graph.args)
    variant = jnp.where(rows.ok, rows.variant, -1)
    return jax.vmap(evaluate_on, in_axes=(None, None, 0, 0, None))(
        _created, frozen.rules, variant, rows.bound, seen
    )


def _apply(frozen: _Frozen, rows: _Rows, state: Applying) -> Applying:
    """Apply variants to their bindings where conditions hold."""
    holds, new = _evaluated(frozen, rows)
    to = frozen.rules.root_to[rows.variant]
    return apply_at(
        state,
        rows.variant,
        rows.bound,
        rows.ok & holds,
        new,
        [(0, to[:, 0]), (P, to[:, 1])],
        jnp.asarray(COMMUTATIVE),
    )
