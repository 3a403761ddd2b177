"""A policy trained on a network whose cheapest lowering is reached only through a worse one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.search.fakes import FakeOracle
from tests.search.test_strategies import program, rules, run
from xrl_jax.rl.env import EnvParams, start_of
from xrl_jax.rl.networks import NetworkConfig
from xrl_jax.rl.policy import Policy, load_policy
from xrl_jax.rl.train import make_train
from xrl_jax.rl.train_config import TrainConfig
from xrl_jax.runtime.engine_jit import engine_jit

SIZES = NetworkConfig(width=16, layers=1, heads=2, n_rules=5)
CONFIG = TrainConfig(
    network=SIZES, updates=40, steps=16, learning_rate=1e-2, gamma=0.97, entropy_weight=0.02
)
TRAIN = engine_jit(make_train(CONFIG))


@cache
def params() -> EnvParams:
    """Return the parameters of eight environments, with timings of all lowerings."""
    oracle = FakeOracle()
    run("taso", oracle=oracle)  # times all lowerings
    start = start_of(program(), rules(), oracle.costs)
    batch = jax.tree.map(lambda v: jnp.repeat(v[None], 8, axis=0), start)
    return EnvParams(rules().table, oracle.costs, batch, horizon=12, slots=16)


@cache
def training() -> Any:
    """Train the policy; return the final state and the metrics."""
    return TRAIN(jax.random.key(0), params())


@cache
def trained() -> Policy:
    """Return the policy that results from the training."""
    names = tuple(r.name for r in rules().rules)
    return Policy(SIZES, training()[0].weights, names, trained="the trap")


@cache
def blank() -> Policy:
    """Return an untrained policy, to which all actions are alike. It has the size of the shipped
    one, so that rollouts compile once for both.
    """
    shipped = load_policy()
    zeros = jax.tree.map(np.zeros_like, shipped.weights)
    return replace(shipped, weights=zeros, trained="nothing")
