"""A single graph from its text form."""

from __future__ import annotations

from xrl_jax.graph.graph import TensorGraph
from xrl_jax.graph.text import parse_blocks


def parse_graph(text: str) -> TensorGraph:
    """The graph that `format_graph` wrote."""
    ((_, graph, _),) = parse_blocks(text)
    return graph
