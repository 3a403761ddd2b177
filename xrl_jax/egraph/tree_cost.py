"""Extraction under tree costs: an expression costs the sum over its tree, shared parts each time.

This is the extraction of egg, for languages of terms. It is exact and takes a fraction of a
millisecond, so it serves as a reward.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.order import Order, each_at, order_of
from xrl_jax.egraph.term_step import NUMBER, SYMBOL
from xrl_jax.language.terms import Expression, Language
from xrl_jax.runtime.engine_jit import engine_jit


class Choice(NamedTuple):
    """The cheapest e-node of each class, in the slots of the classes' names."""

    cost: jax.Array  # [N] float32, of the cheapest expression; infinite where there is none
    node: jax.Array  # [N] int32, its e-node; a hole for none


def cheapest(
    graph: EGraph, costs: jax.Array, paid: jax.Array | None = None, order: Order | None = None
) -> Choice:
    """Return the cheapest expressions of all classes that the roots may need.

    Args:
      graph: rebuilt.
      costs: [N] float32, positive, of each e-node without its arguments; infinite for those that
        must not be chosen.
      paid: [N] bool, classes that cost nothing; none by default.
      order: from `order_of`, if it is known.
    """
    n = graph.bucket
    own = jnp.where(graph.op != HOLE, costs, jnp.inf)

    def read(slot: jax.Array, found: Choice) -> tuple[jax.Array, jax.Array]:
        args = graph.args[slot]
        of_args = jnp.where(args > 0, each_at(found.cost, args), 0.0)
        return own[slot] + jnp.sum(of_args), found.cost[graph.parent[slot]]

    def write(slot: jax.Array, costs: tuple[jax.Array, jax.Array], found: Choice) -> Choice:
        # Only what is strictly cheaper counts, so that no choice has a cycle, rounded as it may be.
        c = jnp.where(costs[0] < costs[1], graph.parent[slot], n)
        return Choice(
            found.cost.at[c].set(costs[0], mode="drop"), found.node.at[c].set(slot, mode="drop")
        )

    unpaid = jnp.full(n, jnp.inf, jnp.float32)
    start = Choice(
        unpaid if paid is None else jnp.where(paid, 0.0, unpaid), jnp.full(n, HOLE, jnp.int32)
    )
    return (order_of(graph) if order is None else order).passed_on(read, write, start)


cheapest_now = engine_jit(cheapest)


def expression_of(
    graph: EGraph, choice: Choice, name: int, language: Language, symbols: tuple[str, ...]
) -> Expression:
    """Return the chosen expression of a class.

    Raises:
      ValueError: the class is not in the e-graph.
    """
    host, node = jax.tree.map(np.asarray, graph), np.asarray(choice.node)
    operators = {spec.code: op for op, spec in language.vocabulary.operators.items()}
    made: dict[int, Expression] = {}

    def visit(c: int) -> Expression:
        if c not in made:
            e = int(node[c])
            if e == HOLE:
                raise ValueError(f"there is no class {c} in this e-graph")
            code, data = int(host.op[e]), host.data[e, 0]
            if code == NUMBER:
                made[c] = float(str(data.view(np.float32)))  # as it was written
            elif code == SYMBOL:
                made[c] = symbols[int(data)]
            else:
                made[c] = (operators[code], *(visit(int(a)) for a in host.args[e] if a))
        return made[c]

    return visit(name)
