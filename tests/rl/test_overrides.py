"""Overrides: each one changes one decision of a policy; those that save something are kept."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl.test_env import OWN, RESET, chain, params_of
from xrl_jax.language.rule_parser import parse_rules
from xrl_jax.language.table import CompiledRules, compile_rules
from xrl_jax.rl.actions import Logits
from xrl_jax.rl.decode import Trail, begin, by_chance, follow
from xrl_jax.rl.env import MACRO, EnvParams, EnvState
from xrl_jax.rl.overrides import (
    ANYWHERE,
    Override,
    Overrides,
    OverrideSearch,
    RolloutOutcome,
    choices,
    overridden,
    packed,
)
from xrl_jax.runtime.engine_jit import engine_jit

NEVER = -1e4
A, B, C, D = (Override(rule, 7, NEVER) for rule in range(4))


def rules() -> CompiledRules:
    return compile_rules(parse_rules(OWN)[0])


def number(name: str) -> int:
    return [rule.name for rule in rules().rules].index(name)


def params() -> EnvParams:
    """Return the parameters of a chain in which neg-neg and tanh-odd match at several nodes."""
    return params_of(chain(), rules(), horizon=8, slots=8)


def at(state: EnvState, name: str) -> list[int]:
    """Return the slots of a rule's candidates."""
    variant = np.asarray(state.candidates.variant)
    of_rule = np.asarray(rules().table.variant_rule)[np.maximum(variant, 0)] == number(name)
    return np.flatnonzero(of_rule & (variant >= 0)).tolist()


def with_overrides(*overrides: Override) -> tuple[Logits, EnvState]:
    """Return logits of 0 with these overrides added, and the first state."""
    given = params()
    state = RESET(jax.random.key(0), given)
    said = Logits(jnp.zeros(2 * given.slots + 1), jnp.zeros(given.slots))
    return overridden(said, state, given, packed(overrides)), state


def test_an_override_may_bar_a_rule_everywhere() -> None:
    logits, state = with_overrides(Override(number("neg-neg"), ANYWHERE, NEVER))
    own, slots = at(state, "neg-neg"), params().slots
    assert len(own) >= 2
    barred = np.flatnonzero(logits.index == NEVER).tolist()
    assert barred == [*own, *(MACRO * slots + slot for slot in own)]
    assert np.flatnonzero(logits.mask == NEVER).tolist() == own


def test_a_rule_barred_at_one_root_is_still_allowed_as_a_macro_action() -> None:
    _, state = with_overrides()
    slot = at(state, "neg-neg")[0]
    logits, _ = with_overrides(Override(number("neg-neg"), int(state.candidates.root[slot]), NEVER))
    assert np.flatnonzero(logits.index == NEVER).tolist() == [slot]
    assert np.flatnonzero(logits.mask == NEVER).tolist() == [slot]


def test_without_overrides_nothing_changes() -> None:
    logits, _ = with_overrides()
    assert not logits.index.any() and not logits.mask.any()


@engine_jit
def followed(given: EnvParams, overrides: Overrides) -> Trail:
    """Return the trail of a rollout that always takes the first candidate, given overrides."""

    def choose(state: EnvState, params: EnvParams) -> Logits:
        return overridden(by_chance(state, params), state, params, overrides)

    return follow(choose, given, begin(given), jax.random.key(0), jnp.float32(0.0), 8)[1]


def fired(trail: Trail) -> list[tuple[int, int]]:
    """Return the rules applied and their roots, in order."""
    variant, root = np.asarray(trail.variant), np.asarray(trail.root)
    rule = np.asarray(rules().table.variant_rule)[variant[variant >= 0]]
    return [(int(a), int(b)) for a, b in zip(rule, root[variant >= 0], strict=True)]


def test_choices_lists_the_overrides_of_a_rollout() -> None:
    """Either a rule that fired is barred, or a match of the start that did not fire comes first."""
    given, none = params(), jnp.zeros((1, 1), jnp.int32)
    state = RESET(jax.random.key(0), given)
    first, *others = at(state, "neg-neg")
    root_of = np.asarray(state.candidates.root)
    variant, root = (
        f[first].reshape(1, 1) for f in (state.candidates.variant, state.candidates.root)
    )
    made = Trail(variant, root, none, none, none, none, none[0], none[0])
    twice, odd = number("neg-neg"), number("tanh-odd")
    assert set(choices(given.start, rules(), made)) == {
        Override(twice, ANYWHERE, NEVER),
        Override(twice, int(root_of[first]), NEVER),
        *(Override(twice, int(root_of[slot]), -NEVER) for slot in others),
        *(Override(odd, int(root_of[slot]), -NEVER) for slot in at(state, "tanh-odd")),
    }


