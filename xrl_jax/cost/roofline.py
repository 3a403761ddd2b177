"""What a node costs inside jit: a measured time where there is one, a calibrated roofline
elsewhere.

A node is looked at with what surrounds it at once (`NodeView`): operator, attributes, lowering,
result and arguments. Its signature is a 64-bit hash of that; the cost table holds measured seconds
by signature. The roofline (Williams, Waterman, Patterson, CACM 2009) is max(flops / rate, bytes /
bandwidth) + overhead, with rates fitted to the timings in the store, times what the node's form
took elsewhere in the median, in multiples of its roofline.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost import fusion
from xrl_jax.engine.delta import Price
from xrl_jax.engine.instantiate import Asked
from xrl_jax.engine.new_nodes import NewNodes
from xrl_jax.graph import ops, work
from xrl_jax.graph.graph import Nodes, TensorGraph, args_of
from xrl_jax.graph.hash import fold_words
from xrl_jax.libraries.registry import calls
from xrl_jax.lower.table import LOWERINGS
from xrl_jax.runtime.engine_jit import wide

# Classes of operators that share rates and a correction. What is free costs nothing: views,
# sources, what XLA always fuses, and what no rewrite changes (opaque equations; calls, whose bodies
# are counted as graphs of their own).
CLASSES = ("free", "conv", "dot", "window", "reduce", "movement", "elementwise")
# What shares a correction by whole programs: a class, but for what a partition computes of any. One
# kernel alone says too much of XLA's kernels and too little of a library's, whose caches are warm,
# and which rearranges arrays between kernels of different kinds. What it takes to enter and leave
# one is no kernel's: it depends on the machine, and no kernel's own timing tells.
_KERNELS = ("conv", "tiles", "dot")  # of a partition; "partition" is what joins these
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
_LOOPS, _PARTITION, _CROSSING = map(CORRECTED.index, ("elementwise", "partition", "crossing"))
_READS_IN_LOOP = np.array([CLASS_OF[n] in ("reduce", "movement") for n in ops.OP_NAMES])
_CHUNKS = 8  # in which, on a CPU, nodes are gone through, where some of many count
_LEAST_SHARE = 0.2  # of a node's time is left where its reads are paid by others
_WEIGHT_ONLY = 1e-3  # share of its roofline that work done once counts for
# Forms are compared among operators of one kind: products with a batch and without; convolutions
# 1x1, grouped and others, then the same with features last.
KINDS, _FEATURES_LAST = 6, 3
_FORMS = 32  # of one operator, at most
TABLE_BUCKETS = (256, 1024, 4096, 16384, 65536)


class NodeView(NamedTuple):
    """A node with the shapes and dtypes around it; leading dimensions are free."""

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


def view_graph(graph: TensorGraph) -> NodeView:
    """Views [N, ...] of all nodes of a graph."""
    f, table = graph.nodes, args_of(graph)
    present = table > 0
    return _view(
        f,
        jnp.where(present[..., None], f.shape[table], 1),
        jnp.where(present, f.rank[table], 0),
        jnp.where(present, f.dtype[table], 0),
        present & f.weight_only[table],
        fusion.origins(graph)[table],
    )


def view_new(new: NewNodes, origins: jax.Array | None = None) -> NodeView:
    """Views [Q, ...] of the nodes a rewrite makes.

    Args:
      origins: [2P + Q] of bound and new nodes (`fusion.origins_with`); without them all arguments
        count as written to memory.
    """
    args = new.arg_shapes, new.arg_ranks, new.arg_dtypes, new.arg_weight_only
    if origins is None:
        return _view(new.nodes, *args, jnp.full(new.args.shape, fusion.MEMORY))
    return _view(new.nodes, *args, fusion.of_args(new.args, origins))


def _view(f: Nodes, *args: jax.Array) -> NodeView:
    own = f.op, f.attrs, f.lowering, f.shape, f.rank, f.dtype, f.weight_only
    return NodeView(*own, *args)


def signature(view: NodeView) -> jax.Array:
    """The 64-bit signature [..., 2] uint32 of what decides a node's time."""
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


def form_of(view: NodeView) -> jax.Array:
    """Operator, kind and lowering [3] of one node."""
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


