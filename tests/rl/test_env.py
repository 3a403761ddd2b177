"""The environment: rewards and episode ends on small graphs, then the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import models
from tests.rl.conformance import ALLOWED, RESET, STEP, batch_is_each_by_itself, conforms
from xrl_jax.cost.roofline import CORRECTED, cost_table
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.language.rule_files import standard_rules
from xrl_jax.language.rule_parser import parse_rules
from xrl_jax.language.table import CompiledRules, compile_rules
from xrl_jax.program.program import Program
from xrl_jax.rl.env import (
    MACRO,
    Action,
    EnvParams,
    EnvState,
    Outcome,
    batch_axes,
    ended_state,
    maskable,
    start_of,
    with_costs,
)
from xrl_jax.runtime.engine_jit import engine_jit

OWN = """
(rule neg-neg (source "test") (lhs (neg (neg ?x))) (rhs ?x))
(rule tanh-odd (source "test") (lhs (tanh ?x)) (rhs (neg (tanh (neg ?x)))))
"""
X = jnp.linspace(-1.0, 1.0, 1 << 16).reshape(256, 256)


@cache
def own() -> CompiledRules:
    return compile_rules(parse_rules(OWN)[0])


def params_of(program: Program, rules: CompiledRules, **given: int) -> EnvParams:
    costs = cost_table({})
    return EnvParams(rules.table, costs, start_of(program, rules, costs), **given)


def twice(x: jax.Array) -> jax.Array:
    """Return the negative of the negative."""
    return jnp.negative(jnp.negative(x))


def negated() -> Program:
    return from_jax(lambda x: twice(jnp.tanh(x)), X)


def taken(
    seed: int,
    state: EnvState,
    index: int,
    params: EnvParams,
    mask: Sequence[int] | None = None,
) -> tuple[EnvState, Outcome]:
    """Take an action; return the next state and the outcome. By default every candidate is in the
    mask.
    """
    slots = np.arange(params.slots)
    inside = jnp.asarray(np.isin(slots, slots if mask is None else mask))
    return STEP(jax.random.key(seed), state, Action(jnp.int32(index), inside), params)


def chain() -> Program:
    """Return a chain of three tanh operators, each applied to a double negation."""
    return from_jax(lambda x: jnp.tanh(twice(jnp.tanh(twice(jnp.tanh(twice(x)))))), X)


def slots_of(state, rules: CompiledRules) -> dict[str, int]:
    """Return the slot of each rule's candidate."""
    variant = np.asarray(state.candidates.variant)
    index = np.asarray(rules.table.variant_rule)
    return {rules.rules[index[e]].name: i for i, e in enumerate(variant) if e >= 0}


def test_the_reward_of_a_rewrite_is_the_share_of_time_it_saves() -> None:
    params = params_of(negated(), own(), slots=8)
    state = RESET(jax.random.key(0), params)
    slots = slots_of(state, own())
    assert sorted(slots) == ["neg-neg", "tanh-odd"]
    after, outcome = taken(1, state, slots["neg-neg"], params)
    saved = 100 * (1 - float(after.seconds) / float(state.seconds))
    assert saved > 1.0
    assert float(outcome.reward) == pytest.approx(saved, rel=1e-4)
    promised = -100 * float(state.candidates.seconds[slots["neg-neg"]]) / float(state.seconds)
    assert promised == pytest.approx(saved, rel=1e-4)
    assert outcome.applied and not after.done


def test_a_loss_has_a_negative_reward_and_undoing_it_a_positive_one() -> None:
    params = params_of(negated(), own(), slots=8)
    state = RESET(jax.random.key(0), params)
    worse, first = taken(1, state, slots_of(state, own())["tanh-odd"], params)
    assert float(first.reward) < 0
    after, second = taken(2, worse, slots_of(worse, own())["neg-neg"], params)
    assert float(second.reward) > 0 and int(after.t) == 2


def test_the_least_time_of_the_episode_is_kept() -> None:
    params = params_of(negated(), own(), slots=8)
    state = RESET(jax.random.key(0), params)
    worse, _ = taken(1, state, slots_of(state, own())["tanh-odd"], params)
    assert float(worse.best) == float(state.seconds) < float(worse.seconds)
    better, _ = taken(2, state, slots_of(state, own())["neg-neg"], params)
    assert float(better.best) == float(better.seconds) < float(state.seconds)
    ended, _ = taken(3, better, params.no_op, params)
    again, _ = taken(4, ended, 0, params)
    assert float(again.best) == float(state.seconds)


def test_no_op_terminates_and_the_next_step_begins_an_episode() -> None:
    params = params_of(negated(), own(), slots=8)
    state = RESET(jax.random.key(0), params)
    state, _ = taken(1, state, slots_of(state, own())["neg-neg"], params)
    ended, outcome = taken(2, state, params.no_op, params)
    assert outcome.terminated and not outcome.truncated and ended.done
    assert float(outcome.reward) == 0.0
    again, outcome = taken(3, ended, 0, params)
    assert not outcome.counts and int(again.t) == 0 and not again.done
    assert float(again.seconds) == float(params.start.graph.nodes.cost.sum())


