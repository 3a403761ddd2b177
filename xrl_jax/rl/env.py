"""Rewriting as an environment: a state is a program's graph, an action is a candidate or No-Op.

Pure and unbatched: `jax.vmap` over keys, states, actions and `Start`s runs many environments, of
different networks too where they have one bucket; the rules and the costs are the same for all
(`batch_axes`).

    params = EnvParams(rules.table, costs, start_of(program, rules, costs))
    state = reset(key, params)
    state, outcome = step(key, state, action, params)

A candidate can be taken once, or asked for as a *macro-action*: its rule is then applied to all
candidates in the action's mask, the cheapest first, so many in each step. In the steps of a
macro-action after its first nothing else is asked (`Outcome.asked`), and the candidates of the rule
alone are shown. A macro-action ends when as many candidates were taken or left out by the mask as
the rule matched when it began: what makes matches for itself does not go on for ever.

An episode ends where No-Op is chosen (it terminates) or at the horizon (it is truncated), which
counts actions. A state in which an episode has ended is left as it is, so that its value can be
asked for; the step after it, whatever the action, begins the next episode and counts for nothing
(`Outcome.counts`).

Source: X-RLflow (He, Parker, Yoneki, MLSys 2023): states, actions, No-Op and the reward
r_t = 100 (RT_{t-1} - RT_t) / RT_0, here of predicted times. What differs is in docs/policies.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from xrl_jax.cost.roofline import CostTable
from xrl_jax.engine import match
from xrl_jax.engine.apply import Instantiated, apply_instantiated, look
from xrl_jax.engine.delta import deltas
from xrl_jax.graph import ops, passes
from xrl_jax.graph.batch import largest_of_batch
from xrl_jax.graph.graph import Nodes, TensorGraph, assert_one
from xrl_jax.language.table import CompiledRules, Q, RuleTable
from xrl_jax.program.program import Program
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.transform.union import united

SLOTS = 64  # candidates an agent sees at once
HORIZON = 100  # actions of an episode, as in X-RLflow
AT_ONCE = 8  # rewrites in a step
ONCE, MACRO = range(2)  # what can be asked of a candidate
KINDS = 2
LEAST_GAIN = 1e-6  # share of the first state's seconds that counts as a gain


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
    at_once: int = field(default=AT_ONCE, metadata={"static": True})  # K

    @property
    def no_op(self) -> int:
        """The index that ends an episode; those below are `kind * M + slot`."""
        return KINDS * self.slots


class Action(NamedTuple):
    """What is asked of the environment."""

    index: jax.Array  # int32: `kind * M + slot`, or `EnvParams.no_op`
    mask: jax.Array  # [M] bool, candidates that a macro-action of their rule takes


class CandidateSlots(NamedTuple):
    """The candidates of a state, in slots that may be empty."""

    variant: jax.Array  # [M] int32; -1 empty
    root: jax.Array  # [M] int32
    partner: jax.Array  # [M] int32
    seconds: jax.Array  # [M] float32 it would add to one run of the program; 0 where empty
    gone: jax.Array  # [M] float32 seconds of the nodes that would go
    nodes: Nodes  # [M, Q, ...] it would make; zeros for none
    args: jax.Array  # [M, Q, A] int32, their arguments as binding codes; zeros for none
    n: jax.Array  # how many there are; more than M where only some are listed

    @property
    def valid(self) -> jax.Array:
        return self.variant >= 0


class MacroAction(NamedTuple):
    """A rule that is being applied to all candidates in the mask."""

    rule: jax.Array  # int32, its index
    left: jax.Array  # int32, so many candidates more at most; 0: no macro-action is under way


class EnvState(NamedTuple):
    """An episode at one time."""

    graph: TensorGraph  # priced
    masks: jax.Array  # [N, W]
    owner: jax.Array  # [N] int32
    candidates: CandidateSlots
    macro: MacroAction
    seconds: jax.Array  # float32, predicted for one run of the program
    best: jax.Array  # float32, the least of these in the episode
    t: jax.Array  # int32, actions taken
    done: jax.Array  # bool, the episode has ended here


class Outcome(NamedTuple):
    """What a step has led to."""

    reward: jax.Array  # float32, percent of the first state's seconds that were saved
    terminated: jax.Array  # bool, No-Op was chosen
    truncated: jax.Array  # bool, the horizon was reached
    counts: jax.Array  # bool; false for the step that begins an episode
    asked: jax.Array  # bool, the action's index counted; within a macro-action the mask alone do
    applied: jax.Array  # bool, the graph was rewritten
    variant: jax.Array  # [K] int32, the rewrites; -1 for none
    root: jax.Array  # [K] int32


def start_of(
    program: Program, rules: CompiledRules, costs: CostTable, *, bucket: int | None = None
) -> Start:
    """Where episodes of the program begin; its graphs become one (`transform.union`).

    Args:
      bucket: number of slots, at least; by default `united_bucket`.

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
    graph = passes.remove_dead(graph)
    masks = match.match(table, graph)
    return _priced(costs, Start(graph, masks, owner, counts, jnp.float32(0.0)))


