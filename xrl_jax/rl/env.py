"""Rewriting as an environment: a state is a program's graph, an action is a candidate or No-Op.

All functions are pure and unbatched. `jax.vmap` over keys, states, actions and `Start`s runs many
environments, also of different networks if they share a bucket; all have the same rules and costs
(`batch_axes`).

    params = EnvParams(rules.table, costs, start_of(program, rules, costs))
    state = reset(key, params)
    state, outcome = step(key, state, action, params)

A candidate can be taken once, or as a *macro-action*, which applies its rule to all candidates in
the action's mask, those that save most first, up to `at_once` in each step. In the steps of a
macro-action after its first, the index is ignored (`Outcome.index_counts`), and only candidates of
its rule are listed. It ends when as many candidates were taken or left out by the mask as the rule
had matches when it began, so that a rule that creates matches of its own does not run forever.

An episode ends when No-Op is chosen (it terminates) or when the number of actions reaches the
horizon (it is truncated). The state in which it ended is kept, so that its value can be computed.
The next step, whatever the action, begins the next episode and does not count (`Outcome.counts`).

Source: X-RLflow (He, Parker, Yoneki, MLSys 2023): states, actions, No-Op and the reward
r_t = 100 (RT_{t-1} - RT_t) / RT_0, here of predicted times. docs/policies.md lists the differences.
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
from xrl_jax.engine.apply import Instantiated, apply_instantiated, match_in
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
AT_ONCE = 8  # rewrites in a step, at most
ONCE, MACRO = range(2)  # kinds of action on a candidate
KINDS = 2
LEAST_GAIN = 1e-6  # least share of the first state's seconds that counts as a gain


class Start(NamedTuple):
    """The state in which the episodes of one program begin."""

    graph: TensorGraph  # priced
    masks: jax.Array  # [N, W], which rules match at each node
    owner: jax.Array  # [N] int32, which graph of the program a node belongs to
    counts: jax.Array  # [N] float32, how often each graph of the program runs; 0 beyond the last
    seconds: jax.Array  # float32, predicted for one run of the program


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EnvParams:
    """The parameters of an environment."""

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
    """An action of the agent."""

    index: jax.Array  # int32: `kind * M + slot`, or `EnvParams.no_op`
    mask: jax.Array  # [M] bool, which candidates a macro-action of their rule takes


class CandidateSlots(NamedTuple):
    """The candidates of a state, in slots that may be empty."""

    variant: jax.Array  # [M] int32; -1 empty
    root: jax.Array  # [M] int32
    partner: jax.Array  # [M] int32
    seconds: jax.Array  # [M] float32, which it would add to one run of the program; 0 where empty
    gone: jax.Array  # [M] float32, seconds of the nodes it would remove
    nodes: Nodes  # [M, Q, ...], which it would make; zeros where empty
    args: jax.Array  # [M, Q, A] int32, their arguments as binding codes; zeros where empty
    n: jax.Array  # how many candidates the state has; more than M if only some are listed

    @property
    def valid(self) -> jax.Array:
        return self.variant >= 0


class MacroAction(NamedTuple):
    """A rule that is being applied to all candidates in the mask."""

    rule: jax.Array  # int32, its index
    left: jax.Array  # int32, candidates it may still take or leave out; 0: none is under way


class EnvState(NamedTuple):
    """The state of an episode."""

    graph: TensorGraph  # priced
    masks: jax.Array  # [N, W]
    owner: jax.Array  # [N] int32
    candidates: CandidateSlots
    macro: MacroAction
    seconds: jax.Array  # float32, predicted for one run of the program
    best: jax.Array  # float32, the least `seconds` of the episode so far
    t: jax.Array  # int32, actions taken
    done: jax.Array  # bool, the episode has ended in this state


class Outcome(NamedTuple):
    """The outcome of a step."""

    reward: jax.Array  # float32, percent of the first state's seconds that were saved
    terminated: jax.Array  # bool, No-Op was chosen
    truncated: jax.Array  # bool, the horizon was reached
    counts: jax.Array  # bool; false for the step that begins an episode
    index_counts: jax.Array  # bool; false within a macro-action, where only the mask counts
    applied: jax.Array  # bool, the graph was rewritten
    variant: jax.Array  # [K] int32, the rewrites made; -1 for none
    root: jax.Array  # [K] int32


def start_of(
    program: Program, rules: CompiledRules, costs: CostTable, *, bucket: int | None = None
) -> Start:
    """Return the start of a program's episodes, with its graphs united (`transform.union`).

    Args:
      bucket: least number of node slots; by default `united_bucket`.

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
    """Return the parameters of environments [B] with another cost table."""
    start = jax.vmap(_priced, in_axes=(None, 0))(costs, params.start)
    return dataclasses.replace(params, costs=costs, start=start)


def batch_axes(params: EnvParams) -> Any:
    """Return the `in_axes` of `params` for a batch of different starts."""
    return dataclasses.replace(params, table=None, costs=None, start=0, horizon=None)


