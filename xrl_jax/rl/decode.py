"""What a policy does with a graph: the most probable candidate at each step, or one drawn."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.rl.env import EnvParams, EnvState, step
from xrl_jax.rl.features import observe
from xrl_jax.rl.networks import NetworkConfig, PolicyNetwork


class Trail(NamedTuple):
    """What was done in each step; entry -1 where nothing was rewritten."""

    entry: jax.Array  # [T] int32
    root: jax.Array  # [T] int32
    partner: jax.Array  # [T] int32
    op: jax.Array  # [T] int32, of the root
    shape: jax.Array  # [T, R] int32
    rank: jax.Array  # [T] int32
    seconds: jax.Array  # [T] float32, after the step
    candidates: jax.Array  # [T] int32, how many there were to choose from


def follow(
    config: NetworkConfig,
    weights: Any,
    params: EnvParams,
    state: EnvState,
    key: jax.Array,
    temperature: jax.Array,
    n_steps: int,
) -> tuple[EnvState, Trail]:
    """So many steps by the policy; after No-Op nothing more is done.

    Args:
      temperature: 0 takes the most probable candidate, 1 draws by the policy's probabilities.
    """
    network = PolicyNetwork(config)

    def one(state: EnvState, key: jax.Array) -> tuple[EnvState, Trail]:
        to_act, to_step = jax.random.split(key)
        logits = network.apply(weights, observe(state, params)).logits  # type: ignore[union-attr]
        noise = jax.random.gumbel(to_act, logits.shape)
        action = jnp.argmax(logits + temperature * noise)
        after, outcome = step(to_step, state, jnp.where(state.done, params.slots, action), params)
        after = jax.tree.map(lambda old, new: jnp.where(state.done, old, new), state, after)
        slot = jnp.minimum(action, params.slots - 1)
        root, f = state.moves.root[slot], state.graph.nodes
        applied = outcome.applied & ~state.done
        return after, Trail(
            jnp.where(applied, state.moves.entry[slot], -1),
            root,
            state.moves.partner[slot],
            f.op[root],
            f.shape[root],
            f.rank[root],
            after.seconds,
            jnp.where(state.done, 0, state.moves.n),
        )

    return jax.lax.scan(one, state, jax.random.split(key, n_steps))