def test_the_step_after_the_end_of_an_episode_equals_a_reset() -> None:
    params = params_of(negated(), own(), slots=8)
    begun, outcome = taken(5, ended_state(params), params.no_op, params)
    assert not outcome.counts and not outcome.index_counts
    jax.tree.map(np.testing.assert_array_equal, begun, RESET(jax.random.key(5), params))


def test_the_horizon_truncates() -> None:
    params = params_of(negated(), own(), slots=8, horizon=1)
    state = RESET(jax.random.key(0), params)
    state, outcome = taken(1, state, slots_of(state, own())["tanh-odd"], params)
    assert outcome.truncated and not outcome.terminated and state.done


def test_an_empty_slot_changes_nothing() -> None:
    params = params_of(negated(), own(), slots=8)
    state = RESET(jax.random.key(0), params)
    empty = int(np.flatnonzero(~np.asarray(state.candidates.valid))[0])
    after, outcome = taken(1, state, empty, params)
    assert not outcome.applied and float(outcome.reward) == 0.0
    jax.tree.map(np.testing.assert_array_equal, after.graph, state.graph)


def in_macro(kind: int, rule: str) -> tuple[EnvState, list[Outcome]]:
    """Return the state in which a macro-action of the chain ends, and the outcomes of its steps."""
    params = params_of(chain(), own(), slots=8, at_once=1)
    state, outcomes = RESET(jax.random.key(0), params), []
    can = np.asarray(ALLOWED(state.candidates, params.table))[8 * kind : 8 * (kind + 1)]
    at = np.asarray(own().table.variant_rule)[np.asarray(state.candidates.variant)]
    slot = next(int(i) for i in np.flatnonzero(can) if own().rules[at[i]].name == rule)
    action = 8 * kind + slot
    while not outcomes or int(state.macro.left):
        state, outcome = taken(len(outcomes), state, action, params)
        outcomes.append(outcome)
        action = params.no_op  # within a macro-action the index is ignored
    return state, outcomes


def test_a_macro_action_applies_a_rule_everywhere_in_one_action() -> None:
    state, outcomes = in_macro(MACRO, "neg-neg")
    assert [bool(o.index_counts) for o in outcomes] == [True, False, False]
    assert all(o.applied and float(o.reward) > 0 for o in outcomes)
    assert int(state.t) == 1 and not state.done
    assert "neg-neg" not in slots_of(state, own())


def test_a_macro_action_may_make_several_rewrites_in_a_step() -> None:
    params = params_of(chain(), own(), slots=8)
    state = RESET(jax.random.key(0), params)
    first = slots_of(state, own())["neg-neg"]
    same = np.flatnonzero(
        np.asarray(state.candidates.variant) == int(state.candidates.variant[first])
    )
    state, outcome = taken(0, state, 8 * MACRO + int(same[0]), params)
    assert (np.asarray(outcome.variant) >= 0).sum() == 3 and int(state.macro.left) == 0
    assert "neg-neg" not in slots_of(state, own())


def negatives_of(state: EnvState) -> list[int]:
    """Return the slots of double negations."""
    at = np.asarray(own().table.variant_rule)[np.asarray(state.candidates.variant)]
    return [int(i) for i in np.flatnonzero((at == 0) & np.asarray(state.candidates.valid))]


def test_a_macro_action_applies_only_the_candidates_in_the_mask() -> None:
    """The mask has two of the three double negations, and candidates of another rule."""
    params = params_of(chain(), own(), slots=8)
    state = RESET(jax.random.key(0), params)
    first, *others = negatives_of(state)
    tangents = {*map(int, np.flatnonzero(state.candidates.valid))} - {first, *others}
    after, outcome = taken(0, state, 8 * MACRO + first, params, [*others, *tangents])
    roots = np.asarray(outcome.root)[np.asarray(outcome.variant) >= 0]
    assert sorted(roots) == sorted(np.asarray(state.candidates.root)[others])
    assert int(after.macro.left) == 0 and len(negatives_of(after)) == 1


def test_candidates_outside_the_mask_count_toward_a_macro_actions_length() -> None:
    """Of three double negations one is taken and one left out, so one more may be taken."""
    params = params_of(chain(), own(), slots=8, at_once=1)
    state = RESET(jax.random.key(0), params)
    first, second, third = negatives_of(state)
    state, outcome = taken(0, state, 8 * MACRO + first, params, [second, third])
    assert outcome.applied and int(state.macro.left) == 1
    shown = np.flatnonzero(state.candidates.valid)
    assert list(shown) == negatives_of(state) and len(shown) == 2
    state, outcome = taken(1, state, params.no_op, params, [])
    assert not outcome.index_counts and not outcome.applied and int(state.macro.left) == 0


def test_a_macro_action_with_an_empty_mask_changes_nothing() -> None:
    params = params_of(chain(), own(), slots=8)
    state = RESET(jax.random.key(0), params)
    after, outcome = taken(0, state, 8 * MACRO + negatives_of(state)[0], params, [])
    assert not outcome.applied and int(after.t) == 1 and int(after.macro.left) == 0
    jax.tree.map(np.testing.assert_array_equal, after.graph, state.graph)


