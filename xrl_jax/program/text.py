"""Parses programs from their text form, which is `str(program)`."""

from __future__ import annotations

from xrl_jax.graph.text import GraphTextError, parse_blocks
from xrl_jax.program.program import Program


def parse_program(text: str, *, like: Program) -> Program:
    """Return `like` with the graphs of a text written by `str(program)`.

    Bindings, types and tree structures are those of `like`.

    Raises:
      GraphTextError: as for `parse_blocks`; or the graphs are not main, body0, ... as in `like`.
    """
    blocks = parse_blocks(text)
    wanted = ["main", *(f"body{i}" for i in range(len(like.bodies)))]
    for i, (name, _, line) in enumerate(blocks):
        if i >= len(wanted) or name != wanted[i]:
            expected = wanted[i] if i < len(wanted) else "no further graph"
            raise GraphTextError(line, 1, f"expected {expected}, found graph {name!r}")
    if len(blocks) < len(wanted):
        raise GraphTextError(
            len(text.splitlines()) or 1, 1, f"graph {wanted[len(blocks)]} is missing"
        )
    return like.with_graphs([graph for _, graph, _ in blocks])
