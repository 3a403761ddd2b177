"""Valid and invalid targets for `--fn`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def forward(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Return tanh(x @ weight)."""
    return jnp.tanh(x @ weight)


def with_weights() -> tuple:
    return forward, (jnp.ones((4, 3)), jnp.ones((2, 4))), (0,)


def with_one_weight() -> tuple:
    return forward, (jnp.ones((4, 3)), jnp.ones((2, 4))), 0


def without_weights() -> tuple:
    return forward, (jnp.ones((4, 3)), jnp.ones((2, 4)))


def no_tuple() -> dict[str, int]:
    return {"fn": 1}


ready = (
    forward,
    [jax.ShapeDtypeStruct((4, 3), "float32"), jax.ShapeDtypeStruct((2, 4), "float32")],
)
