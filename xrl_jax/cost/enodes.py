"""Costs of the e-nodes of tensors: what each costs in its cheapest lowering.

The cost of a node depends on where its arguments come from (`fusion`), which an e-graph leaves
open. So costs are those under a choice of one e-node for each class: an e-node's arguments have the
origins that the choice gives their classes. A better choice then has costs of its own.

Letters: N slots of the e-graph, A arguments, L lowerings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost import fusion
from xrl_jax.cost.roofline import CostTable, Work, computed_where
from xrl_jax.cost.view import CostView
from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.dag_cost import cheapest_shared, discounted, structure_of
from xrl_jax.egraph.tensor_graph import as_tensor_graph, features_of
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Nodes
from xrl_jax.graph.view import NodeView, views_at
from xrl_jax.language.rule import Rule
from xrl_jax.lower.table import CHOICES, fits, number_of
from xrl_jax.runtime.engine_jit import engine_jit

_CHUNK = 256  # timings that are looked up at once


def _place_of_choices() -> np.ndarray:
    """Return where lowerings are in `CHOICES`, [operators, L]; beyond its end for the plain ones
    and where there are none.
    """
    most = 1 + max(i for _, i in CHOICES)
    place = np.full((ops.N_OPS, most), len(CHOICES), np.int32)
    for n, (op, i) in enumerate(CHOICES):
        place[ops.OPS[op].code, i] = n
    return place


_PLACE = _place_of_choices()


class Choice(NamedTuple):
    """An e-node for each class, in the slot of the class's name, and lowerings of e-nodes."""

    node: jax.Array  # [N] int32; a hole where there is none
    lowering: jax.Array  # [N] int32


def no_choice(bucket: int) -> Choice:
    """Return that nothing is chosen: all values count as written to memory."""
    return Choice(*jnp.zeros((2, bucket), jnp.int32))


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
    return _costs_under(costs, graph, _candidates(costs, graph, right), choice, n_outputs)


class _Candidates(NamedTuple):
    """E-nodes in each of their lowerings."""

    view: CostView  # [N, 1], of e-nodes, in lowerings [N, L]; arguments count as written to memory
    there: jax.Array  # [N, L] bool
    work: Work  # [N, L]


def _candidates(costs: CostTable, graph: EGraph, right: jax.Array) -> _Candidates:
    f, args = features_of(graph), graph.args
    there = args > 0
    one = CostView(
        **_views(graph, f)._asdict(),
        weight_only=f.weight_only,
        arg_weight_only=there & f.weight_only[args],
        arg_origins=jnp.full(args.shape, fusion.MEMORY),
    )
    n_lowerings = _PLACE.shape[1]
    numbers = jnp.arange(n_lowerings, dtype=jnp.int32)
    is_plain = (graph.op != HOLE)[:, None] & (numbers == 0)
    chosen = jnp.take_along_axis(
        right, jnp.asarray(_PLACE)[graph.op], axis=1, mode="fill", fill_value=False
    )

    def work_at(at: jax.Array) -> Work:
        slot, number = jnp.divmod(at, n_lowerings)
        view = jax.tree.map(lambda x: x.at[slot].get(mode="clip"), one)
        return costs.work(view._replace(lowering=number))

    there = is_plain | chosen
    work = computed_where(there.reshape(-1), work_at, _CHUNK)
    work = jax.tree.map(lambda x: x.reshape(there.shape), work)
    view = jax.tree.map(lambda x: x[:, None], one)
    return _Candidates(view._replace(lowering=numbers[None]), there, work)


def _costs_under(
    costs: CostTable,
    graph: EGraph,
    candidates: _Candidates,
    choice: Choice,
    n_outputs: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return `enode_costs` of these candidates."""
    view, there, work = candidates
    origins = _origins(costs.sharing, graph, features_of(graph), choice, n_outputs)
    of_args = jnp.where(graph.args > 0, origins[graph.parent[graph.args]], fusion.MEMORY)
    cost = costs.costs(view._replace(arg_origins=of_args[:, None]), work)
    cost = jnp.where(there, cost, jnp.inf)
    lowering = jnp.argmin(cost, axis=1).astype(jnp.int32)
    return jnp.min(cost, axis=1), lowering


class Least(NamedTuple):
    """The least cost found of all roots of an e-graph together."""

    seconds: jax.Array  # []
    choice: Choice


def least_cost(
    costs: CostTable,
    graph: EGraph,
    allowed: jax.Array,
    known: Choice,
    n_outputs: jax.Array,
) -> Least:
    """Return the least cost of an e-graph: the reward of searches.

    Args:
      allowed: from `allowed_lowerings`.
      known: a good program's choice, under which costs are computed; acyclic, and complete below
        the roots; or no e-node at all, which takes twice as long and finds less.
      n_outputs: see `tensor_graph.extracted`.
    """
    structure = structure_of(graph)
    candidates = _candidates(costs, graph, fitting(graph, allowed))

    def under(choice: Choice) -> tuple[jax.Array, jax.Array]:
        return _costs_under(costs, graph, candidates, choice, n_outputs)

    def first() -> Choice:
        cost, lowering = under(known)
        return Choice(discounted(graph, structure, cost), lowering)

    choice = jax.lax.cond(jnp.any(known.node > 0), lambda: known, first)
    cost, lowering = under(choice)
    seconds, node = cheapest_shared(graph, structure, cost, choice.node)
    return Least(seconds, Choice(node, lowering))


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
