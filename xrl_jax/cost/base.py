"""The interface of cost models that searches use: `CostModel`."""

from __future__ import annotations

from typing import Protocol

import jax

from xrl_jax.engine.delta import Price
from xrl_jax.graph.graph import TensorGraph


class CostModel(Protocol):
    """Costs of nodes on a target. A pytree; its methods are pure and traceable.

    A node's cost is one scalar: its time in seconds, plus the error that its lowering adds,
    converted to seconds.
    """

    def priced(self, graph: TensorGraph) -> TensorGraph:
        """Return the graph with the cost of every node set."""
        ...

    def repriced(self, graph: TensorGraph, before: TensorGraph) -> TensorGraph:
        """Return the graph priced as by `priced`; it differs in few nodes from `before`, which this
        model has priced.
        """
        ...

    def price_of_new(self, graph: TensorGraph) -> Price:
        """Return the `Price` of rewrites of a priced graph (see `engine.delta`)."""
        ...

    def error(self, graph: TensorGraph) -> jax.Array:
        """Return the sum [] of the relative errors that the graph's lowerings are stated to add."""
        ...
