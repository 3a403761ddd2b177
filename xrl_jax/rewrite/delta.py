"""What a candidate would change in cost, without applying it.

The exact cost of a rewrite needs the rewritten graph; its change can be had from the match alone:
the price of what comes minus the costs of the bound nodes that lose their last use. That is O(P)
for a candidate instead of O(N). It leaves out nodes outside of the pattern that die with it, so it
promises no more than the rewrite gives, where the price is that of the rewritten graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.graph.graph import TensorGraph, args_of, use_counts
from xrl_jax.rewrite.instantiate import NewNodes, bind, instantiate
from xrl_jax.rewrite.match import Candidates
from xrl_jax.rewrite.table import P, RuleTable

# Seconds [M] that come with rewrites: (new nodes [M, Q, ...], slots of the bound nodes [M, 2P],
# codes of what replaces the roots [M, 2], -1 where there is none).
Price = Callable[[NewNodes, jax.Array, jax.Array], jax.Array]


def no_price(new: NewNodes, bound: jax.Array, to: jax.Array) -> jax.Array:
    """A price of nothing, for rewriting without a cost model."""
    return jnp.zeros(bound.shape[:1], jnp.float32)


class Deltas(NamedTuple):
    """For each candidate: seconds it adds (negative: it gains), seconds of the nodes that go,
    whether it still matches, and the nodes it would make.
    """

    seconds: jax.Array  # [M] float32; +inf where not ok
    gone: jax.Array  # [M] float32
    ok: jax.Array  # [M] bool
    new: NewNodes  # [M, Q, ...]


def deltas(table: RuleTable, graph: TensorGraph, candidates: Candidates, price: Price) -> Deltas:
    """Change of cost of every candidate; pure and jittable."""
    uses = use_counts(graph)
    args = args_of(graph)
    cost = graph.nodes.cost

    def make(
        entry: jax.Array, root: jax.Array, partner: jax.Array
    ) -> tuple[NewNodes, jax.Array, jax.Array]:
        """What comes, and the slots of the bound nodes [2P]."""
        bound, matched = bind(table, jnp.maximum(entry, 0), root, partner, graph)
        ok = (entry >= 0) & matched
        new = instantiate(table, jnp.where(ok, entry, -1), bound, graph)
        return new, bound, ok & new.ok

    def take(entry: jax.Array, partner: jax.Array, new: NewNodes, bound: jax.Array) -> jax.Array:
        """Seconds of what goes."""
        # References from the new nodes and from the replaced roots keep a bound node alive.
        codes = jnp.concatenate([new.args.reshape(-1), table.root_to[entry]])
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

    entry = jnp.maximum(candidates.entry, 0)
    new, bound, ok = jax.vmap(make)(candidates.entry, candidates.root, candidates.partner)
    gone = jax.vmap(take)(entry, candidates.partner, new, bound)
    made = price(new, bound, table.root_to[entry])
    return Deltas(jnp.where(ok, made - gone, jnp.inf), gone, ok, new)
