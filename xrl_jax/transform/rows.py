"""Nodes that split arrays along their first axis and concatenate them again."""

from __future__ import annotations

from collections.abc import Sequence

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, pack_attrs


def append_reshape(nodes: list[Node], x: int, shape: tuple[int, ...]) -> int:
    """Append a reshape of x; return x itself if it already has that shape."""
    if nodes[x].shape == shape:
        return x
    attrs = pack_attrs("reshape", {"shape": shape, "rank": len(shape)})
    nodes.append(Node("reshape", (x,), attrs, shape=shape, dtype=nodes[x].dtype))
    return len(nodes) - 1


def append_slice(nodes: list[Node], x: int, start: int, limit: int) -> int:
    """Append x[start:limit] and return its index."""
    shape, dtype = nodes[x].shape, nodes[x].dtype
    rest = shape[1:]
    attrs = pack_attrs(
        "slice",
        {
            "start": (start, *(0 for _ in rest)),
            "limit": (limit, *rest),
            "stride": (1,) * len(shape),
        },
    )
    nodes.append(Node("slice", (x,), attrs, shape=(limit - start, *rest), dtype=dtype))
    return len(nodes) - 1


def append_concat(nodes: list[Node], parts: Sequence[int]) -> int:
    """Append the concatenation of the parts along axis 0; a single part is returned unchanged."""
    attrs = pack_attrs("concat", {"axis": 0})
    parts = list(parts)
    while len(parts) > 1:
        groups = [parts[i : i + ops.MAX_ARGS] for i in range(0, len(parts), ops.MAX_ARGS)]
        parts = []
        for group in groups:
            first = nodes[group[0]]
            shape = (sum(nodes[g].shape[0] for g in group), *first.shape[1:])
            nodes.append(Node("concat", tuple(group), attrs, shape=shape, dtype=first.dtype))
            parts.append(len(nodes) - 1)
    return parts[0]
