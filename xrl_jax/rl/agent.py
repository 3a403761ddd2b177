"""A policy as pure functions from states to observations, and from these to logits and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from xrl_jax.rl.candidates import CandidatesNetwork, candidate_graphs, candidate_inputs
from xrl_jax.rl.env import EnvParams, EnvState
from xrl_jax.rl.features import observe
from xrl_jax.rl.networks import NetworkConfig, Output, PolicyNetwork
from xrl_jax.runtime.engine_jit import wide


class Agent(NamedTuple):
    """A policy's functions, pure and unbatched.

    `init` and `apply` read only the rules and the costs of `params`.
    """

    observe: Callable[[EnvState, EnvParams], Any]  # the observation of a state, kept for learning
    init: Callable[[jax.Array, Any, EnvParams], Any]  # weights, from a key and an observation
    apply: Callable[[Any, Any, EnvParams], Output]  # from weights and an observation
    # How many states a gradient is computed for at once, chosen for the CPU's caches. On a wide
    # device it also limits forward passes: memory holds no more (docs/measurements/rl.md).
    chunk_size: int
    slots: int | None  # number of slots the environment must have; None if any number will do


def agent_of(config: NetworkConfig) -> Agent:
    """Return the agent whose policy has this configuration.

    Raises:
      ValueError: the encoder is unknown.
    """
    if config.encoder == "touched":
        network, observe_state, to_input = PolicyNetwork(config), observe, _unchanged
        chunk_size, slots = (512 if wide() else 64), None
    elif config.encoder == "candidates":
        network = CandidatesNetwork(config)
        observe_state, to_input = candidate_inputs, candidate_graphs
        chunk_size, slots = (64 if wide() else 4), config.slots
    else:
        raise ValueError(f"encoder {config.encoder!r} is neither 'touched' nor 'candidates'")

    def network_input(kept: Any, params: EnvParams) -> Any:
        if slots not in (None, params.slots):
            raise ValueError(
                f"a policy with encoder={config.encoder!r} is bound to its {slots} slots, and the "
                f"environment has {params.slots}"
            )
        return to_input(kept, params)

    def apply(weights: Any, kept: Any, params: EnvParams) -> Output:
        output: Any = network.apply(weights, network_input(kept, params))
        return output

    def init(key: jax.Array, kept: Any, params: EnvParams) -> Any:
        return network.init(key, network_input(kept, params))

    return Agent(observe_state, init, apply, chunk_size, slots)


def _unchanged(observation: Any, params: EnvParams) -> Any:
    return observation
