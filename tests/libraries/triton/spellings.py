"""Attention as other people write it, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xrl_jax.graph import equations
from xrl_jax.graph.equations import JITS, read
from xrl_jax.libraries.triton.product import product_p


class Spelling(NamedTuple):
    """A function and the shapes of its arguments."""

    fn: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]


def marked(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the closed jaxpr of a function with all products marked, calls inlined."""

    def run(closed: Any, values: Any) -> list[Any]:
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(closed.jaxpr.invars, values, strict=True))
        for e in closed.jaxpr.eqns:
            operands = [read(env, v) for v in e.invars]
            if e.primitive.name in JITS:
                results = run(e.params["jaxpr"], operands)
            elif e.primitive is lax.dot_general_p:
                results = [product_p.bind(*operands, **e.params)]
            else:
                results = equations.bind(e, operands)
            env.update(zip(e.outvars, results, strict=True))
        return [read(env, v) for v in closed.jaxpr.outvars]

    return jax.make_jaxpr(lambda *values: run(jax.make_jaxpr(fn)(*args), values))(*args)


def heads_first(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    scores = q @ k.swapaxes(-1, -2) / 8 + mask
    return jax.nn.softmax(scores) @ v


def packed(y: jax.Array, bias: jax.Array) -> jax.Array:
    """BERT with one product for queries, keys and values."""
    tokens = y.shape[0]
    q, k, v = ((y + bias).reshape(tokens, 3, 4, 16)[:, i].swapaxes(0, 1) for i in range(3))
    return (jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4) @ v).swapaxes(0, 1).reshape(tokens, 64)


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Flax: heads before features, the mask by `where`."""
    weights = jnp.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(16.0), k)
    i = jnp.arange(weights.shape[-1])
    weights = jax.nn.softmax(jnp.where(i[:, None] >= i, weights, -1e9))
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


def repeated_keys(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Grouped queries by repeating keys and values."""
    k, v = jnp.repeat(k, 2, 1), jnp.repeat(v, 2, 1)
    return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v


def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Grouped queries with a further axis."""
    weights = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", q, k))
    return jnp.einsum("bkgts,bskd->btkgd", weights, v)


def transposed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Columns of scores in place of rows, values on the left."""
    weights = jax.nn.softmax(k @ q.swapaxes(-1, -2), axis=-2)
    return v.swapaxes(-1, -2) @ weights


def features_first(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Heads and features of the result become one axis, before its rows."""
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bkhd,bhqk->bhdq", v, weights).reshape(2, 32, 20)


def of_jax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def without_softmax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Squared ReLU, divided by the sum of each row."""
    weights = jnp.maximum(q @ k.swapaxes(-1, -2), 0) ** 2
    return (weights / (jnp.sum(weights, -1, keepdims=True) + 1e-3)) @ v


def windowed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    i = jnp.arange(q.shape[1])
    there = (i[:, None] >= i) & (i[:, None] - i < 8)
    return jax.nn.softmax(jnp.where(there, q @ k.swapaxes(-1, -2), -jnp.inf)) @ v


SPELLINGS = {
    "heads first": Spelling(
        heads_first, ((2, 3, 17, 8), (2, 3, 33, 8), (2, 3, 33, 24), (2, 1, 1, 33))
    ),
    "packed": Spelling(packed, ((24, 192), (192,))),
    "causal": Spelling(causal, ((2, 20, 3, 16),) * 3),
    "repeated keys": Spelling(repeated_keys, ((1, 4, 20, 16), (1, 2, 20, 16), (1, 2, 20, 16))),
    "grouped": Spelling(grouped, ((1, 20, 2, 3, 16), (1, 20, 2, 16), (1, 20, 2, 16))),
    "transposed": Spelling(transposed, ((2, 20, 16), (2, 24, 16), (2, 24, 8))),
    "features first": Spelling(features_first, ((2, 20, 4, 8),) * 3),
    "of jax": Spelling(of_jax, ((2, 20, 4, 16), (2, 20, 2, 16), (2, 20, 2, 16))),
    "without softmax": Spelling(without_softmax, ((2, 40, 16),) * 3),
    "windowed": Spelling(windowed, ((2, 40, 16),) * 3),
    "one row": Spelling(heads_first, ((2, 3, 1, 8), (2, 3, 9, 8), (2, 3, 9, 8), (2, 1, 1, 9))),
    "long rows": Spelling(
        heads_first, ((1, 2, 70, 64), (1, 2, 600, 64), (1, 2, 600, 64), (70, 600))
    ),
}
