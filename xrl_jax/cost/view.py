"""Views of nodes: everything that the cost of a node depends on, that is the node with the shapes,
dtypes and origins of its arguments, its class, and the signature of its timing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from xrl_jax.cost import fusion
from xrl_jax.engine.new_nodes import NewNodes
from xrl_jax.graph import ops, work
from xrl_jax.graph.graph import Nodes, TensorGraph, args_of
from xrl_jax.graph.hash import fold_words

# Classes of operators that share rates and a correction. Operators of class "free" cost nothing:
# views, sources, operators that XLA always fuses, and those that no rewrite changes (opaque
# equations; calls, whose bodies are counted as graphs of their own).
CLASSES = ("free", "conv", "dot", "window", "reduce", "movement", "elementwise")
# Groups of nodes that share a correction by whole programs: the classes, and separate groups for
# nodes in a partition. A kernel timed on its own overestimates XLA's kernels and underestimates a
# library's, whose caches are then warm, and which in a network rearranges arrays between kernels of
# different kinds. Entering and leaving a partition ("crossing") has its own correction: it depends
# on the machine and shows in no kernel's timing.
_KERNELS = ("conv", "tiles", "dot")  # of a partition; "partition" itself: nodes that join these
CORRECTED = (*CLASSES, "partition", *(f"partition {k}" for k in _KERNELS), "crossing")
_CLASS_OF_FAMILY = {
    "conv": "conv",
    "dot": "dot",
    "window": "window",
    "reduce": "reduce",
    "elementwise": "elementwise",
}
_MOVEMENT = ("transpose", "concat", "slice", "pad", "rev", "cast")
CLASS_OF: Mapping[str, str] = {
    name: "movement"
    if name in _MOVEMENT
    else "reduce"
    if name in work.SCANS
    else _CLASS_OF_FAMILY.get(work.FAMILY[name], "free")
    for name in ops.OPS
}
# Classes whose nodes are worth a timing of their own; elementwise loops are fused by XLA and left
# to the roofline.
MEASURED = ("conv", "dot", "window", "reduce", "movement")
# Kinds of an operator, within which its lowerings are compared. Products: without and with a batch.
# Convolutions: others, 1x1 and grouped, then the same three with features last.
KINDS, _FEATURES_LAST = 6, 3


class CostView(NamedTuple):
    """A node with everything around it that decides its cost; leading dimensions are free."""

    op: jax.Array  # [...]
    attrs: jax.Array  # [..., K]
    lowering: jax.Array  # [...]
    shape: jax.Array  # [..., R]
    rank: jax.Array  # [...]
    dtype: jax.Array  # [...]
    weight_only: jax.Array  # [...]
    arg_shapes: jax.Array  # [..., A, R]
    arg_ranks: jax.Array  # [..., A]
    arg_dtypes: jax.Array  # [..., A]
    arg_weight_only: jax.Array  # [..., A]
    arg_origins: jax.Array  # [..., A] see `fusion`


def view_new(new: NewNodes, origins: jax.Array | None = None) -> CostView:
    """Return views [Q, ...] of the nodes a rewrite makes.

    Args:
      origins: [2P + Q] of bound and new nodes (`fusion.origins_with`); without them all arguments
        count as written to memory.
    """
    args = new.arg_shapes, new.arg_ranks, new.arg_dtypes, new.arg_weight_only
    if origins is None:
        return _view(new.nodes, *args, jnp.full(new.args.shape, fusion.MEMORY))
    return _view(new.nodes, *args, fusion.of_args(new.args, origins))


def _view(f: Nodes, *args: jax.Array) -> CostView:
    own = f.op, f.attrs, f.lowering, f.shape, f.rank, f.dtype, f.weight_only
    return CostView(*own, *args)


def signature(view: CostView) -> jax.Array:
    """Return the 64-bit signature [..., 2] uint32 of everything that decides a node's time."""
    single = [view.op, view.lowering, view.rank, view.dtype, _bits(view.arg_weight_only)]
    flat = view.arg_shapes.reshape(*view.arg_shapes.shape[:-2], -1)
    words = [jnp.stack([jnp.asarray(s).astype(jnp.uint32) for s in single], axis=-1)]
    words += [
        jnp.asarray(w).astype(jnp.uint32)
        for w in (view.attrs, view.shape, flat, view.arg_ranks, view.arg_dtypes)
    ]
    return fold_words(jnp.concatenate(words, axis=-1))


def _bits(flags: jax.Array) -> jax.Array:
    return jnp.sum(flags * (1 << jnp.arange(flags.shape[-1])), axis=-1)


def lowering_kind_of(view: CostView) -> jax.Array:
    """Return the operator, kind and lowering [3] of one node."""
    conv, dot = ops.OPS["conv"], ops.OPS["dot"]

    def attr(spec: ops.OpSpec, name: str) -> jax.Array:
        return view.attrs[spec.field(name).offset]

    kernel = jnp.asarray(ops.LAYOUTS)[jnp.clip(attr(conv, "rhs_layout"), 0, len(ops.LAYOUTS) - 1)]
    spatial = jnp.where(kernel[2:] >= 0, view.arg_shapes[1][kernel[2:]], 1)
    image = jnp.asarray(ops.LAYOUTS)[jnp.clip(attr(conv, "lhs_layout"), 0, len(ops.LAYOUTS) - 1)]
    of_conv = jnp.where(attr(conv, "groups") > 1, 2, jnp.where(jnp.prod(spatial) == 1, 1, 0))
    of_conv += jnp.where(image[1] == jnp.max(image), _FEATURES_LAST, 0)
    of_dot = jnp.where(attr(dot, "lhs_batch") != 0, 1, 0)
    kind = jnp.where(view.op == conv.code, of_conv, jnp.where(view.op == dot.code, of_dot, 0))
    return jnp.stack([view.op, kind, view.lowering])


def view_graph(of: fusion.Sharing, graph: TensorGraph) -> CostView:
    """Return views [N, ...] of all nodes of a graph."""
    f, table = graph.nodes, args_of(graph)
    present = table > 0
    return _view(
        f,
        jnp.where(present[..., None], f.shape[table], 1),
        jnp.where(present, f.rank[table], 0),
        jnp.where(present, f.dtype[table], 0),
        present & f.weight_only[table],
        fusion.origins(of, graph)[table],
    )


def in_other_layout(lowering_kind: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return a convolution's lowering kind with the features in the other place; for other
    operators, a lowering kind that does not occur.
    """
    op, kind, lowering = lowering_kind
    return op, (kind + _FEATURES_LAST) % KINDS, lowering
