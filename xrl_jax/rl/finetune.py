"""Training a policy further on the program at hand, inside the budget of its search."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from xrl_jax.cost.calibration import sceptical
from xrl_jax.cost.model import price
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.rl.env import EnvParams, start_of
from xrl_jax.rl.networks import NetworkConfig
from xrl_jax.rl.train import TrainConfig, training_of
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.search.base import Budget, Problem, Progress
from xrl_jax.search.descend import measure_graph
from xrl_jax.search.states import in_one_bucket

_SHARE = 0.5  # of the search's time
_TIMING = 0.2  # of that, at most, for the regions of the program
_WORTH = 30.0  # seconds, at least: compiling takes most of them
_ENVS = 16
_CONFIG = TrainConfig(updates=400, learning_rate=1e-3)  # the rate falls as if there were so many


def finetuned(
    config: NetworkConfig, weights: Any, problem: Problem, budget: Budget, key: jax.Array
) -> tuple[Any, int]:
    """Weights after training on the program under what its regions take, and how many updates that
    were: none where there is too little time to compile it. Ctrl-C ends it, and goes on to the
    search.

    Raises:
      GraphError: the program is too large for one environment.
    """
    oracle, clock = problem.oracle, Stopwatch(_SHARE * budget.seconds)
    done = 0
    if clock.left < _WORTH:
        return weights, done
    try:
        with plain_ctrl_c():
            part = clock.part(_TIMING)
            for graph in in_one_bucket(problem.program):
                priced, _ = price(oracle.table(), graph)
                measure_graph(oracle, priced, part, budget.measurements)
            # As what is shipped was trained: what was not timed must not look like a gain.
            costs = sceptical(oracle.table())
            start = start_of(problem.program, problem.rules, costs)
            batch = jax.tree.map(lambda v: jnp.repeat(v[None], _ENVS, axis=0), start)
            params = EnvParams(problem.rules.table, costs, batch)
            training = training_of(dataclasses.replace(_CONFIG, network=config))
            update = engine_jit(training.update)
            now = engine_jit(training.init)(key, params)._replace(weights=weights)
            while not clock.done and done < _CONFIG.updates:
                now, metrics = jax.block_until_ready(update(now, params))
                weights, done = now.weights, done + 1
                best = float(metrics.best.min()) * float(start.seconds)
                problem.listener(
                    Progress(
                        "training the policy",
                        float(start.seconds),
                        best,
                        done * _ENVS * _CONFIG.steps,
                        oracle.spending.measurements,
                        max(clock.left, 0.0),
                    )
                )
    except KeyboardInterrupt:
        pass
    return weights, done
