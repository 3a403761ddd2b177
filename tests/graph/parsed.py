"""Parsing of a single graph."""

from __future__ import annotations

from xrl_jax.graph.graph import TensorGraph
from xrl_jax.graph.text import parse_blocks


def parse_graph(text: str) -> TensorGraph:
    """Return the graph that `format_graph` wrote."""
    ((_, graph, _),) = parse_blocks(text)
    return graph
