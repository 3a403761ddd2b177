"""Training a policy with PPO: `make_train(config)(key, params)` is one scan, to be jitted.

Everything is a function of the key: the same key and the same costs give the same weights, bit for
bit. `jax.vmap(train, in_axes=(0, None))(keys, params)` trains several policies at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from xrl_jax.rl.agent import agent_of
from xrl_jax.rl.collect import Collector, TrainState, Transition
from xrl_jax.rl.env import EnvParams, batch_specs
from xrl_jax.rl.learn import Learner, Metrics
from xrl_jax.rl.train_config import TrainConfig


def restarted(state: TrainState) -> TrainState:
    """Return the state such that all environments begin a new episode with their next step."""
    done = jnp.ones_like(state.envs.done)
    return state._replace(envs=state.envs._replace(done=done))


class Training(NamedTuple):
    """The functions of a training, all pure and to be jitted by the caller.

    `update` is `collect`, which acts in all environments and returns transitions [T, B], followed
    by `learn`.
    """

    init: Callable[[jax.Array, EnvParams], TrainState]
    collect: Callable[[TrainState, EnvParams], tuple[TrainState, Transition]]
    learn: Callable[[TrainState, EnvParams, Transition], tuple[TrainState, Metrics]]
    update: Callable[[TrainState, EnvParams], tuple[TrainState, Metrics]]


def make_train(
    config: TrainConfig,
) -> Callable[[jax.Array, EnvParams], tuple[TrainState, Metrics]]:
    """Return a training, from the first to the last update, as one function.

    Returns:
      train(key, params) -> the last state and metrics [updates, ...]. `params` is of a batch of
      environments: `start` has a leading dimension [B].
    """
    training = training_of(config)

    def train(key: jax.Array, params: EnvParams) -> tuple[TrainState, Metrics]:
        start = training.init(key, params)
        return jax.lax.scan(lambda s, _: training.update(s, params), start, None, config.updates)

    return train


def training_of(config: TrainConfig, *, axis: str | None = None, waits: bool = False) -> Training:
    """Return the functions that make up `make_train`, for callers that act between updates.

    Args:
      axis: mesh axis along which environments are spread, see `spread`; None for one device.
      waits: after an episode has ended, the next one begins only with the next `collect`.
    """
    collector = Collector(config, agent_of(config.network), _optimiser(config), axis, waits)
    learner = Learner(collector)

    def update(state: TrainState, params: EnvParams) -> tuple[TrainState, Metrics]:
        after, transitions = collector.collect(state, params)
        return learner.learn(after, params, transitions)

    return Training(collector.init, collector.collect, learner.learn, update)


def spread(config: TrainConfig, devices: Sequence[Any]) -> Training:
    """Return a training whose environments are spread over devices. Gradients are averaged over all
    devices, and all have the same weights. For one device it is `training_of`.

    The number of environments must be a multiple of the number of devices.
    """
    if len(devices) == 1:
        return training_of(config)
    axis = "environments"
    mesh = jax.sharding.Mesh(np.asarray(devices), (axis,))
    training = training_of(config, axis=axis)
    each, same = PartitionSpec(axis), PartitionSpec()
    states = TrainState._make((same, same, each, same, each, each))
    transitions = PartitionSpec(None, axis)
    metrics = Metrics._make((same, each, same, same, same, same, same))

    def over_devices(fn: Any, first: Any, out: Any, *rest: Any) -> Any:
        def call(given: Any, params: EnvParams, *others: Any) -> Any:
            ins = (first, batch_specs(params, each, same), *rest)
            return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False)(
                given, params, *others
            )

        return call

    return Training(
        over_devices(training.init, same, states),
        over_devices(training.collect, states, (states, transitions)),
        over_devices(training.learn, states, (states, metrics), transitions),
        over_devices(training.update, states, (states, metrics)),
    )


def _optimiser(config: TrainConfig) -> optax.GradientTransformation:
    n = config.updates * config.epochs * config.minibatches
    rate = config.learning_rate
    if config.decays:
        rate = optax.linear_schedule(rate, 0.0, n)
    return optax.chain(optax.clip_by_global_norm(config.max_gradient), optax.adam(rate, eps=1e-5))
