"""NASRNN: the recurrent cell found by Zoph & Le 2017 (arXiv:1611.01578), and TASO's graph of it.

`nasrnn` is the cell of the paper's appendix as `tf.contrib.rnn.NASCell` implements it, with a
matrix multiplication for each of its sixteen weights, which all steps share. `nasrnn_taso` is the
graph of TASO's `examples/nasrnn.py` (Jia et al. 2019, SOSP): another cell of the same size, without
a cell state, and with weights of its own for every step. Speed-ups on the latter are for comparison
with published figures only.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import relu, sigmoid

from experiments.models.base import Model, normal
from experiments.models.transformer import run_layers, stacked

GATES = 8
Weights = dict[str, list[Any]]  # "input" and "hidden": a [D, D] kernel for each gate


def cell(
    weights: Weights, x: jax.Array, hidden: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the new hidden and cell state after one step, from input and states [B, D]."""
    a = [x @ kernel for kernel in weights["input"]]
    b = [hidden @ kernel for kernel in weights["hidden"]]
    left = jnp.tanh(sigmoid(a[0] + b[0]) * relu(a[1] + b[1]))
    second = jnp.tanh(sigmoid(a[2] + b[2]) + relu(a[3] * b[3]))
    third = jnp.tanh(jnp.tanh(a[4] + b[4]) * sigmoid(a[5] + b[5]))
    right = sigmoid(jnp.tanh(a[6] + b[6]) + sigmoid(a[7] + b[7]))
    state = jnp.tanh(left + state) * second
    return jnp.tanh(state * jnp.tanh(third + right)), state


def taso_cell(weights: Weights, x: jax.Array, hidden: jax.Array) -> jax.Array:
    """Return the new hidden state after one step of TASO's cell, from input and state [B, D]."""
    t = [
        x @ first + hidden @ second
        for first, second in zip(weights["input"], weights["hidden"], strict=True)
    ]
    first = relu(t[0]) + sigmoid(t[3])
    second = sigmoid(t[1]) + jnp.tanh(t[2])
    third = sigmoid(t[4]) * jnp.tanh(t[5])
    fourth = sigmoid(t[6]) * relu(t[7])
    left = sigmoid(second) + jnp.tanh(third)
    right = jnp.tanh(first) * jnp.tanh(fourth)
    return jnp.tanh(jnp.tanh(left) * jnp.tanh(right))


def cell_weights(rng: np.random.Generator, width: int) -> Weights:
    """Draw sixteen kernels [width, width]."""
    return {
        name: [normal(rng, (width, width), std=width**-0.5) for _ in range(GATES)]
        for name in ("input", "hidden")
    }


def check_sizes(name: str, **sizes: int) -> None:
    """Raise ValueError for a size below 1."""
    for option, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: {option} is {size}, use at least 1")


def nasrnn(
    seed: int = 0, *, steps: int = 5, hidden: int = 512, batch: int = 1, scan: bool = False
) -> Model:
    """Build NASRNN with random weights.

    Inputs are the sequence [steps, batch, hidden] and the initial hidden and cell state
    [batch, hidden]. Outputs are the hidden states [steps, batch, hidden] and the last cell state
    [batch, hidden]. With `scan`, the steps run under `lax.scan`.
    """
    check_sizes("nasrnn", steps=steps, hidden=hidden)
    rng = np.random.default_rng(seed)

    def forward(
        weights: Weights, xs: jax.Array, first: jax.Array, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return all hidden states [T, B, D] and the last cell state [B, D]."""

        def step(
            carry: tuple[jax.Array, jax.Array], x: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            carry = cell(weights, x, *carry)
            return carry, carry[0]

        carry = (first, state)
        if scan:
            carry, states = lax.scan(step, carry, xs)
            return states, carry[1]
        states = []
        for t in range(steps):
            carry, new = step(carry, xs[t])
            states.append(new)
        return jnp.stack(states), carry[1]

    weights = cell_weights(rng, hidden)
    xs = normal(rng, (steps, batch, hidden), std=1.0)
    first = normal(rng, (batch, hidden), std=0.5)
    return Model("nasrnn", forward, weights, (xs, first, normal(rng, (batch, hidden), std=0.5)))


def nasrnn_taso(
    seed: int = 0, *, steps: int = 5, hidden: int = 512, batch: int = 1, scan: bool = False
) -> Model:
    """Build TASO's graph with random weights; its first hidden state is a weight.

    Inputs are `steps` arrays [batch, hidden]; the output is the last hidden state [batch, hidden].
    With `scan`, the weights of the steps are stacked and the steps run under `lax.scan`.
    """
    check_sizes("nasrnn_taso", steps=steps, hidden=hidden)
    rng = np.random.default_rng(seed)
    cells: Any = [cell_weights(rng, hidden) for _ in range(steps)]
    if scan:
        cells = stacked(cells)

    def forward(weights: dict[str, Any], *xs: jax.Array) -> jax.Array:
        """Return the last hidden state [B, D]."""
        cells = weights["cells"]
        pairs: Any = (cells, jnp.stack(xs)) if scan else list(zip(cells, xs, strict=True))
        return run_layers(
            lambda pair, state: taso_cell(pair[0], pair[1], state),
            pairs,
            weights["state"],
            scan=scan,
        )

    weights = {"cells": cells, "state": normal(rng, (batch, hidden), std=0.5)}
    xs = tuple(normal(rng, (batch, hidden), std=1.0) for _ in range(steps))
    return Model("nasrnn_taso", forward, weights, xs)
