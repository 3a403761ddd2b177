"""The predicted cost of a program does not depend on the numbering of its nodes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

from xrl_jax.cost.model import signatures
from xrl_jax.cost.roofline import cost_table
from xrl_jax.cost.view import view_graph
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.program.program import Program
from xrl_jax.search.base import predicted

SIZES = (4, 5, 6)  # of square matrices, each multiplied by itself
LEAST = 2.0**-24  # in single precision 1 + LEAST equals 1, but 1 + 2 * LEAST does not
SECONDS = (1.0, LEAST, LEAST)


def products(order: tuple[int, ...]) -> Program:
    """Return a program of three products, whose nodes are numbered in this order."""

    def fn(*xs: jax.Array) -> tuple[jax.Array, ...]:
        made = {i: xs[i] @ xs[i] for i in order}
        return tuple(made[i] for i in range(len(xs)))

    return from_jax(fn, *(jnp.ones((n, n)) for n in SIZES))


def test_a_prediction_does_not_depend_on_how_nodes_are_numbered() -> None:
    views = view_graph(cost_table({}).sharing, products((0, 1, 2)).graphs[0])
    keys = dict(zip(views.shape[:, 0].tolist(), signatures(jax.device_get(views)), strict=True))
    costs = cost_table({keys[n]: s for n, s in zip(SIZES, SECONDS, strict=True)})
    found = {predicted(products(order), costs) for order in itertools.permutations(range(3))}
    assert found == {1.0 + 2 * LEAST}
