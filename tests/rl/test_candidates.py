"""X-RLflow's own policy, whose input is the graphs that the candidates would create."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from tests.rl.test_env import RESET, negated, own, params_of, slots_of, taken
from tests.rl.test_train import params
from xrl_jax.rl.agent import Agent, agent_of
from xrl_jax.rl.candidates import candidate_graphs, candidate_inputs
from xrl_jax.rl.features import graph_features
from xrl_jax.rl.networks import NetworkConfig
from xrl_jax.rl.policy import Policy
from xrl_jax.rl.train import make_train
from xrl_jax.rl.train_config import PAPER
from xrl_jax.runtime.engine_jit import engine_jit

SIZES = NetworkConfig(encoder="candidates", width=8, layers=2, heads=1, slots=8, n_rules=2)


@pytest.mark.slow
def test_the_observation_contains_the_graph_each_candidate_would_create() -> None:
    given = params_of(negated(), own(), slots=8)
    state = RESET(jax.random.key(0), given)
    slot = slots_of(state, own())["neg-neg"]
    seen = engine_jit(lambda s, g: candidate_graphs(candidate_inputs(s, g), g))(state, given)
    after, _ = taken(0, state, slot, given)
    for each, s in ((slot, after), (8, state)):  # the last graph is the current one
        counts = given.start.counts[s.owner]
        expected = graph_features(s.graph, counts, given.start.seconds)
        found = jax.tree.map(lambda v, i=each: v[i], seen.graphs)
        np.testing.assert_array_equal(found.lowering, expected.lowering)
        np.testing.assert_allclose(found.values, expected.values, rtol=1e-5, atol=1e-5)
        edges, wanted = (np.sort(g.receivers[g.senders > 0]) for g in (found, expected))
        np.testing.assert_array_equal(edges, wanted)
    np.testing.assert_array_equal(seen.valid, state.candidates.valid)


def test_empty_slots_are_never_chosen() -> None:
    given, agent = params_of(negated(), own(), slots=8), agent_of(SIZES)
    state = RESET(jax.random.key(0), given)
    kept = agent.observe(state, given)
    weights = engine_jit(agent.init)(jax.random.key(0), kept, given)
    said = engine_jit(agent.apply)(weights, kept, given)
    probabilities = np.asarray(jax.nn.softmax(said.logits.index))
    macro_actions = [False] * 8  # it never takes macro-actions
    np.testing.assert_array_equal(
        probabilities > 0, [*np.asarray(state.candidates.valid), *macro_actions, True]
    )


def init_agent(agent: Agent, slots: int) -> None:
    given = params_of(negated(), own(), slots=slots)
    kept = agent.observe(RESET(jax.random.key(0), given), given)
    agent.init(jax.random.key(0), kept, given)


def test_another_number_of_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="bound to its 8 slots, and the environment has 4"):
        init_agent(agent_of(SIZES), 4)


def test_an_unknown_encoder_is_refused() -> None:
    with pytest.raises(ValueError, match="'gcn' is neither 'touched' nor 'candidates'"):
        agent_of(dataclasses.replace(SIZES, encoder="gcn"))


def test_rows_of_the_lowering_table_are_matched_by_name() -> None:
    given, agent = params_of(negated(), own(), slots=8), agent_of(SIZES)
    kept = agent.observe(RESET(jax.random.key(0), given), given)
    weights = engine_jit(agent.init)(jax.random.key(0), kept, given)
    policy = Policy(SIZES, weights, ("neg-neg", "tanh-odd"))
    turned = dataclasses.replace(policy, lowerings=tuple(reversed(policy.lowerings)))
    _, fitted = turned.fitted(own())
    table = weights["params"]["graphs"]["lowerings"]["kernel"]
    np.testing.assert_array_equal(fitted["params"]["graphs"]["lowerings"]["kernel"], table[::-1])


@pytest.mark.slow
def test_the_papers_reward_discourages_stopping() -> None:
    network = dataclasses.replace(PAPER.network, width=16, layers=2, slots=8, n_rules=2)
    config = dataclasses.replace(
        PAPER, network=network, updates=30, steps=20, minibatches=8, learning_rate=1e-3
    )
    train = engine_jit(jax.vmap(make_train(config), in_axes=(0, None)))
    _, metrics = train(jax.random.split(jax.random.key(0), 4), params(4))
    # The share of steps that stop; every other step pays at least 0.1. One training in four first
    # learns the step that pays most, and whether it stops then matters little: so the median.
    stopped = np.asarray(metrics.terminated).reshape(4, 6, 5).mean(-1)
    assert np.median(stopped[:, -1]) < 0.3 * np.median(stopped[:, 0])