def test_the_mask_applies_to_macro_actions_only() -> None:
    params = params_of(chain(), own(), slots=8, at_once=1)
    state = RESET(jax.random.key(0), params)
    first, *_ = negatives = negatives_of(state)
    counts = [np.flatnonzero(maskable(state, jnp.int32(i), params)) for i in (first, 8 + first, 16)]
    assert [list(c) for c in counts] == [[], negatives, []]
    state, _ = taken(0, state, 8 + first, params)  # two are left
    within = maskable(state, jnp.int32(params.no_op), params)
    assert list(np.flatnonzero(within)) == negatives_of(state)


def test_a_rule_that_matches_its_own_result_is_applied_once_per_initial_match() -> None:
    state, outcomes = in_macro(MACRO, "tanh-odd")  # each application creates another tanh
    assert len(outcomes) == 3 and "tanh-odd" in slots_of(state, own())


def test_the_last_step_of_a_macro_action_shows_all_candidates_again() -> None:
    state, _ = in_macro(MACRO, "neg-neg")
    assert list(slots_of(state, own())) == ["tanh-odd"] and int(state.candidates.n) == 3


def test_each_rule_with_several_candidates_has_one_macro_action() -> None:
    params = params_of(chain(), own(), slots=8)
    state = RESET(jax.random.key(0), params)
    once, macro_actions, no_op = np.split(
        np.asarray(ALLOWED(state.candidates, params.table)), [8, 16]
    )
    assert (once.sum(), macro_actions.sum(), no_op.sum()) == (6, 2, 1)
    alone = RESET(jax.random.key(0), params_of(negated(), own(), slots=8))
    assert ALLOWED(alone.candidates, params.table).sum() == 3


def test_the_horizon_waits_for_the_end_of_a_macro_action() -> None:
    params = params_of(chain(), own(), slots=8, horizon=1, at_once=1)
    state = RESET(jax.random.key(0), params)
    first = int(np.flatnonzero(ALLOWED(state.candidates, params.table)[8:16])[0])
    ends = []
    for i in range(3):
        state, outcome = taken(i, state, 8 + first, params)
        ends.append(bool(outcome.truncated))
    assert ends == [False, False, True] and state.done


def test_savings_in_a_body_count_as_often_as_it_runs() -> None:
    def fn(x):
        return jax.lax.scan(lambda c, _: (twice(jnp.tanh(c)), None), x, None, length=10)[0]

    params = params_of(from_jax(fn, X), own(), slots=8)
    state = RESET(jax.random.key(0), params)
    once = RESET(jax.random.key(0), params_of(negated(), own(), slots=8))
    ten, one = (float(s.candidates.seconds[slots_of(s, own())["neg-neg"]]) for s in (state, once))
    assert ten == pytest.approx(10 * one, rel=1e-4)


NETWORKS = {
    "bert": dict(layers=2, width=8, heads=2, vocabulary=10, tokens=4),
    "squeezenet": dict(image_size=32, width=0.1, classes=10),
}


@cache
def library() -> CompiledRules:
    return compile_rules(standard_rules())


def test_the_environment_passes_the_conformance_suite() -> None:
    params = params_of(chain(), own(), slots=8, horizon=5)
    conforms(params, chain(), (X,), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_the_environment_passes_the_conformance_suite_on_networks(name: str) -> None:
    model = models.get(name, **NETWORKS[name])
    args = (model.weights, *model.inputs)
    program = from_jax(model.fn, *args, weights=(0,))
    costs = cost_table({})
    start = start_of(program, library(), costs, bucket=512)
    params = EnvParams(library().table, costs, start, horizon=12, slots=32)
    conforms(params, program, args, seed=0)


@pytest.mark.slow
def test_a_batch_of_programs_behaves_like_each_program_alone() -> None:
    costs = cost_table({})
    programs = [
        negated(),
        from_jax(lambda x: twice(x) @ x, X),
        from_jax(lambda x: jnp.tanh(twice(x)) + jnp.tanh(x), X),
    ]
    starts = [start_of(p, own(), costs) for p in programs]
    params = EnvParams(own().table, costs, starts[0], slots=8)
    batch_is_each_by_itself(params, starts, batch_axes(params))


def test_changing_the_costs_recomputes_the_starting_states() -> None:
    """The starts are those computed with the other costs: elementwise loops a hundred times as
    expensive.
    """
    first, program = cost_table({}), chain()
    dearer = replace(first, scale=first.scale.at[CORRECTED.index("elementwise")].mul(100.0))
    start = jax.tree.map(lambda v: v[None], start_of(program, own(), first))
    found = engine_jit(with_costs)(EnvParams(own().table, first, start), dearer)
    expected = start_of(program, own(), dearer)
    jax.tree.map(np.testing.assert_array_equal, found.costs, dearer)
    assert expected.seconds > 10 * start.seconds[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, rtol=1e-6), found.start, expected)