def batch_specs(params: EnvParams, each: Any, same: Any) -> Any:
    """Return a tree like `params` for a batch spread over devices: `each` for the start, of which
    every environment has its own, and `same` for what they share.
    """
    return dataclasses.replace(params, table=same, costs=same, start=each, horizon=same)


def reset(key: jax.Array, params: EnvParams) -> EnvState:
    """Return the first state of an episode."""
    graph, masks, owner, _, seconds = params.start
    assert_one(graph, masks, owner)
    return EnvState(
        graph,
        masks,
        owner,
        _candidates(key, graph, masks, owner, params),
        MacroAction(jnp.int32(-1), jnp.int32(0)),
        seconds,
        seconds,
        jnp.int32(0),
        jnp.bool_(False),
    )


def ended_state(params: EnvParams) -> EnvState:
    """Return an ended state before the first episode, so that the next step begins one. Unlike
    `reset` it computes no candidates, so there is nothing to compile.
    """
    graph, masks, owner, _, seconds = params.start
    none = jnp.zeros(params.slots, jnp.int32)
    nothing = none.astype(jnp.float32)
    like = jax.tree.map(lambda f: jnp.zeros((params.slots, Q, *f.shape[1:]), f.dtype), graph.nodes)
    args = jnp.zeros((params.slots, Q, ops.MAX_ARGS), jnp.int32)
    candidates = CandidateSlots(none - 1, none, none, nothing, nothing, like, args, jnp.int32(0))
    macro = MacroAction(jnp.int32(-1), jnp.int32(0))
    rest = seconds, seconds, jnp.int32(0), jnp.bool_(True)
    return EnvState(graph, masks, owner, candidates, macro, *rest)


def allowed(candidates: CandidateSlots, table: RuleTable) -> jax.Array:
    """Return [2 M + 1] bool, which indices have an effect: every candidate taken once; a rule's
    macro-action, by its first candidate only and if it has several; and No-Op.
    """
    same = same_rule(candidates, table)
    first = candidates.valid & ~jnp.any(jnp.tril(same, -1), axis=1)
    several = first & (jnp.sum(same, axis=1) > 1)
    return jnp.concatenate([candidates.valid, several, jnp.ones(1, bool)])


