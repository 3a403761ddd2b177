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
from xrl_jax.egraph.term_step import NUMBER, SYMBOL
from xrl_jax.language.terms import Expression, Language
from xrl_jax.runtime.engine_jit import engine_jit


class Choice(NamedTuple):
    """The cheapest e-node of each class, in the slots of the classes' names."""

    cost: jax.Array  # [N] float32, of the cheapest expression; infinite where there is no class
    node: jax.Array  # [N] int32, its e-node, the first of equally cheap ones; a hole for none


def cheapest(graph: EGraph, costs: jax.Array, paid: jax.Array | None = None) -> Choice:
    """Return the cheapest expressions of all classes.

    Args:
      graph: rebuilt.
      costs: [N] float32, positive, of each e-node without its arguments; infinite for those that
        must not be chosen.
      paid: [N] bool, classes that cost nothing; none by default.
    """
    n = graph.bucket
    own = jnp.where(graph.op != HOLE, costs, jnp.inf)

    def of_nodes(best: jax.Array) -> jax.Array:
        return own + jnp.sum(jnp.where(graph.args > 0, best[graph.args], 0.0), axis=1)

    def better(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        best, _ = carry
        new = best.at[graph.parent].min(of_nodes(best))
        return new, jnp.any(new < best)

    unpaid = jnp.full(n, jnp.inf, jnp.float32)
    start = unpaid if paid is None else jnp.where(paid, 0.0, unpaid), jnp.bool_(True)
    best, _ = jax.lax.while_loop(lambda c: c[1], better, start)
    value = of_nodes(best)
    chosen = jnp.isfinite(value) & (value <= best[graph.parent])
    place = jnp.where(chosen & (graph.op != HOLE), graph.parent, n)
    node = jnp.full(n, n, jnp.int32).at[place].min(jnp.arange(n, dtype=jnp.int32), mode="drop")
    return Choice(best, jnp.where(node < n, node, HOLE))


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
