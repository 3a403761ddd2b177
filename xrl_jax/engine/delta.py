"""What a candidate would change in cost, without applying it.

The exact cost of a rewrite needs the rewritten graph; its change can be had from the match alone:
the price of what comes minus the costs of the bound nodes that lose their last use. That is O(P)
for a candidate instead of O(N). It leaves out nodes outside of the pattern that die with it, so it
promises no more than the rewrite gives, where the price is that of the rewritten graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.engine.bind import bind
from xrl_jax.engine.instantiate import Asked, ask
from xrl_jax.engine.match import Candidates
from xrl_jax.engine.new_nodes import NewNodes
from xrl_jax.graph.graph import TensorGraph, args_of
from xrl_jax.graph.passes import use_counts
from xrl_jax.language.table import P, RuleTable


@dataclass(frozen=True)
class Price:
    """What rewrites of one graph add, in two parts.

    Attributes:
      made: (context, [C] bindings) -> seconds [C] of the nodes they make, and marks [C, 2] of what
        replaces their roots. Asked once for bindings that are alike, marks included.
      replaced: (root, mark of what replaces it) -> seconds that the root's readers take more; for
        one candidate.
      marks: [N] int32 of the nodes.
      context: what `made` goes by, the same for all graphs.
    """

    made: Callable[[Any, Asked], tuple[jax.Array, jax.Array]]
    replaced: Callable[[jax.Array, jax.Array], jax.Array]
    marks: jax.Array | None = None
    context: Any = None


def _nothing(_: None, asked: Asked) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(asked.to.shape[0]), jnp.zeros_like(asked.to)


# For rewriting without a cost model.
NO_PRICE = Price(_nothing, lambda root, mark: jnp.zeros(()))


class Deltas(NamedTuple):
    """For each candidate: seconds it adds (negative: it gains), seconds of the nodes that go,
    whether it still matches, and what was to be kept of the nodes it would make.
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
    """Change of cost of every candidate of this graph; pure and jittable.

    Args:
      keep: what is to be kept of new nodes [C, Q, ...]; means nothing where a candidate is not ok.
    """
    uses = use_counts(graph)
    args = args_of(graph)
    cost = graph.nodes.cost

    def wanted(context: Any, asked: Asked) -> tuple[Any, ...]:
        return asked.made.ok, *price.made(context, asked), keep(asked.made)

    def make(variant: jax.Array, root: jax.Array, partner: jax.Array) -> tuple[Any, ...]:
        """Whether it is ok, what it adds, what is kept, and the slots of the bound nodes [2P]."""
        bound, matched = bind(table, jnp.maximum(variant, 0), root, partner, graph)
        asked = jnp.where((variant >= 0) & matched, variant, -1)
        found = ask(wanted, table, asked, bound, graph, marks=price.marks, context=price.context)
        ok, seconds, marks, kept = found
        for which in range(2):
            more = price.replaced(bound[which * P], marks[which])
            seconds += jnp.where(table.root_to[jnp.maximum(variant, 0), which] >= 0, more, 0.0)
        return ok, seconds, kept, bound

    def take(variant: jax.Array, partner: jax.Array, bound: jax.Array) -> jax.Array:
        """Seconds of what goes."""
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
