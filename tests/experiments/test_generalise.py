"""How far a policy carries: flags and figures; the evaluation itself on a graph one can draw."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.evaluation import Reached, evaluator
from experiments.generalise import row_of
from tests.rl.test_train import CONFIG, params
from xrl_jax.rl.train import training_of


def reached(policy: float, greedy: float, chance: float) -> Reached:
    return Reached(*(np.array([v]) for v in (policy, greedy, chance)))


def test_the_policy_is_ahead_by_so_many_standard_errors() -> None:
    trained = [reached(0.5, 0.4, 0.8), reached(0.5, 0.4, 1.0)]
    untrained = [reached(0.6, 0.4, 0.8), reached(0.6, 0.4, 1.0)]
    row = row_of(trained, untrained)
    assert row["mean"] == pytest.approx(
        {"policy": 0.5, "untrained": 0.6, "chance": 0.9, "greedy": 0.4}
    )
    assert row["standard_error"]["chance"] == pytest.approx(0.1)
    assert row["ahead"]["chance"] == pytest.approx(4.0)  # (0.9 - 0.5) / 0.1


@pytest.mark.slow
def test_greedy_search_takes_every_negation_away_and_a_policy_reaches_no_less() -> None:
    given = params(1)
    weights = training_of(CONFIG).init(jax.random.key(0), given).weights
    found = evaluator(CONFIG.network, given, n_steps=8)(weights, jax.random.key(1))
    assert found.greedy.shape == (1,) and found.greedy[0] < 0.9
    assert found.greedy[0] <= found.policy[0] <= 1.0 and found.greedy[0] <= found.chance[0] <= 1.0
    greedy = jax.tree.map(jnp.zeros_like, weights)
    greedy["params"] = by_gain_alone(greedy["params"])
    again = evaluator(CONFIG.network, given, n_steps=8)(greedy, jax.random.key(1))
    assert again.policy[0] == pytest.approx(found.greedy[0])


def by_gain_alone(params: dict) -> dict:
    """Weights that count nothing but a candidate's predicted gain."""
    (name,) = [n for n, p in params.items() if p.get("kernel", jnp.zeros(0)).shape == (4, 1)]
    kernel = jnp.zeros((4, 1)).at[0].set(-50.0)
    return {**params, name: {"kernel": kernel}}