def _priced(costs: CostTable, start: Start) -> Start:
    graph = costs.priced(start.graph)
    seconds = seconds_of(graph, start.owner, start.counts)
    return start._replace(graph=graph, seconds=seconds)


def with_costs(params: EnvParams, costs: CostTable) -> EnvParams:
    """Environments [B] under other costs."""
    start = jax.vmap(_priced, in_axes=(None, 0))(costs, params.start)
    return dataclasses.replace(params, costs=costs, start=start)


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
    assert_one(graph, masks, owner)
    return EnvState(
        graph,
        masks,
        owner,
        _moves(key, graph, masks, owner, params),
        MacroAction(jnp.int32(-1), jnp.int32(0)),
        seconds,
        seconds,
        jnp.int32(0),
        jnp.bool_(False),
    )


def ended(params: EnvParams) -> EnvState:
    """The state before the first episode, which the next step begins: there is nothing to compute,
    and so nothing to compile, as there is for `reset`.
    """
    graph, masks, owner, _, seconds = params.start
    none = jnp.zeros(params.slots, jnp.int32)
    nothing = none.astype(jnp.float32)
    like = jax.tree.map(lambda f: jnp.zeros((params.slots, Q, *f.shape[1:]), f.dtype), graph.nodes)
    args = jnp.zeros((params.slots, Q, ops.MAX_ARGS), jnp.int32)
    candidates = CandidateSlots(none - 1, none, none, nothing, nothing, like, args, jnp.int32(0))
    macro = MacroAction(jnp.int32(-1), jnp.int32(0))
    whole = seconds, seconds, jnp.int32(0), jnp.bool_(True)
    return EnvState(graph, masks, owner, candidates, macro, *whole)


def allowed(candidates: CandidateSlots, table: RuleTable) -> jax.Array:
    """[2 M + 1] bool, which indices do something: all candidates; macro-actions of a rule by the
    first of its candidates, where there are more; No-Op.
    """
    same = same_rule(candidates, table)
    first = candidates.valid & ~jnp.any(jnp.tril(same, -1), axis=1)
    several = first & (jnp.sum(same, axis=1) > 1)
    return jnp.concatenate([candidates.valid, several, jnp.ones(1, bool)])


def maskable(state: EnvState, index: jax.Array, params: EnvParams) -> jax.Array:
    """[M] bool, candidates that are taken if they are in the mask: those of the rule whose
    macro-action is under way, or that this index begins.
    """
    rules = rules_of(state.candidates, params.table)
    begins = (index // params.slots == MACRO) & (index < params.no_op)
    own = rules == rules[index % params.slots]
    macro_actions = jnp.where(state.macro.left > 0, rules == state.macro.rule, begins & own)
    return macro_actions & state.candidates.valid & ~state.done


def same_rule(candidates: CandidateSlots, table: RuleTable) -> jax.Array:
    """[M, M] bool, which candidates are of one rule; of empty slots none."""
    rule = rules_of(candidates, table)
    return (rule[:, None] == rule) & candidates.valid[:, None] & candidates.valid


def step(
    key: jax.Array, state: EnvState, action: Action, params: EnvParams
) -> tuple[EnvState, Outcome]:
    """The state after an action, and what it brought.

    Args:
      action: an empty slot, an index that `allowed` does not name, and a rewrite for which the
        bucket has no room, change nothing; within a macro-action the index does not count.
    """
    assert_one(state.graph)
    chex.assert_shape([action.index, action.mask], [(), (params.slots,)])
    begin, in_course, candidates = state.done, state.macro.left > 0, state.candidates
    asked = ~begin & ~in_course
    index = action.index
    no_op = asked & (index == params.no_op)
    kind, slot = index // params.slots, index % params.slots
    rules = rules_of(candidates, params.table)
    new = MacroAction(rules[slot], _matches(params.table, state.masks, rules[slot]))
    macro = either(asked, new, state.macro)
    does = jnp.where(asked, allowed(candidates, params.table)[index] & ~no_op, ~begin)
    in_macro = maskable(state, index, params) & does
    takes = in_macro & action.mask
    takes |= (jnp.arange(params.slots) == slot) & candidates.valid & does & asked & (kind == ONCE)
    most = min(params.at_once, params.slots)
    found, cheapest = jax.lax.top_k(jnp.where(takes, -candidates.seconds, -jnp.inf), most)
    takes = jnp.isfinite(found) & (jnp.arange(most) < macro.left)
    variant = jnp.where(takes, candidates.variant[cheapest], -1)
    place = candidates.root[cheapest], candidates.partner[cheapest]
    new = jax.tree.map(lambda v: v[cheapest], (candidates.nodes, candidates.args))
    made = rewritten(params, state.graph, state.owner, Instantiated(variant, *place, *new))
    masks = match.rematch(params.table, made.graph, state.masks, made.changed, rewrites=most)
    graph, masks, owner = either(begin, tuple(params.start[:3]), (made.graph, masks, made.owner))
    applied, n_left = jnp.any(made.ok), _matches(params.table, masks, macro.rule)
    passed = jnp.sum(in_macro & ~action.mask) + jnp.sum(made.ok)
    goes_on = jnp.any(in_macro) & (passed > 0) & (n_left > 0)
    macro = macro._replace(left=jnp.where(goes_on, jnp.maximum(macro.left - passed, 0), 0))
    seconds = seconds_of(graph, owner, params.start.counts)
    t = jnp.where(begin, 0, state.t + asked)
    truncated = ~begin & ~no_op & (t >= params.horizon) & (macro.left == 0)
    shown = jnp.where(macro.left > 0, match.trees_of_rule(params.table, macro.rule), ~jnp.uint32(0))
    after = EnvState(
        graph,
        masks,
        owner,
        _moves(key, graph, masks & shown, owner, params),
        macro,
        seconds,
        jnp.where(begin, seconds, jnp.minimum(state.best, seconds)),
        t,
        no_op | truncated,
    )
    reward = jnp.where(begin, 0.0, 100.0 * (state.seconds - seconds) / params.start.seconds)
    return after, Outcome(
        reward,
        no_op,
        truncated,
        ~begin,
        asked,
        applied,
        jnp.where(made.ok, variant, -1),
        place[0],
    )


def rules_of(candidates: CandidateSlots, table: RuleTable) -> jax.Array:
    """[M] int32, the rule of each candidate; -1 empty."""
    return jnp.where(candidates.valid, table.variant_rule[jnp.maximum(candidates.variant, 0)], -1)


def _matches(table: RuleTable, masks: jax.Array, rule: jax.Array) -> jax.Array:
    """How often a rule matches; of rules with two roots, the more frequent of these."""
    trees = masks & match.trees_of_rule(table, rule)
    first, second = (
        jnp.sum(jax.lax.population_count(trees & match.trees_of_root(table, which)))
        for which in (0, 1)
    )
    return jnp.maximum(first, second).astype(jnp.int32)


def either(first: jax.Array, one: Any, other: Any) -> Any:
    """One tree or the other."""
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), one, other)