def turned(form: tuple[int, int, int]) -> tuple[int, int, int]:
    """Of a convolution's form, that of one with features elsewhere; of others nothing that is."""
    op, kind, lowering = form
    return op, (kind + _FEATURES_LAST) % KINDS, lowering


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CostTable:
    """Everything the cost of a node depends on; a pytree of bucketed size, so that new timings
    recompile nothing.
    """

    keys: jax.Array  # [T, 2] uint32, ascending in the first lane; unused rows are all ones
    seconds: jax.Array  # [T] float32
    flop_rate: jax.Array  # [C] flops per second of each class
    bandwidth: jax.Array  # [C] bytes per second
    overhead: jax.Array  # [C] seconds per node
    pass_overhead: jax.Array  # [] seconds per pass of a loop over an array, beside its bytes
    scale: jax.Array  # [len(CORRECTED)] correction by whole-program timings
    form: jax.Array  # [operators, kinds, lowerings] multiples of the roofline


def lookup(table: CostTable, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Measured seconds for signatures [..., 2], and which of them are in the table."""
    at = jnp.clip(jnp.searchsorted(table.keys[:, 0], key[..., 0]), 0, len(table.seconds) - 1)
    return table.seconds[at], jnp.all(table.keys[at] == key, axis=-1)


def roofline(table: CostTable, view: NodeView) -> jax.Array:
    """Predicted seconds [...] without looking at timings (one node; vmap for more)."""
    flops, n_bytes = work.traced_work(
        view.op,
        view.attrs,
        view.arg_shapes,
        view.arg_ranks,
        view.arg_dtypes,
        view.shape,
        view.dtype,
    )
    c = _class_of(view.op)
    is_elementwise = c == _LOOPS
    flops = jnp.where(is_elementwise & fusion.is_absorbed(view.op, view.arg_origins), 0.0, flops)
    compute, traffic = flops / table.flop_rate[c], n_bytes / table.bandwidth[c]
    traffic = jnp.where(is_elementwise, _read_seconds(table, view), traffic)
    # Elementwise nodes share loops: which of the two decides there cannot be told from one node.
    busy = jnp.where(is_elementwise, compute + traffic, jnp.maximum(compute, traffic))
    return jnp.where(c == 0, 0.0, (busy + table.overhead[c]) * table.form[tuple(form_of(view))])


def _class_of(op: jax.Array) -> jax.Array:
    return jnp.asarray([CLASSES.index(CLASS_OF[n]) for n in ops.OP_NAMES], jnp.int32)[op]


def corrected_with(view: NodeView) -> jax.Array:
    """Which of `CORRECTED` nodes [...] are."""
    is_kernel = fusion.is_member(view.op, view.lowering)
    kernel = jnp.asarray(_kernels())[view.op, view.lowering]
    joined = jnp.where(fusion.is_joined(view, view.arg_origins), _PARTITION, _class_of(view.op))
    return jnp.where(is_kernel, kernel, joined)


@functools.cache
def _kernels() -> np.ndarray:
    """[operators, lowerings] which of `CORRECTED` lowerings are as kernels of a partition."""
    table = np.full((len(ops.OP_NAMES), _FORMS), _PARTITION)
    for name in ("conv", "dot"):
        for i, row in enumerate(LOWERINGS[name]):
            kind = "tiles" if row.algorithm == "tiles" else name
            table[ops.OPS[name].code, i] = CORRECTED.index(f"partition {kind}")
    return table


def _passes() -> tuple[float, float]:
    """Passes over its arguments that a node inside of a partition takes: one of the library's, one
    in a loop.
    """
    made = calls()
    return (made.costs.joined, made.costs.in_loop) if made else (1.0, 1.0)


def _arg_bytes(view: NodeView) -> jax.Array:
    """Bytes [..., A] of the arguments."""
    sizes = jnp.prod(view.arg_shapes.astype(jnp.float32), axis=-1)
    return sizes * jnp.asarray(ops.DTYPE_BYTES, jnp.float32)[view.arg_dtypes]


def _read_seconds(table: CostTable, view: NodeView) -> jax.Array:
    """Seconds [...] that nodes take to read from memory, if they are elementwise; uncorrected."""
    reads = fusion.pays_read(view.op, view.arg_origins) & (view.arg_dtypes > 0)
    each = table.pass_overhead + _arg_bytes(view) / table.bandwidth[_LOOPS]
    return jnp.sum(jnp.where(reads, each, 0.0), axis=-1)


def _moved_seconds(table: CostTable, n_bytes: jax.Array, corrected: int = _LOOPS) -> jax.Array:
    """Seconds to read or to write so many bytes within a loop that runs anyway."""
    return n_bytes / table.bandwidth[_LOOPS] * table.scale[corrected]


def pass_seconds(table: CostTable, n_bytes: jax.Array) -> jax.Array:
    """Seconds of a pass that reads or writes an array of so many bytes."""
    return _moved_seconds(table, n_bytes) + table.pass_overhead * table.scale[_LOOPS]


def _crossing_seconds(table: CostTable, view: NodeView) -> jax.Array:
    """Seconds [...] that nodes take to enter or to leave a partition; 0 for work on weights."""
    enters, leaves = (of(view, view.arg_origins) for of in (fusion.enters, fusion.leaves))
    enter, leave = fusion.crossing()
    crossing = jnp.where(enters, enter, 0.0) + jnp.where(leaves, leave, 0.0)
    return jnp.where(view.weight_only, 0.0, crossing * table.scale[_CROSSING])


def seconds(table: CostTable, view: NodeView) -> jax.Array:
    """Seconds [...] of nodes: measured where the signature is known, the roofline elsewhere.

    Weight-only work is done once and costs `_WEIGHT_ONLY` of its roofline: next to nothing, but a
    search still prefers less of it, and small prepared arrays to large ones.
    """
    measured, known = lookup(table, signature(view))
    guess = roofline
    for _ in range(view.op.ndim):
        guess = jax.vmap(guess, in_axes=(None, 0))
    guessed = guess(table, view)
    cost = jnp.where(known, measured, guessed) * table.scale[corrected_with(view)]
    # A timing covers the reads of the arguments, of which those computed in the same loop are paid
    # where that begins; and it does not cover writing what nobody has written.
    in_loop = (view.arg_origins == fusion.LOOP) & jnp.asarray(_READS_IN_LOOP)[view.op][..., None]
    read = _moved_seconds(table, jnp.sum(jnp.where(in_loop, _arg_bytes(view), 0.0), axis=-1))
    cost = jnp.maximum(cost - read, _LEAST_SHARE * cost)
    writes = fusion.pays_write(view.op, view.arg_origins)
    cost += jnp.sum(jnp.where(writes, pass_seconds(table, _arg_bytes(view)), 0.0), axis=-1)
    joined, in_loop = _passes()
    passes = jnp.where(fusion.is_element(view.op), in_loop, joined)
    cost = jnp.where(
        fusion.is_joined(view, view.arg_origins) & ~fusion.is_absorbed(view.op, view.arg_origins),
        passes * _moved_seconds(table, jnp.sum(_arg_bytes(view), axis=-1), _PARTITION),
        cost,
    )
    cost += _crossing_seconds(table, view)
    cost = jnp.where(view.weight_only, _WEIGHT_ONLY * guessed, cost)
    return jnp.where(_class_of(view.op) == 0, 0.0, cost).astype(jnp.float32)


def seconds_where(table: CostTable, view: NodeView, where: jax.Array) -> jax.Array:
    """Seconds [...] of nodes, of those only for which `where` [...] holds; 0 elsewhere. Where these
    are few, that is as many times faster, unless steps are wide.
    """
    if wide():
        return jnp.where(where, seconds(table, view), 0.0)
    wanted = where.reshape(-1)
    rows = jax.tree.map(lambda v: v.reshape(wanted.size, *v.shape[where.ndim :]), view)
    chunk = max(wanted.size // _CHUNKS, 1)
    total = jnp.cumsum(wanted, dtype=jnp.int32)

    def some(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, out = carry
        at = jnp.searchsorted(total, first + 1 + jnp.arange(chunk, dtype=jnp.int32))
        made = seconds(table, jax.tree.map(lambda v: v.at[at].get(mode="clip"), rows))
        return first + chunk, out.at[at].set(made, mode="drop")

    start = jnp.int32(0), jnp.zeros(wanted.size, jnp.float32)
    found = jax.lax.while_loop(lambda c: c[0] < total[-1], some, start)[1]
    return found.reshape(where.shape)


def repriced(table: CostTable, graph: TensorGraph, before: TensorGraph) -> TensorGraph:
    """`priced`, for a graph that differs in a few nodes from one that is priced from this table."""
    view, old = view_graph(graph), view_graph(before)

    def differs(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.any((a != b).reshape(len(a), -1), axis=1)

    changed = functools.reduce(jnp.logical_or, map(differs, view, old))
    cost = jnp.where(changed, seconds_where(table, view, changed), before.nodes.cost)
    return graph._replace(nodes=graph.nodes._replace(cost=cost))


def priced(table: CostTable, graph: TensorGraph) -> TensorGraph:
    """The graph with every node's cost set from the table."""
    return graph._replace(nodes=graph.nodes._replace(cost=seconds(table, view_graph(graph))))


def price_of_new(table: CostTable, graph: TensorGraph) -> Price:
    """Prices rewrites of a graph: the nodes they make, and what the readers of a root pay more or
    less because its value comes from elsewhere. What changes behind the readers is left out.
    """
    origins, readers, f = fusion.origins(graph), fusion.readers(graph), graph.nodes
    sizes = jnp.prod(f.shape.astype(jnp.float32), axis=-1)
    one_pass = pass_seconds(table, sizes * jnp.asarray(ops.DTYPE_BYTES, jnp.float32)[f.dtype])
    one_pass = jnp.where(f.weight_only, 0.0, one_pass)

    def of_readers(root: jax.Array, origin: jax.Array) -> jax.Array:
        passes = readers.passes(root, origin) - readers.passes(root, origins[root])
        switches = readers.switches(root, origin) - readers.switches(root, origins[root])
        return passes * one_pass[root] + switches * table.scale[_CROSSING]

    return Price(_price_of_made, of_readers, marks=origins, context=table)


def _price_of_made(table: CostTable, asked: Asked) -> tuple[jax.Array, jax.Array]:
    """Seconds [C] of the nodes made, and origins [C, 2] of what replaces the roots."""
    found = jax.vmap(fusion.origins_with)(asked.made, asked.marks)
    there = asked.made.nodes.op != ops.HOLE
    seconds = seconds_where(table, jax.vmap(view_new)(asked.made, found), there)
    replacing = jnp.take_along_axis(found, jnp.maximum(asked.to, 0), axis=1)
    return jnp.sum(seconds, axis=1), replacing


def shares(table: CostTable, graph: TensorGraph) -> jax.Array:
    """Seconds [len(CORRECTED)] of one run of a graph priced from the table, by what they are
    corrected with.
    """
    view = view_graph(graph)
    there = graph.nodes.op != ops.HOLE
    crossing = jnp.where(there, _crossing_seconds(table, view), 0.0)
    cost = jnp.where(there, graph.nodes.cost, 0.0) - crossing
    zeros = jnp.zeros(len(CORRECTED), jnp.float32)
    return zeros.at[corrected_with(view)].add(cost).at[_CROSSING].add(jnp.sum(crossing))


def total(graph: TensorGraph) -> jax.Array:
    """Seconds of one run of the graph: the sum of its nodes' costs."""
    return jnp.sum(jnp.where(graph.nodes.op == ops.HOLE, 0.0, graph.nodes.cost))


@dataclass(frozen=True)
class Rates:
    """Roofline parameters by class: flops per second, bytes per second, seconds per node; the
    correction of each of `CORRECTED`; by form (see `form_of`), what multiple of it was measured;
    and the seconds that an elementwise loop takes for each array it reads or writes, beside its
    bytes.
    """

    flop_rate: Mapping[str, float]
    bandwidth: Mapping[str, float]
    overhead: Mapping[str, float]
    scale: Mapping[str, float]
    form: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    pass_overhead: float = 0.0

    def pass_seconds(self, n_bytes: float) -> float:
        """Seconds of a pass of a loop that reads or writes an array of so many bytes."""
        return self.pass_overhead + n_bytes / self.bandwidth["elementwise"]


# Where calibration starts before there is any timing: a middling CPU. Only ratios matter to a
# search.
DEFAULT_RATES = Rates(
    flop_rate=dict.fromkeys(CLASSES, 2e10) | {"conv": 8e10, "dot": 1e11, "elementwise": 5e10},
    bandwidth=dict.fromkeys(CLASSES, 1.5e10),
    overhead=dict.fromkeys(CLASSES, 1e-6) | {"elementwise": 2e-7},  # several share a loop
    scale=dict.fromkeys(CORRECTED, 1.0),
)


def cost_table(timings: Mapping[tuple[int, int], float], rates: Rates = DEFAULT_RATES) -> CostTable:
    """The table of measured seconds by signature, and the rates."""
    size = next((b for b in TABLE_BUCKETS if len(timings) < b), TABLE_BUCKETS[-1])
    keys = np.full((size, 2), 0xFFFFFFFF, np.uint32)
    values = np.zeros(size, np.float32)
    rows = sorted(timings.items())[: size - 1]
    for i, (key, value) in enumerate(rows):
        keys[i], values[i] = key, value

    form = np.ones((len(ops.OP_NAMES), KINDS, _FORMS), np.float32)
    for at, multiple in rates.form.items():
        form[at] = multiple

    def vector(by: Mapping[str, float], names: tuple[str, ...] = CLASSES) -> jax.Array:
        return jnp.asarray([by[c] for c in names], jnp.float32)

    return CostTable(
        jnp.asarray(keys),
        jnp.asarray(values),
        vector(rates.flop_rate),
        vector(rates.bandwidth),
        vector(rates.overhead),
        jnp.float32(rates.pass_overhead),
        vector(rates.scale, CORRECTED),
        jnp.asarray(form),
    )
