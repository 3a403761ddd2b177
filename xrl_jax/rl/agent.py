"""A policy as functions: what it keeps of a state, and what it says of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from xrl_jax.rl.candidates import CandidatesNetwork, candidate_graphs, moment
from xrl_jax.rl.env import EnvParams, EnvState
from xrl_jax.rl.features import observe
from xrl_jax.rl.networks import NetworkConfig, Output, PolicyNetwork
from xrl_jax.runtime.engine_jit import wide


class Agent(NamedTuple):
    """Pure and unbatched. Of `params`, `init` and `say` take the rules and the costs only."""

    see: Callable[[EnvState, EnvParams], Any]  # what is kept of a state for learning
    init: Callable[[jax.Array, Any, EnvParams], Any]  # weights, by a key and what was seen
    say: Callable[[Any, Any, EnvParams], Output]  # by weights and what was seen
    # States that a gradient is computed for at once, for the caches; where steps are wide, that
    # anything is: the memory holds no more (docs/measurements/rl.md).
    at_once: int
    slots: int | None  # how many the environment must have; None where that does not matter


def agent_of(config: NetworkConfig) -> Agent:
    """The policy of these sizes.

    Raises:
      ValueError: there is no such encoder.
    """
    if config.encoder == "touched":
        network, see, shown = PolicyNetwork(config), observe, _as_it_is
        at_once, slots = (512 if wide() else 64), None
    elif config.encoder == "candidates":
        network, see, shown = CandidatesNetwork(config), moment, candidate_graphs
        at_once, slots = (64 if wide() else 4), config.slots
    else:
        raise ValueError(f"encoder {config.encoder!r} is neither 'touched' nor 'candidates'")

    def given(kept: Any, params: EnvParams) -> Any:
        if slots not in (None, params.slots):
            raise ValueError(
                f"a policy with encoder={config.encoder!r} is bound to its {slots} slots, and the "
                f"environment has {params.slots}"
            )
        return shown(kept, params)

    def say(weights: Any, kept: Any, params: EnvParams) -> Output:
        said: Any = network.apply(weights, given(kept, params))
        return said

    def init(key: jax.Array, kept: Any, params: EnvParams) -> Any:
        return network.init(key, given(kept, params))

    return Agent(see, init, say, at_once, slots)


def _as_it_is(seen: Any, params: EnvParams) -> Any:
    return seen
