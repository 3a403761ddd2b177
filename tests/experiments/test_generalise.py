"""How well a policy generalises: flags and figures, and the evaluation itself on a small graph."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.evaluation import Reached, evaluator
from experiments.few_timings import policy_command
from experiments.few_timings import row_of as row_of_timings
from experiments.generalise import at_home, geometric_means, row_of, values_of
from experiments.side_by_side import Entry, SideBySide
from experiments.targets import ConfigError
from tests.rl.test_train import CONFIG, params
from xrl_jax.rl.features import GAIN_COLUMN, N_CANDIDATE, SAVING_COLUMNS
from xrl_jax.rl.train import training_of


def reached(policy: float, greedy: float, chance: float) -> Reached:
    return Reached(*(np.array([v]) for v in (policy, greedy, chance)))


def test_the_lead_of_a_policy_is_given_in_standard_errors() -> None:
    trained = [reached(0.5, 0.4, 0.8), reached(0.5, 0.4, 1.0)]
    untrained = [reached(0.6, 0.4, 0.8), reached(0.6, 0.4, 1.0)]
    row = row_of(values_of(trained, untrained))
    assert row["mean"] == pytest.approx(
        {"policy": 0.5, "untrained": 0.6, "chance": 0.9, "greedy": 0.4}
    )
    assert row["standard_error"]["chance"] == pytest.approx(0.1)
    assert row["ahead"]["chance"] == pytest.approx(4.0)  # (0.9 - 0.5) / 0.1


def test_a_policy_trained_on_the_network_itself_is_reported() -> None:
    once = [reached(0.5, 0.4, 0.8)] * 2
    home = values_of(once, once, [reached(0.45, 0.4, 0.8)] * 2)
    assert row_of(home)["mean"]["at home"] == 0.45
    assert "at home" not in row_of(values_of(once, once))["mean"]


def test_each_seed_gets_a_geometric_mean_over_all_networks() -> None:
    one = {"policy": [0.1, 0.4], "greedy": [0.5, 0.5], "at home": [0.1, 0.1]}
    other = {"policy": [0.4, 0.9], "greedy": [0.5, 0.5]}
    found = geometric_means([one, other])
    assert found["policy"] == pytest.approx([0.2, 0.6])
    assert set(found) == {"policy", "greedy"}


def test_at_home_policies_are_given_per_network() -> None:
    assert at_home(["bert", "vit"], ["", "a.msgpack"]) == {"vit": Path("a.msgpack")}
    assert at_home(["bert", "vit"], []) == {}
    with pytest.raises(ConfigError, match="--at_home names 1 policies for 2 networks"):
        at_home(["bert", "vit"], ["a.msgpack"])


def test_the_policy_has_a_limit_of_measurements() -> None:
    folder = Path("out")
    command = policy_command("vit", Path("p.msgpack"), folder, seconds=9.0, limit=7, seed=0)
    assert {"--alone", "--policy=p.msgpack", "--budget_measurements=7"} < set(command)


def test_greedys_time_is_relative_to_the_policys() -> None:
    entries = {
        s: Entry(0.01 / v, v, v, v, "jit", 0.0, 1e-5) for s, v in (("greedy", 1.2), ("policy", 1.5))
    }
    ratios = {"greedy/policy": (1.25, 1.2, 1.3)}
    found = SideBySide("vit", {"jit": 0.01}, (0.99, 1.01), entries, ratios, {})
    row = row_of_timings({"greedy": 70, "policy": 7}, found)
    assert row["greedy_over_policy"] == (1.25, 1.2, 1.3)
    assert row["speedup"] == {"greedy": 1.2, "policy": 1.5}


@pytest.mark.slow
def test_greedy_search_reaches_the_least_cost_if_all_steps_are_gains() -> None:
    given = params(1)
    weights = training_of(CONFIG).init(jax.random.key(0), given).weights
    found = evaluator(CONFIG.network, given)(weights, jax.random.key(1))
    assert found.greedy.shape == (1,) and found.greedy[0] < 0.9
    assert found.greedy[0] <= found.policy[0] <= 1.0 and found.greedy[0] <= found.chance[0] <= 1.0
    greedy = jax.tree.map(jnp.zeros_like, weights)
    greedy["params"] = by_gain_alone(greedy["params"])
    again = evaluator(CONFIG.network, given)(greedy, jax.random.key(1))
    assert again.policy[0] == pytest.approx(found.greedy[0])


def by_gain_alone(params: dict) -> dict:
    """Return weights under which only an action's predicted gain counts."""
    kernel = 50.0 * jax.nn.one_hot(jnp.array(SAVING_COLUMNS), N_CANDIDATE).T
    shapes = {name: jnp.shape(p.get("kernel", 0.0)) for name, p in params.items()}
    (name,) = [name for name, shape in shapes.items() if shape == kernel.shape]
    mask = 50.0 * jax.nn.one_hot(GAIN_COLUMN, N_CANDIDATE)[:, None]
    return {**params, name: {"kernel": kernel}, "gains": {"kernel": mask}}