def test_barred_rules_do_not_fire_and_preferred_ones_fire_first() -> None:
    given = params()
    rule, root = fired(followed(given, packed([])))[0]
    barred = fired(followed(given, packed([Override(rule, ANYWHERE, NEVER)])))
    assert barred and rule not in {r for r, _ in barred}
    elsewhere = fired(followed(given, packed([Override(rule, root, NEVER)])))
    assert elsewhere[0] != (rule, root)
    wanted = next(made for made in elsewhere if made[0] != rule)
    assert fired(followed(given, packed([Override(*wanted, -NEVER)])))[0] == wanted


def outcomes(seconds: float, rewrites: int, *others: Override) -> RolloutOutcome:
    """Return the outcome of a rollout that ended in its cheapest state.

    Args:
      others: overrides that change one of its decisions; all four by default.
    """
    return RolloutOutcome(seconds, rewrites, seconds, lambda: others or (A, B, C, D))


def tried(
    seconds: Callable[[frozenset[Override]], float], *, rounds: int, n: int = 4
) -> OverrideSearch:
    """Return the search after so many rounds of `n` rollouts, all of which offer every override."""
    overrides = OverrideSearch(np.random.default_rng(0))
    for _ in range(rounds):
        plan = overrides.plan(n)
        overrides.learn(plan, [outcomes(seconds(frozenset(p)), 10 - len(p)) for p in plan])
    return overrides


def test_the_first_rollout_has_no_overrides() -> None:
    assert OverrideSearch(np.random.default_rng(0)).plan(4) == [()]


def test_every_override_is_tried_on_its_own() -> None:
    overrides = OverrideSearch(np.random.default_rng(0))
    first = overrides.plan(4)
    assert first == [()]
    overrides.learn(first, [outcomes(1.0, 0)])
    one = overrides.plan(4)
    assert one[0] == () and len(one) == 4
    overrides.learn(one, [outcomes(1.0, 0) for _ in one])
    other = overrides.plan(4)
    assert {e for plan in (one, other) for (e,) in plan[1:]} == {A, B, C, D}


def test_overrides_that_save_time_are_combined() -> None:
    saved = {A: 0.1, B: 0.2, C: -0.1, D: -0.3}
    overrides = tried(lambda held: 2.0 - sum(saved[e] for e in held), rounds=8)
    assert set(overrides.kept) == {A, B}


def test_of_conflicting_overrides_the_best_is_kept() -> None:
    def seconds(held: frozenset[Override]) -> float:
        return {frozenset(): 2.0, frozenset([A]): 1.8, frozenset([B]): 1.9}.get(held, 3.0)

    overrides = OverrideSearch(np.random.default_rng(0))
    for _ in range(3):
        plan = overrides.plan(8)
        overrides.learn(plan, [outcomes(seconds(frozenset(p)), 0, A, B) for p in plan])
    assert overrides.kept == (A,)


def test_the_override_search_restarts_with_another_first_override() -> None:
    """A saves the most on its own; B saves less, but together with C the most of all."""

    def seconds(held: frozenset[Override]) -> float:
        by_held = {frozenset(): 2.0, frozenset([A]): 1.8, frozenset([B]): 1.9}
        return by_held.get(held, 1.0 if held == {B, C} else 3.0)

    overrides, least = OverrideSearch(np.random.default_rng(0)), []
    while overrides.pending:
        plan = overrides.plan(8)
        came = [outcomes(seconds(frozenset(p)), 0, A, B, C) for p in plan]
        least.append(min(t.seconds for t in came))
        overrides.learn(plan, came)
    assert overrides.firsts[:2] == (A, B) and min(least) == 1.0


@pytest.mark.parametrize(("rewrites", "kept"), [(9, (A,)), (10, ()), (11, ())])
def test_fewer_rewrites_for_the_same_time_are_better(
    rewrites: int, kept: tuple[Override, ...]
) -> None:
    overrides = OverrideSearch(np.random.default_rng(0), restarts_left=0)
    for _ in range(3):
        plan = overrides.plan(4)
        overrides.learn(plan, [outcomes(1.0, rewrites if p else 10, A) for p in plan])
    assert overrides.kept == kept


@pytest.mark.parametrize(("end", "kept"), [(1.6, {A, B, C}), (math.inf, set())])
def test_losses_that_are_never_repaid_are_barred_one_by_one(
    end: float, kept: set[Override]
) -> None:
    """A policy applies a rule at four nodes, each time at a loss, and only one loss is repaid: the
    rollout ends below its start only if the three others are barred. The end of a rollout that
    rewrites nothing (infinite) says nothing about overrides.
    """

    def outcome_of(held: frozenset[Override]) -> RolloutOutcome:
        ends = {frozenset(): end, frozenset([A, B, C]): 0.7}.get(held, 1.6 - 0.2 * len(held))
        return RolloutOutcome(min(ends, 1.0), int(ends < 1.0), ends, lambda: (A, B, C))

    overrides = OverrideSearch(np.random.default_rng(0), restarts_left=0)
    for _ in range(4):
        plan = overrides.plan(8)
        overrides.learn(plan, [outcome_of(frozenset(p)) for p in plan])
    assert set(overrides.kept) == kept
