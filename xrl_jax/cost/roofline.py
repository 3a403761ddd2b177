"""Costs of nodes inside jit: a measured time where there is one, a calibrated roofline elsewhere.

A node's cost depends on its `view.CostView`: operator, attributes, lowering, result and arguments.
Its signature is a 64-bit hash of these; the cost table holds measured seconds by signature. The
roofline (Williams, Waterman, Patterson, CACM 2009) is max(flops / rate, bytes / bandwidth) +
overhead, with rates fitted to the timings in the store. It is multiplied by the median of the times
that the node's lowering took elsewhere, each as a multiple of its own roofline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost import fusion
from xrl_jax.cost.config import DEFAULT, CostConfig
from xrl_jax.cost.rates import DEFAULT_RATES, Rates
from xrl_jax.cost.view import (
    CLASS_OF,
    CLASSES,
    CORRECTED,
    KINDS,
    CostView,
    lowering_kind_of,
    signature,
    view_graph,
    view_new,
)
from xrl_jax.engine.delta import Price
from xrl_jax.engine.instantiate import BindingBatch
from xrl_jax.graph import ops, work
from xrl_jax.graph.graph import TensorGraph, assert_one
from xrl_jax.lower.table import LOWERINGS
from xrl_jax.runtime.engine_jit import wide
from xrl_jax.runtime.target_platform import target_platform

_LOOPS, _PARTITION, _CROSSING = map(CORRECTED.index, ("elementwise", "partition", "crossing"))
_READS_IN_LOOP = np.array([CLASS_OF[n] in ("reduce", "movement") for n in ops.OP_NAMES])
_CHUNKS = 8  # in which a CPU processes nodes if only some of them are priced
TABLE_BUCKETS = (256, 1024, 4096, 16384, 65536)


T = TypeVar("T")


class Work(NamedTuple):
    """What the seconds of nodes [...] depend on besides the origins of their arguments."""

    known: jax.Array  # bool, whether there is a timing
    measured: jax.Array  # the timing
    compute: jax.Array  # seconds for flops
    traffic: jax.Array  # seconds for bytes
    multiple: jax.Array  # of the roofline, for the lowering


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CostTable:
    """Everything that the cost of a node depends on; implements `base.CostModel`.

    It is a pytree of bucketed size, so that new timings cause no recompilation.
    """

    keys: jax.Array  # [T, 2] uint32, ascending in the first lane; unused rows are all ones
    timed: jax.Array  # [T] float32 seconds
    flop_rate: jax.Array  # [C] flops per second of each class
    bandwidth: jax.Array  # [C] bytes per second
    overhead: jax.Array  # [C] seconds per node
    pass_overhead: jax.Array  # [] seconds per pass of a loop over an array, besides its bytes
    scale: jax.Array  # [len(CORRECTED)] correction by whole-program timings
    multiple: jax.Array  # [operators, kinds, lowerings] multiples of the roofline
    corrected: jax.Array  # [operators, lowerings] index into CORRECTED in a shared call
    added_error: jax.Array  # [operators, lowerings] relative error that float32 lowerings add
    error_weight: jax.Array  # [] these four as in `CostConfig`
    optimistic: jax.Array  # []
    weight_only: jax.Array  # []
    least_share: jax.Array  # []
    sharing: fusion.Sharing

    def lookup(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the measured seconds for signatures [..., 2], and which are in the table."""
        at = jnp.clip(jnp.searchsorted(self.keys[:, 0], key[..., 0]), 0, len(self.timed) - 1)
        return self.timed[at], jnp.all(self.keys[at] == key, axis=-1)

    def work(self, view: CostView) -> Work:
        """Return the `Work` of nodes [...]."""
        measured, known = self.lookup(signature(view))
        one = self._guessed_work
        for _ in range(view.op.ndim):
            one = jax.vmap(one)
        return Work(known, measured, *one(view))

    def _guessed_work(self, view: CostView) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the last three fields of the `Work` of one node."""
        flops, n_bytes = work.traced_work(
            view.op,
            view.attrs,
            view.arg_shapes,
            view.arg_ranks,
            view.arg_dtypes,
            view.shape,
            view.dtype,
        )
        c = self._class_of(view.op)
        multiple = self.multiple[tuple(lowering_kind_of(view))]
        return flops / self.flop_rate[c], n_bytes / self.bandwidth[c], multiple

    def _roofline(self, view: CostView, of: Work) -> jax.Array:
        """Return the predicted seconds [...] of nodes without using timings."""
        c = self._class_of(view.op)
        absorbed = fusion.is_absorbed(view.op, view.arg_origins)
        # Elementwise nodes share loops: one node does not tell which of the two is the bottleneck.
        in_loop = jnp.where(absorbed, 0.0, of.compute) + self._read_seconds(view)
        busy = jnp.where(c == _LOOPS, in_loop, jnp.maximum(of.compute, of.traffic))
        return jnp.where(c == 0, 0.0, (busy + self.overhead[c]) * of.multiple)

    def correction_of(self, view: CostView) -> jax.Array:
        """Return the correction of nodes [...], as an index into `CORRECTED`."""
        is_kernel = fusion.is_member(self.sharing, view.op, view.lowering)
        kernel = self.corrected[view.op, view.lowering]
        is_joined = fusion.is_joined(self.sharing, view, view.arg_origins)
        joined = jnp.where(is_joined, _PARTITION, self._class_of(view.op))
        return jnp.where(is_kernel, kernel, joined)

    def _class_of(self, op: jax.Array) -> jax.Array:
        """Return the classes [...] of operators, in which all of a loop's are elementwise."""
        return jnp.where(self.sharing.loops[op], _LOOPS, _class_of(op))

    def _read_seconds(self, view: CostView) -> jax.Array:
        """Return the seconds [...] that elementwise nodes take to read memory; uncorrected.

        Scalars are read for nothing.
        """
        reads = fusion.pays_read(view.op, view.arg_origins) & (view.arg_dtypes > 0)
        reads &= view.arg_ranks > 0
        each = self.pass_overhead + _arg_bytes(view) / self.bandwidth[_LOOPS]
        return jnp.sum(jnp.where(reads, each, 0.0), axis=-1)

    def _moved_seconds(self, n_bytes: jax.Array, corrected: int = _LOOPS) -> jax.Array:
        """Return the seconds to read or write `n_bytes` within a loop that runs anyway."""
        return n_bytes / self.bandwidth[_LOOPS] * self.scale[corrected]

    def pass_seconds(self, n_bytes: jax.Array) -> jax.Array:
        """Return the seconds of a pass that reads or writes an array of `n_bytes`."""
        return self._moved_seconds(n_bytes) + self.pass_overhead * self.scale[_LOOPS]

    def _crossing_seconds(self, view: CostView) -> jax.Array:
        """Return the seconds [...] of entering or leaving a partition; 0 for weight-only nodes."""
        of, origins = self.sharing, view.arg_origins
        crossing = jnp.where(fusion.enters_call(of, view, origins), of.enter, 0.0)
        crossing += jnp.where(fusion.leaves_call(of, view, origins), of.leave, 0.0)
        return jnp.where(view.weight_only, 0.0, crossing * self.scale[_CROSSING])

    def seconds(self, view: CostView, of: Work | None = None) -> jax.Array:
        """Return the seconds [...] of nodes: measured where the signature is known, the roofline
        elsewhere.

        Weight-only work is done once; see `CostConfig.weight_only`.

        Args:
          of: from `work`, if it is known.
        """
        of = self.work(view) if of is None else of
        guessed = self._roofline(view, of)
        cost = jnp.where(of.known, of.measured, guessed) * self.scale[self.correction_of(view)]
        # A timing includes reading all arguments, but those computed in the same loop are paid for
        # where the loop begins. It does not include writing arguments that were never written.
        in_loop = (jnp.asarray(_READS_IN_LOOP)[view.op] & ~self.sharing.loops[view.op])[..., None]
        in_loop &= view.arg_origins == fusion.LOOP
        read = self._moved_seconds(jnp.sum(jnp.where(in_loop, _arg_bytes(view), 0.0), axis=-1))
        cost = jnp.maximum(cost - read, self.least_share * cost)
        writes = fusion.pays_write(view.op, view.arg_origins)
        cost += jnp.sum(jnp.where(writes, self.pass_seconds(_arg_bytes(view)), 0.0), axis=-1)
        shared, origins = self.sharing, view.arg_origins
        passes = jnp.where(fusion.is_fused(shared, view.op), shared.in_loop, shared.joined)
        cost = jnp.where(
            fusion.is_joined(shared, view, origins) & ~fusion.is_absorbed(view.op, origins),
            passes * self._moved_seconds(jnp.sum(_arg_bytes(view), axis=-1), _PARTITION),
            cost,
        )
        cost += self._crossing_seconds(view)
        cost = jnp.where(view.weight_only, self.weight_only * guessed, cost)
        return jnp.where(_class_of(view.op) == 0, 0.0, cost).astype(jnp.float32)

    def errors(self, view: CostView) -> jax.Array:
        """Return the relative errors [...] that lowerings are stated to add; 0 for weight-only
        nodes.
        """
        return jnp.where(view.weight_only, 0.0, self.added_error[view.op, view.lowering])

    def costs(self, view: CostView, of: Work | None = None) -> jax.Array:
        """Return the seconds [...] of nodes, plus the error they add converted to seconds."""
        return self.seconds(view, of) + self.error_weight * self.errors(view)

    def costs_where(self, view: CostView, where: jax.Array) -> jax.Array:
        """Return `costs` [...] of the nodes for which `where` [...] holds; 0 elsewhere.

        The time is proportional to their number, unless the platform is `wide`.
        """
        if wide():
            return jnp.where(where, self.costs(view), 0.0)
        rows = jax.tree.map(lambda v: v.reshape(where.size, *v.shape[where.ndim :]), view)

        def costs_at(at: jax.Array) -> jax.Array:
            return self.costs(jax.tree.map(lambda v: v.at[at].get(mode="clip"), rows))

        chunk = max(where.size // _CHUNKS, 1)
        return computed_where(where.reshape(-1), costs_at, chunk).reshape(where.shape)

    def repriced(self, graph: TensorGraph, before: TensorGraph) -> TensorGraph:
        """Return the graph priced as by `priced`; it differs in few nodes from `before`, which this
        table has priced.
        """
        assert_one(graph, before.nodes.cost)
        view, old = view_graph(self.sharing, graph), view_graph(self.sharing, before)

        def differs(a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.any((a != b).reshape(len(a), -1), axis=1)

        changed = functools.reduce(jnp.logical_or, map(differs, view, old))
        cost = jnp.where(changed, self.costs_where(view, changed), before.nodes.cost)
        return graph._replace(nodes=graph.nodes._replace(cost=cost))

    def priced(self, graph: TensorGraph) -> TensorGraph:
        """Return the graph with every node's cost set from the table."""
        assert_one(graph)
        cost = self.costs(view_graph(self.sharing, graph))
        return graph._replace(nodes=graph.nodes._replace(cost=cost))

    def error(self, graph: TensorGraph) -> jax.Array:
        """Return the sum [] of the relative errors that the graph's lowerings are stated to add."""
        there = graph.nodes.op != ops.HOLE
        return jnp.sum(jnp.where(there, self.errors(view_graph(self.sharing, graph)), 0.0))

    def price_of_new(self, graph: TensorGraph) -> Price:
        """Return the `Price` of rewrites of a graph.

        It covers the nodes they make, and how much more or less the readers of a root pay because
        its value has another origin. Changes beyond these readers are left out.
        """
        of, f = self.sharing, graph.nodes
        origins, readers = fusion.origins(of, graph), fusion.readers(of, graph)
        sizes = jnp.prod(f.shape.astype(jnp.float32), axis=-1)
        one_pass = self.pass_seconds(sizes * jnp.asarray(ops.DTYPE_BYTES, jnp.float32)[f.dtype])
        one_pass = jnp.where(f.weight_only, 0.0, one_pass)

        def of_readers(root: jax.Array, origin: jax.Array) -> jax.Array:
            passes = readers.passes(root, origin) - readers.passes(root, origins[root])
            switches = readers.switches(of, root, origin)
            switches -= readers.switches(of, root, origins[root])
            return passes * one_pass[root] + switches * self.scale[_CROSSING]

        return Price(_price_of_made, of_readers, marks=origins, context=self)

    def shares(self, graph: TensorGraph) -> jax.Array:
        """Return the seconds [len(CORRECTED)] of one run of a priced graph, by correction."""
        view = view_graph(self.sharing, graph)
        there = graph.nodes.op != ops.HOLE
        crossing = jnp.where(there, self._crossing_seconds(view), 0.0)
        cost = jnp.where(there, graph.nodes.cost, 0.0) - crossing
        zeros = jnp.zeros(len(CORRECTED), jnp.float32)
        return zeros.at[self.correction_of(view)].add(cost).at[_CROSSING].add(jnp.sum(crossing))


def computed_where(where: jax.Array, fn: Callable[[jax.Array], T], chunk: int) -> T:
    """Return fn(at) [M, ...] of the places for which `where` [M] holds; 0 elsewhere.

    Args:
      fn: called with places [chunk], of which those at or beyond M do not count.
    """

    def some(carry: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        first, out = carry
        at = jnp.searchsorted(total, first + 1 + jnp.arange(chunk, dtype=jnp.int32))
        made = fn(at.astype(jnp.int32))
        return first + chunk, jax.tree.map(lambda o, x: o.at[at].set(x, mode="drop"), out, made)

    total = jnp.cumsum(where, dtype=jnp.int32)
    like = jax.eval_shape(fn, jax.ShapeDtypeStruct((chunk,), jnp.int32))
    none = jax.tree.map(lambda x: jnp.zeros((where.size, *x.shape[1:]), x.dtype), like)
    return jax.lax.while_loop(lambda c: c[0] < total[-1], some, (jnp.int32(0), none))[1]


def _price_of_made(table: CostTable, batch: BindingBatch) -> tuple[jax.Array, jax.Array]:
    """Return the cost [C] of the nodes made, and the origins [C, 2] of the roots' replacements."""
    origins_with = functools.partial(fusion.origins_with, table.sharing)
    found = jax.vmap(origins_with)(batch.made, batch.marks)
    there = batch.made.nodes.op != ops.HOLE
    cost = table.costs_where(jax.vmap(view_new)(batch.made, found), there)
    replacing = jnp.take_along_axis(found, jnp.maximum(batch.to, 0), axis=1)
    return jnp.sum(cost, axis=1), replacing


def total(graph: TensorGraph) -> jax.Array:
    """Return the seconds of one run of the graph: the sum of its nodes' costs."""
    return jnp.sum(jnp.where(graph.nodes.op == ops.HOLE, 0.0, graph.nodes.cost))


def _class_of(op: jax.Array) -> jax.Array:
    return jnp.asarray([CLASSES.index(CLASS_OF[n]) for n in ops.OP_NAMES], jnp.int32)[op]


def _arg_bytes(view: CostView) -> jax.Array:
    """Return the bytes [..., A] of the arguments."""
    sizes = jnp.prod(view.arg_shapes.astype(jnp.float32), axis=-1)
    return sizes * jnp.asarray(ops.DTYPE_BYTES, jnp.float32)[view.arg_dtypes]


def cost_table(
    timings: Mapping[tuple[int, int], float],
    rates: Rates = DEFAULT_RATES,
    *,
    config: CostConfig = DEFAULT,
    sharing: fusion.Sharing | None = None,
) -> CostTable:
    """Return the table of measured seconds by signature, and of the rates.

    Args:
      config: hyperparameters.
      sharing: what lowerings share on the target; None for that of `target_platform()`.
    """
    size = next((b for b in TABLE_BUCKETS if len(timings) < b), TABLE_BUCKETS[-1])
    keys = np.full((size, 2), 0xFFFFFFFF, np.uint32)
    values = np.zeros(size, np.float32)
    rows = sorted(timings.items())[: size - 1]
    for i, (key, value) in enumerate(rows):
        keys[i], values[i] = key, value

    multiple = np.ones((len(ops.OP_NAMES), KINDS, fusion.MOST_LOWERINGS), np.float32)
    for at, value in rates.multiple.items():
        multiple[at] = value

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
        jnp.asarray(multiple),
        *_by_lowering(),
        jnp.float32(config.error_weight),
        jnp.float32(config.optimistic),
        jnp.float32(config.weight_only),
        jnp.float32(config.least_share),
        fusion.sharing(target_platform()) if sharing is None else sharing,
    )


def _by_lowering() -> tuple[jax.Array, jax.Array]:
    """Return two arrays [operators, lowerings]: the correction of each lowering as a kernel of a
    partition, as an index into `CORRECTED`, and the relative error that it adds in float32.
    """
    shape = len(ops.OP_NAMES), fusion.MOST_LOWERINGS
    corrected, error = np.full(shape, _PARTITION, np.int32), np.zeros(shape, np.float32)
    for op, rows in LOWERINGS.items():
        for i, row in enumerate(rows):
            error[ops.OPS[op].code, i] = row.error.get("float32", 0.0)
            if op in ("conv", "dot"):
                kind = "tiles" if row.algorithm == "tiles" else op
                corrected[ops.OPS[op].code, i] = CORRECTED.index(f"partition {kind}")
    return jnp.asarray(corrected), jnp.asarray(error)
