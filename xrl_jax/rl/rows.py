"""Lookup of rows in a table, with gradients that a GPU can add in a deterministic order."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from xrl_jax.runtime.engine_jit import wide


def rows(table: jax.Array, index: jax.Array) -> jax.Array:
    """Return `table[index]`: rows [..., D] of a table [n, D] by indices [...].

    The gradient of a row that was read many times is a sum. A scatter adds in any order or, if it
    has to be deterministic, almost sequentially, which is slow on a GPU. So on a wide device the
    gradient is a product with a one-hot matrix.
    """
    return _rows(len(table), table, index) if wide() else table[index]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(n: int, table: jax.Array, index: jax.Array) -> jax.Array:
    return table[index]


def _forward(n: int, table: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    return table[index], index


def _backward(n: int, index: jax.Array, gradient: jax.Array) -> tuple[jax.Array, Any]:
    hot = jax.nn.one_hot(index.reshape(-1), n, axis=0, dtype=gradient.dtype)  # [n, rows]
    of_table = hot @ gradient.reshape(index.size, -1)
    return of_table, np.zeros(index.shape, jax.dtypes.float0)


_rows.defvjp(_forward, _backward)
