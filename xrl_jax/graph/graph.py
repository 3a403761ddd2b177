"""Tensor graphs as padded jraph structures.

A tensor graph is a `jraph.GraphsTuple` of fixed size: N nodes (a bucket), A argument slots each.
Node 0 is always a hole (an unused slot) and stands for "no argument", so every gather is in range.
Edges are kept in (receiver, slot) order, so the argument table [N, A] is a reshape of the senders.
Slots are stable under rewriting; compaction happens when a bucket grows.

Letters: N nodes, A arguments, K attributes, R rank, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import jraph
import numpy as np

from xrl_jax.graph import ops, shapes

BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DEPTH_STEP = 32  # initial distance above the arguments, so that most rewrites raise no depths
_HEADROOM = 24  # free slots a graph starts with, so that the first rewrites fit


class GraphError(ValueError):
    """A tensor graph that is not well formed; the message names the node."""


class Nodes(NamedTuple):
    """Node features, set once when a node is created."""

    op: jax.Array  # [N] int32, index into ops.OP_NAMES; 0 is a hole
    attrs: jax.Array  # [N, K] int32, laid out by the op's fields
    lowering: jax.Array  # [N] int32, index of the lowering to lax code; 0 is the plain one
    shape: jax.Array  # [N, R] int32, padded by ones
    rank: jax.Array  # [N] int32
    dtype: jax.Array  # [N] int32, index into ops.DTYPES
    value: jax.Array  # [N] float32, of scalar constants
    ref: jax.Array  # [N] int32, index into the bindings; -1 for none
    weight_only: jax.Array  # [N] bool, depends on weights and constants only
    cost: jax.Array  # [N] float32, seconds


class Globals(NamedTuple):
    """Features of the graph as a whole."""

    outputs: jax.Array  # [O] int32 node indices, padded by -1
    depth: jax.Array  # [N] int32, above every argument's depth (a topological order); 0 on holes


if TYPE_CHECKING:

    class TensorGraph(NamedTuple):
        """`jraph.GraphsTuple` for type checkers, because its own field types are too general."""

        nodes: Nodes
        edges: jax.Array  # [N * A] int32, slot
        receivers: jax.Array  # [N * A] int32
        senders: jax.Array  # [N * A] int32
        globals: Globals
        n_node: jax.Array  # [1] int32
        n_edge: jax.Array  # [1] int32
else:
    TensorGraph = jraph.GraphsTuple


def assert_one(graph: TensorGraph, *per_node: jax.Array) -> None:
    """Assert, while tracing, that `graph` is a single graph and that arrays have a row per node.

    Raises:
      AssertionError: the graph is a batch, or an array has another number of rows; the message says
        which.
    """
    batch = "this takes one graph at a time: use jax.vmap for a batch of graphs"
    chex.assert_rank(graph.nodes.op, 1, custom_message=batch)
    n = graph.nodes.op.shape[0]
    chex.assert_tree_shape_prefix(
        (graph.nodes, per_node),
        (n,),
        custom_message=f"arrays must have a row for each of {n} nodes",
    )


def assert_one_candidate(*indices: jax.Array) -> None:
    """Assert, while tracing, that indices are scalars.

    Raises:
      AssertionError: they are not; the message says what to do.
    """
    batch = "this takes one candidate at a time: use jax.vmap for several"
    chex.assert_rank(indices, 0, custom_message=batch)


def args_of(graph: TensorGraph) -> jax.Array:
    """Return the argument table [N, A]; 0 stands for no argument."""
    return graph.senders.reshape(-1, ops.MAX_ARGS)


def with_args(graph: TensorGraph, table: jax.Array) -> TensorGraph:
    """Return the graph with another argument table [N, A]."""
    return graph._replace(senders=table.reshape(-1))


@dataclass(frozen=True)
class Node:
    """One node on the host. `args` index the surrounding list of nodes."""

    op: str
    args: tuple[int, ...] = ()
    attrs: tuple[int, ...] = (0,) * ops.MAX_ATTRS
    lowering: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    value: float = 0.0
    ref: int = -1

    @property
    def spec(self) -> ops.OpSpec:
        return ops.OPS[self.op]

    def attr(self, name: str) -> int | tuple[int, ...]:
        """Return an attribute by name: an integer, or a tuple where the field is wide."""
        field = self.spec.field(name)
        values = self.attrs[field.attr_slice]
        return values[0] if field.width == 1 else values

    def scalar_attr(self, name: str) -> int:
        """Return an attribute of width one."""
        value = self.attr(name)
        assert isinstance(value, int)
        return value

    def dims(self, name: str, rank: int | None = None) -> tuple[int, ...]:
        """Return the first `rank` entries of a wide attribute; all of them by default."""
        value = self.attr(name)
        assert isinstance(value, tuple)
        return value[:rank]

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the mask attribute `axes`."""
        return ops.axes_of(self.scalar_attr("axes"))


