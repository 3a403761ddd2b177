"""A trained policy as the prior of tree search over e-graphs: which rules it takes.

The policy rewrites the program itself in a few rollouts. A rule that it takes often there is tried
early in the e-graph, where it is applied wherever it matches.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import jax

from xrl_jax.graph.graph import GraphError
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.rl.env import start_of
from xrl_jax.rl.policy import Policy, load_policy, shipped
from xrl_jax.rl.rollouts import Decoder, RolloutConfig
from xrl_jax.search.base import Found, Problem


@dataclasses.dataclass(frozen=True)
class PolicyPrior:
    """How often a policy takes each rule (`eqsat_mcts.Prior`).

    Attributes:
      policy: None for the one that comes with the package for the platform.
      seconds: after which the rollouts end.
      rollouts: hyperparameters of the rollouts.
    """

    policy: Policy | None = None
    seconds: float = 5.0
    rollouts: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)

    def compile(self, problem: Problem) -> None:
        """Compile what the prior calls, or read it from JAX's cache."""
        self._steps(problem, jax.random.key(0), 0.0)

    def __call__(self, problem: Problem, key: jax.Array) -> Mapping[str, float]:
        """Return the share of each rule in the steps to the best programs of the rollouts; empty
        if they found nothing.

        Raises:
          PolicyError: the policy does not fit this version.
        """
        steps = self._steps(problem, key, self.seconds)
        return {rule: n / steps.total() for rule, n in sorted(steps.items())}

    def _steps(self, problem: Problem, key: jax.Array, seconds: float) -> Counter[str]:
        policy = self.policy or load_policy(shipped(problem.oracle.target.platform))
        decoder = Decoder(*policy.fitted(problem.rules), problem.rules, self.rollouts)
        try:
            start = start_of(problem.program, problem.rules, problem.oracle.costs)
        except GraphError:  # too large for the policy
            return Counter()
        clock = Stopwatch(seconds)
        done = decoder.rollouts(
            Found(problem.program, 0.0),
            start,
            problem.oracle.costs,
            key,
            plan=[()],
            slots=decoder.slots_for(start),
            must_end=lambda: clock.done,
        )
        return Counter(step.rule for found in done.found for step in found.steps)
