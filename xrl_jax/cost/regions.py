"""Regions: one node as XLA would meet it in a network, made into a job for the timing worker.

A region is an anchor (a convolution, contraction, pooling, reduction or movement). All but
movements have an elementwise operation before and after the anchor, because what XLA fuses into an
anchor decides how fast it runs: a sum of shifted slices that is fast on its own may recompute its
producer for every tap. A lowering that absorbs the operation after it computes it inside its call.
A library kernel that shares calls with its neighbours is timed in a call of such kernels only.
Weight-only work is hoisted out, as it will be in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.backends.hoist import split
from xrl_jax.cost.calibration import Sample
from xrl_jax.cost.view import CLASS_OF, CostView, lowering_kind_of
from xrl_jax.graph import ops, work
from xrl_jax.graph.graph import Node
from xrl_jax.graph.hash import timing_key
from xrl_jax.libraries import registry
from xrl_jax.libraries.base import Epilogue
from xrl_jax.lower.table import absorbs, lower, shares_calls
from xrl_jax.measure.base import EVERYTHING, Job

Options = Sequence[tuple[str, str]]
# A region is timed as a sequence of copies that together take about `_CHAIN_SECONDS` at these
# rates: a single call also pays for waking threads, which in a network are awake. XLA's
# convolutions and pooling are timed one at a time, because their time inside a loop differs by a
# factor of ten and more.
_CHAIN_SECONDS = 2e-3
_RATES = 1e11, 2e10  # operations and bytes per second
_LEAST_SECONDS, _MOST_COPIES = 1e-5, 16
_SLOPE = (8, 24)  # see `Job.slope`
_LOOP_SIZES = (1 << 12, 1 << 15, 1 << 18, 1 << 21)  # elements, 16 KiB to 8 MiB
_WRAPPED = ("conv", "dot", "window", "reduce")
_CHAINED_CLASSES = ("dot", "reduce", "movement", "elementwise")


@dataclass(frozen=True)
class Region:
    """A node with its arguments, which are `input` or `weight` nodes."""

    node: Node
    args: tuple[Node, ...]  # `input` nodes, `weight` where weight-only
    lowering_kind: tuple[int, int, int] = (0, 0, 0)  # see `view.lowering_kind_of`
    platform: str = "cpu"  # of JAX, where it is timed

    @property
    def op_class(self) -> str:
        return CLASS_OF[self.node.op]

    @property
    def in_partition(self) -> bool:
        """Whether the node is a kernel that shares a library call with others."""
        return shares_calls(self.node.op, self.node.lowering, registry.calling(self.platform))

    @property
    def copies(self) -> int:
        """The number of copies that are computed in one call.

        Kernels of a partition have at least two, so that converting arrays to the library's layout
        and back, which is done once, counts less.
        """
        if self.platform == "gpu":  # see `Job.slope`
            return 2 if self.in_partition else 1
        floating = {n.dtype for n in (self.node, *self.args)} <= set(ops.FLOAT_DTYPES)
        loops = self.op_class in _CHAINED_CLASSES
        can_repeat = loops and floating and 0 not in self.node.shape
        if not self.in_partition and not can_repeat:
            return 1
        flops, n_bytes = work.node_work(self.node, self.args)
        flop_rate, bandwidth = _RATES
        each = max(flops / flop_rate, n_bytes / bandwidth, _LEAST_SECONDS)
        return int(np.clip(_CHAIN_SECONDS / each, 2 if self.in_partition else 1, _MOST_COPIES))


def region_of(view: CostView, at: tuple[int, ...], platform: str) -> Region:
    """Return the region of one node of a batch of host-side views.

    Args:
      at: position of the node in the leading dimensions.
      platform: of JAX, where the region is timed.
    """
    v = CostView(*(np.asarray(f)[at] for f in view))
    spec = ops.OPS[ops.OP_NAMES[int(v.op)]]

    def shape(sizes: Any, rank: int) -> tuple[int, ...]:
        return tuple(int(d) for d in sizes[:rank])

    args = tuple(
        Node(
            op="weight" if v.arg_weight_only[i] else "input",
            shape=shape(v.arg_shapes[i], int(v.arg_ranks[i])),
            dtype=ops.DTYPES[int(v.arg_dtypes[i])],
            ref=i,
        )
        for i in range(ops.MAX_ARGS)
        if v.arg_dtypes[i] > 0
    )
    node = Node(
        op=spec.name,
        args=tuple(range(len(args))),
        attrs=tuple(int(a) for a in v.attrs),
        lowering=int(v.lowering),
        shape=shape(v.shape, int(v.rank)),
        dtype=ops.DTYPES[int(v.dtype)],
    )
    op, kind, lowering = np.asarray(lowering_kind_of(v)).tolist()
    return Region(node, args, (op, kind, lowering), platform)


def region_key(region: Region, options: Options, *, constants: bool = False) -> str:
    """Return the timing key of a region under compile options (the machine is a column of the
    store).
    """
    nodes = [*region.args, region.node]
    how = [f"constants={_constants(region, constants)}", *(f"{k}={v}" for k, v in sorted(options))]
    return timing_key(nodes, (len(nodes) - 1,), extra=["region 9", *how])


def region_fn(region: Region) -> Callable[..., Any]:
    """Return the region as a function of its arguments and a scalar that the wrapping operations
    compare with.
    """
    wrapped = _is_wrapped(region)

    def run(*args: Any) -> Any:
        values, floor = list(args[:-1]), args[-1]
        if region.in_partition:
            return _in_one_call(region, values)
        if wrapped or region.copies > 1:
            values = [
                jnp.maximum(v, floor.astype(v.dtype))
                if a.op == "input" and jnp.issubdtype(v.dtype, jnp.floating)
                else v
                for v, a in zip(values, region.args, strict=True)
            ]
        if wrapped and absorbs(region.node, region.args):
            return [lower(region.node, *values, epilogue=Epilogue(relu=True))]
        out = lower(region.node, *values)
        return [jnp.maximum(out, floor.astype(out.dtype)) if wrapped else out]

    return run


def _in_one_call(region: Region, values: list[Any]) -> list[Any]:
    """Return the results of the copies of a kernel that shares a library call."""
    calls = registry.calls()
    assert calls is not None
    pair = calls.pair(region.node, partial(lower, region.node), *values)
    if pair is not None:
        return [pair]
    if not absorbs(region.node, region.args):
        return [lower(region.node, *values) for _ in range(region.copies)]
    out = None
    for _ in range(region.copies):
        out = lower(region.node, *values, epilogue=Epilogue(addend=out, relu=True))
    return [out]


def _constants(region: Region, constants: bool) -> bool:
    """Return whether the region's weights are constants: XLA compiles only convolutions differently
    with them, and hundreds of megabytes of constants take long to compile. On a GPU only the layout
    of weights matters, which XLA may choose.
    """
    return constants and region.node.op == "conv" and region.platform != "gpu"


def region_job(region: Region, options: Options, *, constants: bool = False) -> Job:
    """Return the job that times the region: weight-only work is prepared, the rest is called.

    Args:
      constants: prepared weights of convolutions are constants of the compiled code instead of
        arguments.
    """
    avals = [jax.ShapeDtypeStruct(a.shape, jnp.dtype(a.dtype)) for a in region.args]
    avals.append(jax.ShapeDtypeStruct((), jnp.float32))
    weights = [a.op == "weight" for a in region.args] + [False]
    hoisted = split(region_fn(region), avals, weights)
    inputs = [a for a, w in zip(avals, weights, strict=True) if not w]
    prepared = jax.eval_shape(
        hoisted.prepare, [a for a, w in zip(avals, weights, strict=True) if w]
    )
    call = hoisted.call
    if region.copies > 1 and not region.in_partition:
        call = _chained(call, region)
    exported = registry.exported(call, prepared, inputs)
    on_gpu = region.platform == "gpu"
    key = region_key(region, options, constants=constants)
    return Job(
        key,
        bytes(exported.serialize()),
        tuple(options),
        constants=len(prepared) if _constants(region, constants) else 0,
        custom_calls=registry.custom_calls(exported),
        any_layout=EVERYTHING if on_gpu else 0,
        slope=_SLOPE if on_gpu else (),
    )


def _chained(call: Callable[..., Any], region: Region) -> Callable[..., Any]:
    """Return a call of all copies of a region, one after the other.

    Each copy depends on the one before: an element of its result enters the scalar that the next
    one's inputs are compared with.
    """

    def run(prepared: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> Any:
        def one(_: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            floor, _ = carry
            out = call(prepared, [*inputs[:-1], floor])
            element = out[0][(0,) * out[0].ndim]
            return jnp.minimum(floor, element.astype(floor.dtype)), out

        shapes = jax.eval_shape(call, prepared, inputs)
        empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        return jax.lax.fori_loop(0, region.copies, one, (inputs[-1], empty))[1]

    return run


def _is_wrapped(region: Region) -> bool:
    """Return whether the region has elementwise operations before and after the anchor.

    On a GPU it has none: what precedes a kernel is a kernel of its own, and the model knows what
    the kernel absorbs of that which follows.
    """
    if region.platform == "gpu":
        return False
    return region.op_class in _WRAPPED and region.node.dtype in ops.FLOAT_DTYPES


def region_sample(region: Region, seconds: float) -> Sample:
    """Return the region's time as a sample for calibration."""
    flops, n_bytes = work.node_work(region.node, region.args)
    return Sample(region.op_class, flops, n_bytes, seconds, region.lowering_kind)


def wrapping_passes(region: Region) -> tuple[float, ...]:
    """Return the bytes of each pass that the wrapping operations make beyond the anchor if none of
    them is fused: each reads an array and writes it.
    """
    if region.in_partition or not _is_wrapped(region):
        return ()
    inputs = [a for a in region.args if a.op == "input" and a.dtype in ops.FLOAT_DTYPES]
    return 2 * tuple(_size(n) for n in (region.node, *inputs))


def loops(platform: str) -> tuple[Region, ...]:
    """Return elementwise loops of several sizes, which measure the time of a pass over an array."""
    return tuple(
        Region(
            Node("add", (0, 1), shape=(n,)),
            (Node("input", shape=(n,), ref=0), Node("input", shape=(n,), ref=1)),
            platform=platform,
        )
        for n in _LOOP_SIZES
    )


def _size(node: Node) -> float:
    return float(np.prod(node.shape)) * ops.DTYPE_BYTES[ops.DTYPE_CODE[node.dtype]]