def pack_attrs(op: str, values: dict[str, int | Sequence[int]]) -> tuple[int, ...]:
    """Return the attribute vector [K] of an op from named values.

    Missing values and short sequences are padded with the fill values of the field's kind.
    """
    out = [0] * ops.MAX_ATTRS
    spec = ops.OPS[op]
    for field in spec.fields:
        given: Any = values.get(field.name)
        if given is None:
            given = ()
        elif field.width == 1:
            given = (given,)
        row = [int(v) for v in given]
        if len(row) > field.width:
            raise GraphError(f"{op}.{field.name} takes {field.width} values, got {len(row)}: {row}")
        out[field.attr_slice] = [*row, *field.fill[len(row) :]]
    unknown = set(values) - {f.name for f in spec.fields}
    if unknown:
        spec.field(sorted(unknown)[0])
    return tuple(out)


def padded(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape padded by ones to R entries; longer shapes are cut off (only `opaque`,
    `call`, `pack` and `proj` nodes read such arrays).
    """
    return tuple(shape[: ops.MAX_RANK]) + (1,) * (ops.MAX_RANK - len(shape))


def infer(
    op: str, attrs: Sequence[int], args: Sequence[Node]
) -> tuple[tuple[int, ...], str] | None:
    """Infer the shape and dtype of a node from its arguments; None where these do not fit.

    Raises:
      GraphError: the op's shape is given with the node, so it cannot be inferred.
    """
    spec = ops.OPS[op]
    if spec.shape == "given":
        raise GraphError(f"the shape of a {op!r} node cannot be inferred")
    sizes = np.ones((ops.MAX_ARGS, ops.MAX_RANK), np.int64)
    ranks = np.zeros(ops.MAX_ARGS, np.int64)
    for i, arg in enumerate(args):
        sizes[i], ranks[i] = padded(arg.shape), len(arg.shape)
    shape, rank, ok = shapes.shape_of(spec, attrs, sizes, ranks, len(args))
    if not ok:
        return None
    dtypes = tuple(ops.DTYPE_CODE[a.dtype] for a in args)
    return tuple(int(d) for d in shape[:rank]), ops.DTYPES[shapes.dtype_of(spec, attrs, dtypes)]


def bucket_for(n_nodes: int, *, room: int = 0) -> int:
    """Return the bucket a graph of `n_nodes` starts in.

    Args:
      room: minimum number of free slots; a few are always left free.
    """
    for size in BUCKETS:
        if n_nodes + max(_HEADROOM, room) + 1 <= size:
            return size
    raise GraphError(f"a graph of {n_nodes} nodes exceeds the largest bucket, {BUCKETS[-1]}")


def build(
    nodes: Sequence[Node], outputs: Sequence[int], *, bucket: int | None = None
) -> TensorGraph:
    """Build a tensor graph from nodes in topological order; node i of the list gets slot i + 1.

    Args:
      nodes: every argument index is smaller than the node's own.
      outputs: indices into `nodes`.
      bucket: number of slots; by default the smallest bucket with room to rewrite.
    """
    return jax.tree.map(jnp.asarray, build_on_host(nodes, outputs, bucket=bucket))


def build_on_host(
    nodes: Sequence[Node], outputs: Sequence[int], *, bucket: int | None = None
) -> TensorGraph:
    """Do what `build` does in NumPy, so that many small graphs can be stacked on the host first."""
    size = bucket or bucket_for(len(nodes))
    if len(nodes) + 1 > size:
        raise GraphError(f"{len(nodes)} nodes do not fit into a bucket of {size}")
    n_out = max(8, 1 << (max(len(outputs), 1) - 1).bit_length())
    op = _host(size, np.int32)
    attrs = _host((size, ops.MAX_ATTRS), np.int32)
    lowering = _host(size, np.int32)
    shape = _host((size, ops.MAX_RANK), np.int32, fill=1)
    rank = _host(size, np.int32)
    dtype = _host(size, np.int32)
    value = _host(size, np.float32)
    ref = _host(size, np.int32, fill=-1)
    weight_only = _host(size, bool)
    depth = _host(size, np.int32)
    table = _host((size, ops.MAX_ARGS), np.int32)
    for i, node in enumerate(nodes):
        slot = i + 1
        if len(node.args) > ops.MAX_ARGS:
            raise GraphError(f"node %{i} ({node.op}) has {len(node.args)} arguments")
        if any(a >= i or a < 0 for a in node.args):
            raise GraphError(f"node %{i} ({node.op}) comes before its arguments {node.args}")
        args = [a + 1 for a in node.args]
        op[slot] = node.spec.code
        attrs[slot] = node.attrs
        lowering[slot] = node.lowering
        shape[slot] = padded(node.shape)
        rank[slot] = len(node.shape)
        dtype[slot] = ops.DTYPE_CODE[node.dtype]
        value[slot] = node.value
        ref[slot] = node.ref
        table[slot, : len(args)] = args
        pinned = node.op in ("opaque", "call") and node.scalar_attr("pinned")
        if node.op in ("weight", "array", "const", "iota"):
            weight_only[slot] = True
        elif node.op != "input" and not pinned:
            weight_only[slot] = all(weight_only[a] for a in args)
        depth[slot] = DEPTH_STEP + max((int(depth[a]) for a in args), default=0)
    out = _host(n_out, np.int32, fill=-1)
    out[: len(outputs)] = [o + 1 for o in outputs]
    cost = _host(size, np.float32)
    slots: Any = np.tile(np.arange(ops.MAX_ARGS, dtype=np.int32), size)
    receivers: Any = np.repeat(np.arange(size, dtype=np.int32), ops.MAX_ARGS)
    return TensorGraph(
        nodes=Nodes(op, attrs, lowering, shape, rank, dtype, value, ref, weight_only, cost),
        edges=slots,
        senders=table.reshape(-1),
        receivers=receivers,
        globals=Globals(out, depth),
        n_node=_host(1, np.int32, fill=size),
        n_edge=_host(1, np.int32, fill=size * ops.MAX_ARGS),
    )


def _host(shape: int | tuple[int, ...], dtype: Any, *, fill: int = 0) -> Any:
    """Return a filled NumPy array, typed as Any because it stands for a device array."""
    return np.full(shape, fill, dtype)


def node_at(f: Nodes, slot: int, args: Sequence[int]) -> Node:
    """Return the node of a slot, with these arguments; sizes beyond MAX_RANK dimensions are 1.

    Args:
      f: arrays on the host; the slot must hold a known operator and dtype.
    """
    rank = int(f.rank[slot])
    shape = tuple(int(d) for d in f.shape[slot][: max(rank, 0)])
    return Node(
        op=ops.OP_NAMES[int(f.op[slot])],
        args=tuple(args),
        attrs=tuple(int(a) for a in f.attrs[slot]),
        lowering=int(f.lowering[slot]),
        shape=shape + (1,) * (rank - len(shape)),
        dtype=ops.DTYPES[int(f.dtype[slot])],
        value=float(f.value[slot]),
        ref=int(f.ref[slot]),
    )


def nodes_of(graph: TensorGraph) -> tuple[list[Node], tuple[int, ...], list[int]]:
    """Return the live nodes in topological order, outputs as indices into them, and nodes' slots.

    Only nodes that an output or a pinned node depends on are live.
    """
    host = jax.tree.map(np.asarray, graph)
    f: Nodes = host.nodes
    table = host.senders.reshape(-1, ops.MAX_ARGS)
    outputs = [int(o) for o in host.globals.outputs if o >= 0]
    holders = np.isin(f.op, [ops.OPS["opaque"].code, ops.OPS["call"].code])
    pinned = [int(i) for i in np.flatnonzero(holders & (f.attrs[:, 0] == 1))]
    order: list[int] = []
    state: dict[int, int] = {}  # 1 while its arguments are visited, 2 when done
    for root in pinned + outputs:
        stack = [root]
        while stack:
            n = stack[-1]
            if state.get(n) == 2:
                stack.pop()
                continue
            pending = [int(a) for a in table[n] if a and state.get(int(a)) != 2]
            if not pending:
                state[n] = 2
                order.append(n)
                stack.pop()
            elif state.get(n) == 1 and any(state.get(a) == 1 for a in pending):
                raise GraphError(f"the graph has a cycle through node %{n}")
            else:
                state[n] = 1
                stack.extend(reversed(pending))
    order.sort(key=lambda n: (int(host.globals.depth[n]), n))
    index = {slot: i for i, slot in enumerate(order)}
    nodes = [node_at(f, n, [index[int(a)] for a in table[n] if a]) for n in order]
    return nodes, tuple(index[o] for o in outputs), order


def grow(graph: TensorGraph, bucket: int | None = None) -> TensorGraph:
    """Return the graph compacted into a larger bucket, by default the next; costs and the room for
    outputs are kept.
    """
    nodes, outputs, slots = nodes_of(graph)
    n = graph.nodes.op.shape[0]
    size = bucket or next((b for b in BUCKETS if b > n), 0)
    if not size:
        raise GraphError(f"the graph is in the largest bucket already ({n})")
    grown = build(nodes, outputs, bucket=size)
    cost = (
        jnp.zeros(size, jnp.float32)
        .at[1 : len(slots) + 1]
        .set(graph.nodes.cost[jnp.asarray(slots)])
    )
    grown = grown._replace(nodes=grown.nodes._replace(cost=cost))
    return with_room_for_outputs(grown, len(graph.globals.outputs))


def with_room_for_outputs(graph: TensorGraph, n_out: int) -> TensorGraph:
    """Return the graph with room for `n_out` outputs, no fewer than it has room for."""
    outputs = graph.globals.outputs
    more = jnp.full(n_out - len(outputs), -1, outputs.dtype)
    return graph._replace(globals=graph.globals._replace(outputs=jnp.append(outputs, more)))


def n_live(graph: TensorGraph) -> jax.Array:
    """Return the number of nodes that are not holes."""
    return jnp.sum(graph.nodes.op != ops.HOLE)


def renumber(
    nodes: Sequence[Node], outputs: Sequence[int], keep: Sequence[int]
) -> tuple[list[Node], tuple[int, ...]]:
    """Return the nodes `keep` (ascending, closed under arguments) and outputs, renumbered."""
    index = {old: new for new, old in enumerate(keep)}
    kept = [replace(nodes[i], args=tuple(index[a] for a in nodes[i].args)) for i in keep]
    return kept, tuple(index[o] for o in outputs)
