"""Rewriting as an environment: a state is a program's graph, an action is a candidate or No-Op.

Pure and unbatched: `jax.vmap` over keys, states, actions and `Start`s runs many environments, of
different networks too where they have one bucket; the rules and the costs are the same for all
(`batch_axes`).

    params = EnvParams(rules.table, costs, start_of(program, rules, costs))
    state = reset(key, params)
    state, outcome = step(key, state, action, params)

An episode ends where No-Op is chosen (it terminates) or at the horizon (it is truncated). A state
in which an episode has ended is left as it is, so that its value can be asked for; the step after
it, whatever the action, begins the next episode and counts for nothing (`Outcome.counts`).

Source: X-RLflow (He, Parker, Yoneki, MLSys 2023): states, actions, No-Op and the reward
r_t = 100 (RT_{t-1} - RT_t) / RT_0, here of predicted times. What differs is in BUILD_NOTES.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.cost import roofline
from xrl_jax.cost.roofline import CostTable
from xrl_jax.graph import graph as graph_lib
from xrl_jax.graph.engine_jit import engine_jit
from xrl_jax.graph.graph import TensorGraph
from xrl_jax.graph.program import Program
from xrl_jax.graph.union import united
from xrl_jax.rewrite import match
from xrl_jax.rewrite.apply import Applied, apply
from xrl_jax.rewrite.delta import deltas
from xrl_jax.rewrite.table import CompiledRules, RuleTable

SLOTS = 64  # candidates an agent sees at once
HORIZON = 100  # steps of an episode, as in X-RLflow


class Start(NamedTuple):
    """Where the episodes of one program begin."""

    graph: TensorGraph  # priced
    masks: jax.Array  # [N, W] where rules match
    owner: jax.Array  # [N] int32, which graph of the program a node belongs to
    counts: jax.Array  # [N] float32, how often each graph of the program runs; 0 beyond the last
    seconds: jax.Array  # float32, predicted for one run of the program


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EnvParams:
    """What an environment is made of."""

    table: RuleTable
    costs: CostTable
    start: Start
    horizon: jax.Array | int = HORIZON
    slots: int = field(default=SLOTS, metadata={"static": True})  # M


class Moves(NamedTuple):
    """The candidates of a state, in slots that may be empty."""

    entry: jax.Array  # [M] int32; -1 empty
    root: jax.Array  # [M] int32
    partner: jax.Array  # [M] int32
    seconds: jax.Array  # [M] float32 it would add to one run of the program; 0 where empty
    gone: jax.Array  # [M] float32 seconds of the nodes that would go
    made: jax.Array  # [M, Q] int32, operators of the nodes it would make; 0 for none
    n: jax.Array  # how many there are; more than M where only some are listed

    @property
    def valid(self) -> jax.Array:
        return self.entry >= 0


class EnvState(NamedTuple):
    """An episode at one time."""

    graph: TensorGraph  # priced
    masks: jax.Array  # [N, W]
    owner: jax.Array  # [N] int32
    moves: Moves
    seconds: jax.Array  # float32, predicted for one run of the program
    t: jax.Array  # int32, steps taken
    done: jax.Array  # bool, the episode has ended here


class Outcome(NamedTuple):
    """What a step has led to."""

    reward: jax.Array  # float32, percent of the first state's seconds that were saved
    terminated: jax.Array  # bool, No-Op was chosen
    truncated: jax.Array  # bool, the horizon was reached
    counts: jax.Array  # bool; false for the step that begins an episode
    applied: jax.Array  # bool, the graph was rewritten


def start_of(
    program: Program, rules: CompiledRules, costs: CostTable, *, bucket: int | None = None
) -> Start:
    """Where episodes of the program begin; its graphs become one (`graph.union`).

    Args:
      bucket: number of slots; by default the smallest with room to rewrite.

    Raises:
      GraphError: the program does not fit.
    """
    graph, owner = united(program, bucket=bucket)
    n = graph.nodes.op.shape[0]
    counts = jnp.zeros(n, jnp.float32).at[: len(program.counts)].set(jnp.asarray(program.counts))
    return _start(rules.table, costs, graph, owner, counts)


@engine_jit
def _start(
    table: RuleTable, costs: CostTable, graph: TensorGraph, owner: jax.Array, counts: jax.Array
) -> Start:
    graph = roofline.priced(costs, graph_lib.remove_dead(graph))
    seconds = seconds_of(graph, owner, counts)
    return Start(graph, match.match(table, graph), owner, counts, seconds)


def batch_axes(params: EnvParams) -> Any:
    """`in_axes` of `params` for a batch of different starts."""
    return dataclasses.replace(params, table=None, costs=None, start=0, horizon=None)


def batch_specs(params: EnvParams, each: Any, same: Any) -> Any:
    """`params` of a batch that is spread over devices: `each` for what every environment has of its
    own, `same` for what they share.
    """
    return dataclasses.replace(params, table=same, costs=same, start=each, horizon=same)


def reset(key: jax.Array, params: EnvParams) -> EnvState:
    """The first state of an episode."""
    graph, masks, owner, _, seconds = params.start
    return EnvState(
        graph,
        masks,
        owner,
        _moves(key, graph, masks, owner, params),
        seconds,
        jnp.int32(0),
        jnp.bool_(False),
    )


def step(
    key: jax.Array, state: EnvState, action: jax.Array, params: EnvParams
) -> tuple[EnvState, Outcome]:
    """The state after an action, and what it brought.

    Args:
      action: a slot of `state.moves`, or M for No-Op. An empty slot, and a rewrite for which the
        bucket has no room, change nothing.
    """
    begin, moves = state.done, state.moves
    no_op = action == params.slots
    slot = jnp.clip(action, 0, params.slots - 1)
    entry = jnp.where(begin | no_op, -1, moves.entry[slot])
    root = moves.root[slot]
    place = entry, root, moves.partner[slot]
    made, owner = rewritten(params, state.graph, state.owner, *place)
    graph = made.graph
    masks = match.rematch(params.table, graph, state.masks, made.changed)
    graph, masks, owner = jax.tree.map(
        lambda first, after: jnp.where(begin, first, after),
        tuple(params.start[:3]),
        (graph, masks, owner),
    )
    seconds = seconds_of(graph, owner, params.start.counts)
    t = jnp.where(begin, 0, state.t + 1)
    terminated, truncated = no_op & ~begin, (t >= params.horizon) & ~no_op
    after = EnvState(
        graph,
        masks,
        owner,
        _moves(key, graph, masks, owner, params),
        seconds,
        t,
        terminated | truncated,
    )
    reward = jnp.where(begin, 0.0, 100.0 * (state.seconds - seconds) / params.start.seconds)
    return after, Outcome(reward, terminated, truncated, ~begin, made.ok)


def rewritten(
    params: EnvParams,
    graph: TensorGraph,
    owner: jax.Array,
    entry: jax.Array,
    root: jax.Array,
    partner: jax.Array,
) -> tuple[Applied, jax.Array]:
    """What a candidate makes of a priced graph, priced, and which graph of the program each of its
    nodes belongs to.
    """
    made = apply(params.table, graph, entry, root, partner)
    new = made.changed & (graph.nodes.op == graph_lib.ops.HOLE)
    priced = roofline.repriced(params.costs, made.graph, graph)
    return made._replace(graph=priced), jnp.where(new, owner[root], owner)


def seconds_of(graph: TensorGraph, owner: jax.Array, counts: jax.Array) -> jax.Array:
    """Predicted seconds of one run of the program that a priced union stands for."""
    live = graph.nodes.op != graph_lib.ops.HOLE
    return jnp.sum(jnp.where(live, graph.nodes.cost * counts[owner], 0.0))


def _moves(
    key: jax.Array, graph: TensorGraph, masks: jax.Array, owner: jax.Array, params: EnvParams
) -> Moves:
    found = match.sample(params.table, graph, masks, key, size=params.slots)
    price = roofline.price_of_new(params.costs, graph)
    change = deltas(params.table, graph, found, price, keep=lambda new: new.nodes.op)
    times = params.start.counts[owner[found.root]]
    return Moves(
        jnp.where(change.ok, found.entry, -1),
        found.root,
        found.partner,
        jnp.where(change.ok, times * change.seconds, 0.0),
        jnp.where(change.ok, times * change.gone, 0.0),
        jnp.where(change.ok[:, None], change.kept, 0),
        found.count,
    )
