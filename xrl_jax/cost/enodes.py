"""Costs of the e-nodes of tensors: what each costs in its cheapest lowering.

The cost of a node depends on where its arguments come from (`fusion`), which an e-graph leaves
open. So costs are those under a choice of one e-node for each class: an e-node's arguments have the
origins that the choice gives their classes. A better choice then has costs of its own.

Letters: N slots of the e-graph, A arguments, L lowerings that are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.cost import fusion
from xrl_jax.cost.roofline import CostTable
from xrl_jax.cost.view import CostView
from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.dag_cost import cheapest_shared
from xrl_jax.egraph.tensor_graph import as_tensor_graph, features_of
from xrl_jax.graph.graph import Nodes
from xrl_jax.graph.view import NodeView, views_at
from xrl_jax.language.rule import Rule
from xrl_jax.lower.table import CHOICES, fits, number_of
from xrl_jax.runtime.engine_jit import engine_jit

_SWEEPS = 2  # costs, a choice under them, costs under this choice, and a better choice


class Choice(NamedTuple):
    """An e-node for each class, in the slot of the class's name, and lowerings of e-nodes."""

    node: jax.Array  # [N] int32; a hole where there is none
    lowering: jax.Array  # [N] int32


def allowed_lowerings(rules: Sequence[Rule]) -> jax.Array:
    """Return [len(CHOICES)] bool: the lowerings that some rule may choose."""
    chosen = [r.lowering for r in rules if r.lowering is not None]
    there = {(op, number_of(op, name)) for op, name in chosen}
    return jnp.asarray([choice in there for choice in CHOICES])


def fitting(graph: EGraph, allowed: jax.Array) -> jax.Array:
    """Return which of the allowed lowerings are right for each e-node, [N, len(CHOICES)] bool."""
    return jax.vmap(fits)(_views(graph, features_of(graph))) & allowed


def enode_costs(
    costs: CostTable, graph: EGraph, right: jax.Array, choice: Choice, n_outputs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the seconds [N] of each e-node in its cheapest lowering under a choice, and these
    lowerings [N].

    Args:
      right: from `fitting`.
      choice: acyclic; classes without an e-node count as written to memory.
      n_outputs: see `tensor_graph.extracted`.
    """
    f, args = features_of(graph), graph.args
    origins = _origins(costs.sharing, graph, f, choice, n_outputs)
    there = args > 0
    own = _views(graph, f)
    view = CostView(
        **own._asdict(),
        weight_only=f.weight_only,
        arg_weight_only=there & f.weight_only[args],
        arg_origins=jnp.where(there, origins[graph.parent[args]], fusion.MEMORY),
    )
    live = graph.op != HOLE
    numbers = jnp.asarray([i for _, i in CHOICES], jnp.int32)

    def cheaper(c: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        least, lowering = best
        where = live & right[:, c]
        own = jnp.full_like(lowering, numbers[c])
        seconds = costs.costs_where(view._replace(lowering=own), where)
        better = where & (seconds < least)
        return jnp.where(better, seconds, least), jnp.where(better, own, lowering)

    plain = jnp.where(live, costs.costs(view), jnp.inf), jnp.zeros_like(graph.op)
    return jax.lax.fori_loop(0, len(CHOICES), cheaper, plain)


class Least(NamedTuple):
    """The least cost found of all roots of an e-graph together."""

    seconds: jax.Array  # []
    choice: Choice


def least_cost(costs: CostTable, graph: EGraph, allowed: jax.Array, n_outputs: jax.Array) -> Least:
    """Return the least cost of an e-graph: the reward of searches.

    Args:
      allowed: from `allowed_lowerings`.
      n_outputs: see `tensor_graph.extracted`.
    """
    right = fitting(graph, allowed)
    nothing = jnp.zeros_like(graph.op)

    def sweep(_: jax.Array, least: Least) -> Least:
        cost, lowering = enode_costs(costs, graph, right, least.choice, n_outputs)
        seconds, node = cheapest_shared(graph, cost)
        return Least(seconds, Choice(node, lowering))

    return jax.lax.fori_loop(0, _SWEEPS, sweep, Least(jnp.float32(0.0), Choice(nothing, nothing)))


fitting_now = engine_jit(fitting)
enode_costs_now = engine_jit(enode_costs)
least_cost_now = engine_jit(least_cost)


def _views(graph: EGraph, f: Nodes) -> NodeView:
    """Return the views [N] of all e-nodes, in their plain lowerings."""
    return views_at(as_tensor_graph(f, graph.args), jnp.arange(graph.bucket))


def _origins(
    of: fusion.Sharing, graph: EGraph, f: Nodes, choice: Choice, n_outputs: jax.Array
) -> jax.Array:
    """Return the origin [N] of each class's value, in the slot of the class's name."""
    chosen = choice.node
    nodes = jax.tree.map(lambda x: x[chosen], f._replace(lowering=choice.lowering))
    nodes = nodes._replace(op=jnp.where(chosen > 0, nodes.op, HOLE))
    is_output = jnp.arange(len(graph.roots)) < n_outputs
    outputs = jnp.where(is_output, graph.roots, -1)
    args = jnp.where(chosen[:, None] > 0, graph.args[chosen], HOLE)
    return fusion.origins(of, as_tensor_graph(nodes, args, outputs))