class Rewritten(NamedTuple):
    """What candidates have made of a graph."""

    graph: TensorGraph  # priced
    owner: jax.Array  # [N] int32
    changed: jax.Array  # [N] bool
    ok: jax.Array  # [K] bool, which were applied


def rewritten(
    params: EnvParams,
    graph: TensorGraph,
    owner: jax.Array,
    candidates: Instantiated,
) -> Rewritten:
    """What candidates [K] of a priced graph make of it, one after the other, those that still match
    and are bound to what looks as it did.

    Args:
      candidates: those that there are first.
    """
    variant, table = candidates.variant, params.table
    seen = jax.vmap(look, in_axes=(None, None, 0))(table, graph, candidates).seen

    def one(i: jax.Array, carry: tuple[jax.Array, Rewritten]) -> tuple[jax.Array, Rewritten]:
        uses, (graph, owner, changed, ok) = carry
        candidate = jax.tree.map(lambda v: v[i], candidates)
        made = apply_instantiated(table, graph, uses, candidate, seen[i])
        new = made.changed & (graph.nodes.op == ops.HOLE)
        owner = jnp.where(new, owner[candidate.root], owner)
        after = Rewritten(made.graph, owner, changed | made.changed, ok.at[i].set(made.ok))
        return made.uses, after

    nothing = jnp.zeros(owner.shape, bool), jnp.zeros(len(variant), bool)
    start = passes.use_counts(graph), Rewritten(graph, owner, *nothing)
    # As many turns in all environments of a batch: else each turn would copy the graphs of all, to
    # leave those as they are that have no more.
    turns = largest_of_batch(jnp.sum(variant >= 0))
    made = jax.lax.fori_loop(0, turns, one, start)[1]
    return made._replace(graph=params.costs.repriced(made.graph, graph))


def seconds_of(graph: TensorGraph, owner: jax.Array, counts: jax.Array) -> jax.Array:
    """Predicted seconds of one run of the program that a priced union stands for."""
    live = graph.nodes.op != ops.HOLE
    return jnp.sum(jnp.where(live, graph.nodes.cost * counts[owner], 0.0))


def _moves(
    key: jax.Array, graph: TensorGraph, masks: jax.Array, owner: jax.Array, params: EnvParams
) -> CandidateSlots:
    # Whether pairs hold the price tells, too.
    found = match.sample(params.table, graph, masks, key, size=params.slots, checked=False)
    price = params.costs.price_of_new(graph)
    change = deltas(params.table, graph, found, price, keep=lambda new: (new.nodes, new.args))

    def of_those(made: jax.Array) -> jax.Array:
        ok = jnp.expand_dims(change.ok, range(1, made.ndim))
        return jnp.where(ok, made, jnp.zeros_like(made))

    # Where there is no candidate, what was made depends on what else is in the batch.
    nodes, args = jax.tree.map(of_those, change.kept)
    times = params.start.counts[owner[found.root]]
    variant = jnp.where(change.ok, found.variant, -1)
    seconds, gone = (jnp.where(change.ok, times * s, 0.0) for s in (change.seconds, change.gone))
    return CandidateSlots(variant, *found[1:3], seconds, gone, nodes, args, found.count)
