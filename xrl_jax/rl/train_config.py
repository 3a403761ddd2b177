"""Settings of training by PPO."""

from __future__ import annotations

from dataclasses import dataclass, field

from xrl_jax.rl.networks import NetworkConfig


@dataclass(frozen=True)
class TrainConfig:
    """Settings of PPO, compared with those of X-RLflow (its run_gn_ppo.py).

    Attributes:
      updates: number of rollouts, each followed by learning from it.
      steps: of each environment in a rollout.
      epochs: passes over a rollout; 4 in X-RLflow.
      minibatches: of one pass.
      learning_rate: of Adam; 5e-4 in X-RLflow.
      decays: whether the learning rate decays linearly to 0; it is constant in X-RLflow.
      gamma: discount of an action; 0.99 in X-RLflow.
      lambda_: of advantage estimation, as in X-RLflow.
      clip: epsilon, to which the probability ratio is clipped, as in X-RLflow.
      value_weight: c1, as in X-RLflow.
      entropy_weight: c2; 0.01 in X-RLflow.
      max_gradient: norm at which gradients are clipped, as in X-RLflow.
      target_kl: KL divergence at which learning from a rollout ends, as in X-RLflow.
      reward_scale: factor of the rewards (percent), and so of the values; 1 in X-RLflow.
      reward_every: number of actions after which their saving is rewarded, as it also is when an
        episode ends; 5 in X-RLflow.
      bonus: percent, the reward of the other steps; 0.1 in X-RLflow, which makes stalling pay.
      records: whether a step is rewarded only for its saving below the least time of the episode so
        far: a search takes the best state of a rollout, so a path to it through more expensive
        states costs nothing. Not in X-RLflow, and not where times are measured.
    """

    network: NetworkConfig = field(default_factory=NetworkConfig)
    updates: int = 100
    steps: int = 32
    epochs: int = 2
    minibatches: int = 4
    learning_rate: float = 3e-3
    decays: bool = True
    gamma: float = 0.95
    lambda_: float = 0.95
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.003
    max_gradient: float = 0.5
    target_kl: float = 0.05
    reward_scale: float = 0.1
    reward_every: int = 1
    bonus: float = 0.0
    records: bool = True


PAPER = TrainConfig(
    network=NetworkConfig(
        encoder="candidates", width=64, layers=5, heads=1, prior_scale=0.0, macro_actions=False
    ),
    steps=100,
    epochs=4,
    minibatches=50,  # of 16 steps each, with eight environments
    learning_rate=5e-4,
    decays=False,
    gamma=0.99,
    entropy_weight=0.01,
    reward_scale=1.0,
    reward_every=5,
    bonus=0.1,
    records=False,
)
"""X-RLflow's own settings (its run_gn_ppo.py), without its code's defects."""
