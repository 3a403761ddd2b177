"""What a search asks of costs: `CostModel`."""

from __future__ import annotations

from typing import Protocol

import jax

from xrl_jax.engine.delta import Price
from xrl_jax.graph.graph import TensorGraph


class CostModel(Protocol):
    """What nodes cost on a target. A pytree; its methods are pure and traced.

    A cost is one number of two parts: seconds, and what the error is worth that lowerings add.
    """

    def priced(self, graph: TensorGraph) -> TensorGraph:
        """The graph with the cost of every node set."""
        ...

    def repriced(self, graph: TensorGraph, before: TensorGraph) -> TensorGraph:
        """`priced`, for a graph that differs in a few nodes from one that this model has priced."""
        ...

    def price_of_new(self, graph: TensorGraph) -> Price:
        """What rewrites of a priced graph add (see `engine.delta`)."""
        ...

    def error(self, graph: TensorGraph) -> jax.Array:
        """Relative errors [] that the lowerings of a graph are stated to add, summed up."""
        ...
