"""The share of a program that the op table cannot express."""

from __future__ import annotations

from xrl_jax.graph import ops
from xrl_jax.graph.graph import nodes_of
from xrl_jax.program.program import Program


def opaque_share(program: Program) -> float:
    """Return the share of opaque nodes among all nodes, counting bodies once and no sources."""
    nodes = [n for g in program.graphs for n in nodes_of(g)[0]]
    work = [n for n in nodes if n.op not in (*ops.SOURCES, "pack", "proj")]
    return sum(n.op == "opaque" for n in work) / max(len(work), 1)
