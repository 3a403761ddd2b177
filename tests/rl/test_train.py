"""Training: the policy learns what is obvious, and the same seed gives the same weights."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl import trap
from tests.rl.test_env import X, own, params_of, twice
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.rl.env import EnvParams
from xrl_jax.rl.networks import NetworkConfig
from xrl_jax.rl.train import make_train
from xrl_jax.rl.train_config import TrainConfig
from xrl_jax.runtime.engine_jit import engine_jit

ROOT = Path(__file__).resolve().parents[2]
CONFIG = TrainConfig(
    network=NetworkConfig(width=16, layers=1, heads=2, n_rules=2, prior_scale=0.0),
    updates=30,
    steps=16,
    minibatches=2,
    learning_rate=1e-2,
    records=False,  # random actions reach the best state: nothing would be left to learn
)


def params(n_envs: int) -> EnvParams:
    """Return the parameters of a program with three double negations. Removing them pays, rewriting
    tanh(x) as -tanh(-x) does not.
    """
    program = from_jax(lambda x: twice(jnp.tanh(twice(jnp.tanh(twice(x))))), X)
    one = params_of(program, own(), slots=8, horizon=8)
    batch = jax.tree.map(lambda v: jnp.repeat(v[None], n_envs, axis=0), one.start)
    return dataclasses.replace(one, start=batch)


def test_training_increases_the_reward() -> None:
    _, metrics = trap.training()
    reward = np.asarray(metrics.reward)
    assert reward[-5:].mean() > reward[:5].mean() + 1.0
    assert np.asarray(metrics.entropy)[-1] < np.asarray(metrics.entropy)[0]


def test_the_same_key_gives_the_same_weights_bit_for_bit() -> None:
    state, _ = trap.training()
    again, _ = trap.TRAIN(jax.random.key(0), trap.params())
    jax.tree.map(np.testing.assert_array_equal, again.weights, state.weights)


@pytest.mark.slow
def test_another_key_gives_other_weights() -> None:
    state, _ = trap.training()
    other, _ = trap.TRAIN(jax.random.key(1), trap.params())
    leaves = zip(jax.tree.leaves(other.weights), jax.tree.leaves(state.weights), strict=True)
    assert any(not np.array_equal(a, b) for a, b in leaves)


@pytest.mark.slow
def test_vmapped_trainings_equal_separate_trainings() -> None:
    config = dataclasses.replace(CONFIG, updates=2)
    keys = jax.random.split(jax.random.key(3), 2)
    train = make_train(config)
    both, _ = engine_jit(jax.vmap(train, in_axes=(0, None)))(keys, params(2))
    one, _ = engine_jit(train)(keys[1], params(2))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5)
    jax.tree.map(close, jax.tree.map(lambda v: v[1], both.weights), one.weights)


TWO_DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import dataclasses, numpy as np
from tests.rl.test_train import CONFIG, params
from xrl_jax.rl.train import spread
training = spread(dataclasses.replace(CONFIG, updates=2), jax.devices())
init, update = jax.jit(training.init), jax.jit(training.update)

def trained():
    state = init(jax.random.key(0), params(4))
    for _ in range(2):
        state, metrics = update(state, params(4))
    return state, metrics

state, metrics = trained()
assert metrics.best.shape == state.best.shape == (4,)
assert len(state.envs.seconds.devices()) == 2
for leaf in jax.tree.leaves(state.weights):  # every device has the same
    one, other = (np.asarray(s.data) for s in leaf.addressable_shards)
    np.testing.assert_array_equal(one, other)
seconds = np.asarray(state.envs.seconds)
assert len(set(seconds.tolist())) > 1  # and draws its own
jax.tree.map(np.testing.assert_array_equal, trained()[0].weights, state.weights)
print("done")
"""


@pytest.mark.slow
def test_environments_can_be_spread_over_devices() -> None:
    command = [sys.executable, "-c", TWO_DEVICES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
