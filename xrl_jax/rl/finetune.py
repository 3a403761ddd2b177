"""Training a policy further on the program at hand, within the budget of its search."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from xrl_jax.cost.calibration import pessimistic_costs
from xrl_jax.cost.model import price
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.rl.env import EnvParams, start_of
from xrl_jax.rl.networks import NetworkConfig
from xrl_jax.rl.train import training_of
from xrl_jax.rl.train_config import TrainConfig
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.runtime.engine_jit import engine_jit
from xrl_jax.search.base import Budget, Problem, Progress
from xrl_jax.search.descend import measure_graph
from xrl_jax.search.states import in_one_bucket


@dataclasses.dataclass(frozen=True)
class FineTune:
    """Trains a policy on the program, under costs from timings of its regions. Ctrl-C ends the
    training, and the search goes on.

    Attributes:
      share: of the search's time, used for this training.
      timing: of the training's time, at most, for timing the regions of the program.
      least_seconds: with less time nothing is done, because compiling takes most of it.
      envs: number of environments.
      updates: maximum number; the learning rate decays as if all were made.
      learning_rate: of the first update.
    """

    share: float = 0.5
    timing: float = 0.2
    least_seconds: float = 30.0
    envs: int = 16
    updates: int = 400
    learning_rate: float = 1e-3

    def __call__(
        self, config: NetworkConfig, weights: Any, problem: Problem, budget: Budget, key: jax.Array
    ) -> tuple[Any, int]:
        """Return the weights after training and the number of updates, 0 if the time is too short
        to compile the training.

        Raises:
          GraphError: the program is too large for one environment.
        """
        oracle, clock = problem.oracle, Stopwatch(self.share * budget.seconds)
        done = 0
        if clock.left < self.least_seconds:
            return weights, done
        try:
            with plain_ctrl_c():
                part = clock.part(self.timing)
                for graph in in_one_bucket(problem.program):
                    priced, _ = price(oracle.costs, graph)
                    measure_graph(oracle, priced, part, budget.measurements)
                # Pessimistic, as in the training of the shipped policy: what was not timed must not
                # look like a gain.
                costs = pessimistic_costs(oracle.costs)
                start = start_of(problem.program, problem.rules, costs)
                batch = jax.tree.map(lambda v: jnp.repeat(v[None], self.envs, axis=0), start)
                params = EnvParams(problem.rules.table, costs, batch)
                train_config = TrainConfig(
                    updates=self.updates, learning_rate=self.learning_rate, network=config
                )
                training = training_of(train_config)
                update = engine_jit(training.update)
                now = engine_jit(training.init)(key, params)._replace(weights=weights)
                while not clock.done and done < self.updates:
                    now, metrics = jax.block_until_ready(update(now, params))
                    weights, done = now.weights, done + 1
                    best = float(metrics.best.min()) * float(start.seconds)
                    problem.listener(
                        Progress(
                            "training the policy",
                            float(start.seconds),
                            best,
                            done * self.envs * train_config.steps,
                            oracle.spending.measurements,
                            max(clock.left, 0.0),
                        )
                    )
        except KeyboardInterrupt:
            pass
        return weights, done
