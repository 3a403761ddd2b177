"""Policies: outputs do not depend on the order of candidates, and files are checked when read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl.test_env import RESET, chain, negated, own, params_of, slots_of, taken
from xrl_jax.cost.roofline import CORRECTED
from xrl_jax.language.rule_parser import parse_rules
from xrl_jax.language.table import compile_rules
from xrl_jax.rl.decode import begin, by_gain, by_network, follow
from xrl_jax.rl.features import Observation, observe
from xrl_jax.rl.networks import NetworkConfig, Output, PolicyNetwork
from xrl_jax.rl.policy import Policy, PolicyError, load_policy
from xrl_jax.runtime.engine_jit import engine_jit

CONFIG = NetworkConfig(width=8, layers=1, heads=2, n_rules=2)
NETWORK = PolicyNetwork(CONFIG)
INIT, APPLY, OBSERVE = map(jax.jit, (NETWORK.init, NETWORK.apply, observe))


def observed(slots: int = 8) -> Observation:
    params = params_of(negated(), own(), slots=slots)
    return OBSERVE(RESET(jax.random.key(0), params), params)


def weights(seed: int = 0):
    return INIT(jax.random.key(seed), observed())


def output_of(observation: Observation) -> Output:
    return APPLY(weights(), observation)


def test_the_observation_contains_the_cost_corrections() -> None:
    """Corrections are seen as logarithms relative to their mean: if products are e times as
    expensive, theirs is 11/12 above the mean of the twelve.
    """
    params = params_of(negated(), own(), slots=8)
    costs = params.costs
    scale = costs.scale.at[CORRECTED.index("dot")].mul(np.e) * 3.0
    state = RESET(jax.random.key(0), params)
    given = dataclasses.replace(params, costs=dataclasses.replace(costs, scale=scale))
    expected = np.where(np.array(CORRECTED) == "dot", 11 / 12, -1 / 12)
    np.testing.assert_allclose(OBSERVE(state, given).globals[-12:], expected, atol=1e-6)


@pytest.mark.parametrize("slots", [8, 4])
def test_features_of_a_rule_include_candidates_that_are_not_shown(slots: int) -> None:
    """Three double negations save three times as much as one, even if not all of them are shown."""
    params = params_of(chain(), own(), slots=slots)
    state = RESET(jax.random.key(0), params)
    candidates = OBSERVE(state, params).candidates[slots_of(state, own())["neg-neg"]]
    np.testing.assert_allclose(candidates[4], np.log1p(3) / 4, rtol=1e-6)
    alone, together = (np.exp2(2 * np.abs(candidates[i])) - 1 for i in (0, 5))
    np.testing.assert_allclose(together / alone, 3.0, rtol=1e-2)


def test_empty_slots_are_never_chosen() -> None:
    probabilities = np.asarray(jax.nn.softmax(output_of(observed()).logits.index))
    assert probabilities.shape == (17,)  # eight slots of two kinds, and No-Op
    np.testing.assert_array_equal(probabilities > 0, observed().allowed)


def test_an_untrained_policy_prefers_gains() -> None:
    """A gain is exp(prior_scale * log2(1 + 1000 share) / 2) times as probable as an action that
    saves nothing.
    """
    config = dataclasses.replace(CONFIG, prior_scale=1.0)
    params = params_of(negated(), own(), slots=8)
    state = RESET(jax.random.key(0), params)
    shown, slots = OBSERVE(state, params), slots_of(state, own())
    network = PolicyNetwork(config)
    init, apply = map(jax.jit, (network.init, network.apply))
    output: Any = apply(init(jax.random.key(0), shown), shown)
    share = -float(state.candidates.seconds[slots["neg-neg"]]) / float(state.seconds)
    gains, loses = (float(output.logits.index[slots[n]]) for n in ("neg-neg", "tanh-odd"))
    assert gains == pytest.approx(np.log2(1 + 1000 * share) / 2, abs=0.2)
    assert loses == pytest.approx(0.0, abs=0.2)
    masks = np.asarray(output.logits.mask)
    assert masks[slots["neg-neg"]] == pytest.approx(3.0, abs=0.2)
    assert masks[slots["tanh-odd"]] == pytest.approx(0.0, abs=0.2)
    assert float(state.candidates.seconds[slots["tanh-odd"]]) > 0


def test_the_order_of_candidates_does_not_matter() -> None:
    order, before = jnp.array([3, 1, 0, 2]), observed(slots=4)
    moved = before._replace(
        **{n: getattr(before, n)[order] for n in ("rule", "root", "partner", "made", "candidates")},
        allowed=before.allowed.at[:4].set(before.allowed[order]),
    )
    np.testing.assert_allclose(
        output_of(moved).logits.index[:4], output_of(before).logits.index[order], rtol=1e-5
    )
    masks = output_of(moved).logits.mask, output_of(before).logits.mask[order]
    np.testing.assert_allclose(*masks, rtol=1e-5)
    np.testing.assert_allclose(output_of(moved).value, output_of(before).value, rtol=1e-5)


def test_more_slots_do_not_change_the_logits() -> None:
    logits, few = (np.asarray(output_of(observed(slots)).logits.index) for slots in (8, 4))
    np.testing.assert_allclose(np.sort(logits[logits > -1e8]), np.sort(few[few > -1e8]), rtol=1e-4)


def test_a_saved_policy_loads_unchanged(tmp_path: Path) -> None:
    policy = Policy(CONFIG, weights(), ("neg-neg", "tanh-odd"), trained="by hand")
    policy.save(tmp_path / "p")
    again = load_policy(tmp_path / "p")
    assert (again.config, again.rules, again.trained) == (CONFIG, policy.rules, "by hand")
    jax.tree.map(np.testing.assert_array_equal, again.weights, policy.weights)


def test_rules_keep_their_weight_rows_in_any_order() -> None:
    policy = Policy(CONFIG, weights(), ("tanh-odd", "neg-neg"))
    more = '(rule twice (source "test") (lhs (neg ?x)) (rhs (neg (neg (neg ?x)))))'
    rules = compile_rules([*own().rules, *parse_rules(more)[0]])
    config, fitted = policy.fitted(rules)
    table = np.asarray(policy.weights["params"]["rules"]["kernel"])
    assert config == dataclasses.replace(CONFIG, n_rules=3)
    rows = [table[1], table[0], table.mean(axis=0)]  # the new rule gets the mean
    np.testing.assert_allclose(fitted["params"]["rules"]["kernel"], rows, rtol=1e-6)


def test_fitted_weights_are_host_arrays() -> None:
    """Weights from a training over several devices would move every rollout to all of them."""
    policy = Policy(CONFIG, jax.tree.map(jnp.asarray, weights()), ("tanh-odd", "neg-neg"))
    _, fitted = policy.fitted(own())
    assert {type(v) for v in jax.tree.leaves(fitted)} == {np.ndarray}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "damaged or not a policy"), (b"\x93abc", "damaged or not a policy")],
)
def test_a_file_that_is_not_a_policy_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(PolicyError, match=message):
        load_policy(tmp_path / "p")


def test_a_policy_with_other_features_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Policy(CONFIG, weights(), ("neg-neg", "tanh-odd")).save(tmp_path / "p")
    monkeypatch.setattr("xrl_jax.rl.policy._FEATURE_COUNTS", (1, 2, 3))
    with pytest.raises(PolicyError, match="another version of xrl_jax .*: train it again"):
        load_policy(tmp_path / "p")


@pytest.mark.parametrize(("program", "slot"), [(negated, 0), (chain, 8)])
def test_greedy_takes_a_rule_wherever_it_gains(program, slot: int) -> None:
    """A rule with one candidate is applied once (the indices below 8), a rule with several as a
    macro-action.
    """
    params = params_of(program(), own(), slots=8)
    state = RESET(jax.random.key(0), params)
    action = int(jnp.argmax(by_gain(state, params).index))
    assert slot <= action < slot + 8
    state, outcome = taken(1, state, action, params)
    assert list(slots_of(state, own())) == ["tanh-odd"] and float(outcome.reward) > 0
    assert int(jnp.argmax(by_gain(state, params).index)) == params.no_op  # nothing else gains


@pytest.mark.slow
def test_decoding_stops_at_no_op_and_stays_there() -> None:
    params = params_of(negated(), own(), slots=4)
    start = begin(params)
    stops = jax.tree.map(jnp.zeros_like, weights())  # candidates and No-Op are equally probable
    once = dataclasses.replace(CONFIG, macro_actions=False)  # else a step's mask may be empty

    def run(key: jax.Array):
        return follow(by_network(once, stops), params, start, key, jnp.float32(1.0), 12)

    done, trail = engine_jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 8))
    after = done.state
    assert np.asarray(after.done).sum() > 4
    for i in np.flatnonzero(after.done):
        steps = int(done.n[i]) - 1  # the first began the episode, the last was No-Op
        rewrites = np.sum(np.asarray(trail.variant[i]) >= 0, axis=1)
        assert (rewrites[1:steps] >= 1).all() and (rewrites[steps:] == 0).all()
        np.testing.assert_array_equal(trail.seconds[i][steps:], after.seconds[i])
        least = min(float(params.start.seconds), float(np.asarray(trail.seconds[i]).min()))
        assert float(done.best.seconds[i]) == least
