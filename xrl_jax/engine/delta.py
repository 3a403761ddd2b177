"""The change in cost that a candidate would cause, without applying it.

The exact cost of a rewrite needs the rewritten graph. Its change can be estimated from the match
alone: the price of the new nodes minus the costs of the bound nodes that lose their last use. That
is O(P) per candidate instead of O(N). Nodes outside the pattern that die with it are not counted,
so the estimate never promises more than the rewrite gains, provided that the price is the one in
the rewritten graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.engine.bind import bind
from xrl_jax.engine.instantiate import BindingBatch, evaluate_on
from xrl_jax.engine.match import Candidates
from xrl_jax.engine.new_nodes import NewNodes
from xrl_jax.graph.graph import TensorGraph, args_of
from xrl_jax.graph.passes import use_counts
from xrl_jax.language.table import P, RuleTable


@dataclass(frozen=True)
class Price:
    """The cost that rewrites of one graph add, in two parts.

    Attributes:
      made: (context, [C] bindings) -> seconds [C] of the nodes that they create, and marks [C, 2]
        of the nodes that replace their roots. Called once for equal bindings (marks included).
      replaced: (root, mark of its replacement) -> additional seconds of the root's consumers; for
        one candidate.
      marks: [N] int32, a label of each node, on which the prices may depend.
      context: arrays that `made` uses, the same for all graphs.
    """

    made: Callable[[Any, BindingBatch], tuple[jax.Array, jax.Array]]
    replaced: Callable[[jax.Array, jax.Array], jax.Array]
    marks: jax.Array | None = None
    context: Any = None


def _nothing(_: None, batch: BindingBatch) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(batch.to.shape[0]), jnp.zeros_like(batch.to)


# For rewriting without a cost model.
NO_PRICE = Price(_nothing, lambda root, mark: jnp.zeros(()))


class Deltas(NamedTuple):
    """The change in cost of each candidate.

    `seconds` is the time that a candidate adds (negative: it saves time), `gone` the time of the
    nodes that die, `ok` whether the candidate applies, and `kept` what `keep` returned for its new
    nodes.
    """

    seconds: jax.Array  # [M] float32; +inf where not ok
    gone: jax.Array  # [M] float32
    ok: jax.Array  # [M] bool
    kept: Any  # [M, ...]


def deltas(
    table: RuleTable,
    graph: TensorGraph,
    candidates: Candidates,
    price: Price,
    keep: Callable[[NewNodes], Any],
) -> Deltas:
    """Return the change in cost of every candidate of this graph (pure, jittable).

    Args:
      keep: new nodes [C, Q, ...] -> the values to return for them; meaningless where a candidate is
        not ok.
    """
    uses = use_counts(graph)
    args = args_of(graph)
    cost = graph.nodes.cost

    def fn(context: Any, batch: BindingBatch) -> tuple[Any, ...]:
        return batch.made.ok, *price.made(context, batch), keep(batch.made)

    def make(variant: jax.Array, root: jax.Array, partner: jax.Array) -> tuple[Any, ...]:
        """Return ok, the seconds added, what `keep` returned, and the bound slots [2P]."""
        bound, matched = bind(table, jnp.maximum(variant, 0), root, partner, graph)
        chosen = jnp.where((variant >= 0) & matched, variant, -1)
        found = evaluate_on(
            fn, table, chosen, bound, graph, marks=price.marks, context=price.context
        )
        ok, seconds, marks, kept = found
        for which in range(2):
            more = price.replaced(bound[which * P], marks[which])
            seconds += jnp.where(table.root_to[jnp.maximum(variant, 0), which] >= 0, more, 0.0)
        return ok, seconds, kept, bound

    def take(variant: jax.Array, partner: jax.Array, bound: jax.Array) -> jax.Array:
        """Return the seconds of the nodes that die."""
        # References from the new nodes and from the replaced roots keep a bound node alive.
        codes = jnp.concatenate([table.new_args[variant].reshape(-1), table.root_to[variant]])
        kept = (
            jnp.zeros(2 * P, jnp.int32)
            .at[jnp.where((codes >= 0) & (codes < 2 * P), codes, 2 * P)]
            .add(1, mode="drop")
        )
        same = (bound[:, None] == bound[None, :]) & (bound[:, None] > 0)
        kept = jnp.any(same & (kept > 0)[None, :], axis=1)
        first = jnp.argmax(same, axis=1) == jnp.arange(2 * P)  # one position for each bound node
        edges = (
            jnp.sum(args[bound][:, :, None] == bound[None, None, :], axis=1) * (bound > 0)[None, :]
        )
        is_root = (jnp.arange(2 * P) == 0) | ((jnp.arange(2 * P) == P) & (partner > 0))
        dead = is_root & ~kept

        def spread(_: jax.Array, dead: jax.Array) -> jax.Array:
            lost = jnp.sum(edges * (dead & first)[:, None], axis=0)
            return dead | ((bound > 0) & ~kept & (lost >= uses[bound]))

        dead = jax.lax.fori_loop(0, 4, spread, dead)
        return jnp.sum(jnp.where(dead & first, cost[bound], 0.0))

    ok, made, kept, bound = jax.vmap(make)(candidates.variant, candidates.root, candidates.partner)
    gone = jax.vmap(take)(jnp.maximum(candidates.variant, 0), candidates.partner, bound)
    return Deltas(jnp.where(ok, made - gone, jnp.inf), gone, ok, kept)