def maskable(state: EnvState, index: jax.Array, params: EnvParams) -> jax.Array:
    """Return [M] bool, which candidates are taken if they are in the mask: those of the rule whose
    macro-action is under way or is begun by this index.
    """
    rules = rules_of(state.candidates, params.table)
    begins = (index // params.slots == MACRO) & (index < params.no_op)
    own = rules == rules[index % params.slots]
    macro_actions = jnp.where(state.macro.left > 0, rules == state.macro.rule, begins & own)
    return macro_actions & state.candidates.valid & ~state.done


def same_rule(candidates: CandidateSlots, table: RuleTable) -> jax.Array:
    """Return [M, M] bool, which pairs of candidates have the same rule; false for empty slots."""
    rule = rules_of(candidates, table)
    return (rule[:, None] == rule) & candidates.valid[:, None] & candidates.valid


def step(
    key: jax.Array, state: EnvState, action: Action, params: EnvParams
) -> tuple[EnvState, Outcome]:
    """Apply an action; return the next state and the outcome of the step.

    Args:
      action: changes nothing if its slot is empty, if `allowed` is false for its index, or if the
        bucket has no room for the rewrite; within a macro-action the index is ignored.
    """
    assert_one(state.graph)
    chex.assert_shape([action.index, action.mask], [(), (params.slots,)])
    begin, in_course, candidates = state.done, state.macro.left > 0, state.candidates
    index_counts = ~begin & ~in_course
    index = action.index
    no_op = index_counts & (index == params.no_op)
    kind, slot = index // params.slots, index % params.slots
    rules = rules_of(candidates, params.table)
    new = MacroAction(rules[slot], _matches(params.table, state.masks, rules[slot]))
    macro = select(index_counts, new, state.macro)
    has_effect = jnp.where(index_counts, allowed(candidates, params.table)[index] & ~no_op, ~begin)
    in_macro = maskable(state, index, params) & has_effect
    takes = in_macro & action.mask
    once = has_effect & index_counts & (kind == ONCE)
    takes |= (jnp.arange(params.slots) == slot) & candidates.valid & once
    most = min(params.at_once, params.slots)
    found, cheapest = jax.lax.top_k(jnp.where(takes, -candidates.seconds, -jnp.inf), most)
    takes = jnp.isfinite(found) & (jnp.arange(most) < macro.left)
    variant = jnp.where(takes, candidates.variant[cheapest], -1)
    place = candidates.root[cheapest], candidates.partner[cheapest]
    new = jax.tree.map(lambda v: v[cheapest], (candidates.nodes, candidates.args))
    made = rewritten(params, state.graph, state.owner, Instantiated(variant, *place, *new))
    masks = match.rematch(params.table, made.graph, state.masks, made.changed, rewrites=most)
    graph, masks, owner = select(begin, tuple(params.start[:3]), (made.graph, masks, made.owner))
    applied, n_left = jnp.any(made.ok), _matches(params.table, masks, macro.rule)
    n_handled = jnp.sum(in_macro & ~action.mask) + jnp.sum(made.ok)
    continues = jnp.any(in_macro) & (n_handled > 0) & (n_left > 0)
    macro = macro._replace(left=jnp.where(continues, jnp.maximum(macro.left - n_handled, 0), 0))
    seconds = seconds_of(graph, owner, params.start.counts)
    t = jnp.where(begin, 0, state.t + index_counts)
    truncated = ~begin & ~no_op & (t >= params.horizon) & (macro.left == 0)
    trees = jnp.where(macro.left > 0, match.trees_of_rule(params.table, macro.rule), ~jnp.uint32(0))
    after = EnvState(
        graph,
        masks,
        owner,
        _candidates(key, graph, masks & trees, owner, params),
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
        index_counts,
        applied,
        jnp.where(made.ok, variant, -1),
        place[0],
    )


def rules_of(candidates: CandidateSlots, table: RuleTable) -> jax.Array:
    """Return [M] int32, the rule of each candidate; -1 where empty."""
    return jnp.where(candidates.valid, table.variant_rule[jnp.maximum(candidates.variant, 0)], -1)


def _matches(table: RuleTable, masks: jax.Array, rule: jax.Array) -> jax.Array:
    """Return how often a rule matches; of two roots, the one with more matches is counted."""
    trees = masks & match.trees_of_rule(table, rule)
    first, second = (
        jnp.sum(jax.lax.population_count(trees & match.trees_of_root(table, which)))
        for which in (0, 1)
    )
    return jnp.maximum(first, second).astype(jnp.int32)


def select(condition: jax.Array, if_true: Any, if_false: Any) -> Any:
    """Return the tree `if_true` if the condition holds, else `if_false`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


class Rewritten(NamedTuple):
    """A graph to which candidates were applied."""

    graph: TensorGraph  # priced
    owner: jax.Array  # [N] int32
    changed: jax.Array  # [N] bool
    ok: jax.Array  # [K] bool, which candidates were applied


def rewritten(
    params: EnvParams,
    graph: TensorGraph,
    owner: jax.Array,
    candidates: Instantiated,
) -> Rewritten:
    """Apply candidates [K] of a priced graph to it, one after the other. A candidate is skipped if
    it does not match any more, or if features of the nodes it is bound to have changed.

    Args:
      candidates: the valid ones come first.
    """
    variant, table = candidates.variant, params.table
    features = jax.vmap(match_in, in_axes=(None, None, 0))(table, graph, candidates).features

    def one(i: jax.Array, carry: tuple[jax.Array, Rewritten]) -> tuple[jax.Array, Rewritten]:
        uses, (graph, owner, changed, ok) = carry
        candidate = jax.tree.map(lambda v: v[i], candidates)
        made = apply_instantiated(table, graph, uses, candidate, features[i])
        new = made.changed & (graph.nodes.op == ops.HOLE)
        owner = jnp.where(new, owner[candidate.root], owner)
        after = Rewritten(made.graph, owner, changed | made.changed, ok.at[i].set(made.ok))
        return made.uses, after

    nothing = jnp.zeros(owner.shape, bool), jnp.zeros(len(variant), bool)
    start = passes.use_counts(graph), Rewritten(graph, owner, *nothing)
    # The same number of iterations in all environments of a batch: otherwise each iteration would
    # copy the graphs of all, to leave those unchanged whose loop has ended.
    n_iterations = largest_of_batch(jnp.sum(variant >= 0))
    made = jax.lax.fori_loop(0, n_iterations, one, start)[1]
    return made._replace(graph=params.costs.repriced(made.graph, graph))


def seconds_of(graph: TensorGraph, owner: jax.Array, counts: jax.Array) -> jax.Array:
    """Return the predicted seconds of one run of the program whose priced union this is."""
    live = graph.nodes.op != ops.HOLE
    return jnp.sum(jnp.where(live, graph.nodes.cost * counts[owner], 0.0))


def _candidates(
    key: jax.Array, graph: TensorGraph, masks: jax.Array, owner: jax.Array, params: EnvParams
) -> CandidateSlots:
    # Not checked here, because `deltas` also finds out whether pairs match.
    found = match.sample(params.table, graph, masks, key, size=params.slots, checked=False)
    price = params.costs.price_of_new(graph)
    change = deltas(params.table, graph, found, price, keep=lambda new: (new.nodes, new.args))

    def zero_where_invalid(made: jax.Array) -> jax.Array:
        ok = jnp.expand_dims(change.ok, range(1, made.ndim))
        return jnp.where(ok, made, jnp.zeros_like(made))

    # Zeros where there is no candidate: what was made there depends on the rest of the batch.
    nodes, args = jax.tree.map(zero_where_invalid, change.kept)
    times = params.start.counts[owner[found.root]]
    variant = jnp.where(change.ok, found.variant, -1)
    seconds, gone = (jnp.where(change.ok, times * s, 0.0) for s in (change.seconds, change.gone))
    return CandidateSlots(variant, *found[1:3], seconds, gone, nodes, args, found.count)
