"""A node with the shapes and dtypes around it, which decide which lowerings are valid for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, TensorGraph, args_of, padded


class NodeView(NamedTuple):
    """One node or many (leading dimensions), as NumPy or JAX arrays; shapes are padded by ones."""

    op: Any  # [...] int32
    attrs: Any  # [..., K] int32
    lowering: Any  # [...] int32
    shape: Any  # [..., R] int32
    rank: Any  # [...] int32
    dtype: Any  # [...] int32
    arg_shapes: Any  # [..., A, R] int32
    arg_ranks: Any  # [..., A] int32; 0 where there is no argument
    arg_dtypes: Any  # [..., A] int32; 0 where there is no argument


def view_of(node: Node, args: Sequence[Node]) -> NodeView:
    """Return the view of one node on the host."""
    shapes = np.ones((ops.MAX_ARGS, ops.MAX_RANK), np.int32)
    ranks, dtypes = np.zeros(ops.MAX_ARGS, np.int32), np.zeros(ops.MAX_ARGS, np.int32)
    for i, arg in enumerate(args):
        shapes[i], ranks[i] = padded(arg.shape), len(arg.shape)
        dtypes[i] = ops.DTYPE_CODE[arg.dtype]
    return NodeView(
        np.int32(node.spec.code),
        np.asarray(node.attrs, np.int32),
        np.int32(node.lowering),
        np.asarray(padded(node.shape), np.int32),
        np.int32(len(node.shape)),
        np.int32(ops.DTYPE_CODE[node.dtype]),
        shapes,
        ranks,
        dtypes,
    )


def views_at(graph: TensorGraph, slots: Any) -> NodeView:
    """Return the views [...] of the nodes at these slots [...] of a graph (traceable)."""
    f, args = graph.nodes, args_of(graph)[slots]
    there = args > 0
    return NodeView(
        f.op[slots],
        f.attrs[slots],
        f.lowering[slots],
        f.shape[slots],
        f.rank[slots],
        f.dtype[slots],
        jnp.where(there[..., None], f.shape[args], 1),
        jnp.where(there, f.rank[args], 0),
        jnp.where(there, f.dtype[args], 0),
    )
