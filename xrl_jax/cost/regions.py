"""Regions: one node as XLA would meet it in a network, made into a job for the timing worker.

A region is an anchor (a convolution, contraction, pooling, reduction or movement) with an
elementwise operation before and after it, because what XLA fuses into an anchor decides how fast it
runs: a sum of shifted slices that is fast alone may recompute its producer for every tap. A form
that absorbs what follows has it inside. A kernel of a library that runs in one call with its
neighbours is timed in a call of its own kind.
Weight-only work is hoisted out, as it will be in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.backends import onednn
from xrl_jax.backends.hoist import split
from xrl_jax.backends.lowerings import LOWERINGS, absorbs, in_partition, lower
from xrl_jax.backends.onednn import Epilogue
from xrl_jax.cost.calibration import Sample
from xrl_jax.cost.roofline import CLASS_OF, NodeView, form_of
from xrl_jax.cost.worker import Job
from xrl_jax.graph import ops, work
from xrl_jax.graph.graph import Node
from xrl_jax.graph.hash import timing_key

Options = Sequence[tuple[str, str]]
_COPIES, _SMALL = 4, 1e8  # of a kernel with less than so many flops
_WRAPPED = ("conv", "dot", "window", "reduce")


@dataclass(frozen=True)
class Region:
    """A node with its arguments, which stand for themselves or are weight-only."""

    node: Node
    args: tuple[Node, ...]  # `input` nodes, `weight` where weight-only
    form: tuple[int, int, int] = (0, 0, 0)  # see `roofline.form_of`

    @property
    def op_class(self) -> str:
        return CLASS_OF[self.node.op]

    @property
    def in_partition(self) -> bool:
        """Whether it is a kernel in a call of many."""
        forms = LOWERINGS[self.node.op]
        return self.node.lowering < len(forms) and in_partition(forms[self.node.lowering].name)

    @property
    def copies(self) -> int:
        """How often it is computed in one call: small kernels several times, so that the call does
        not count.
        """
        flops, _ = work.node_work(self.node, self.args)
        return _COPIES if self.in_partition and flops < _SMALL else 1


def region_of(view: NodeView, at: tuple[int, ...]) -> Region:
    """The region of one node of a batch of host-side views, at a position of its leading
    dimensions.
    """
    v = NodeView(*(np.asarray(f)[at] for f in view))
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
    op, kind, lowering = np.asarray(form_of(v)).tolist()
    return Region(node, args, (op, kind, lowering))


def region_key(region: Region, options: Options, *, constants: bool = False) -> str:
    """The timing key of a region under compile options (the machine is a column of the store)."""
    nodes = [*region.args, region.node]
    how = [f"constants={constants}", *(f"{k}={v}" for k, v in sorted(options))]
    return timing_key(nodes, (len(nodes) - 1,), extra=["region 6", *how])


def region_fn(region: Region) -> Callable[..., Any]:
    """The region as a function of its arguments and, where it is wrapped, a scalar the wrapping
    compares with.
    """
    wrapped = region.op_class in _WRAPPED and region.node.dtype in ops.FLOAT_DTYPES

    def run(*args: Any) -> Any:
        values, floor = list(args[:-1]), args[-1]
        if region.in_partition:
            after = Epilogue(relu=True)
            more = {"epilogue": after} if absorbs(region.node, region.args) else {}
            return [lower(region.node, *values, **more) for _ in range(region.copies)]
        if wrapped:
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


def region_job(region: Region, options: Options, *, constants: bool = False) -> Job:
    """The job that times the region: weight-only work prepared, the rest called.

    Args:
      constants: prepared weights are constants of the compiled code instead of arguments.
    """
    avals = [jax.ShapeDtypeStruct(a.shape, jnp.dtype(a.dtype)) for a in region.args]
    avals.append(jax.ShapeDtypeStruct((), jnp.float32))
    weights = [a.op == "weight" for a in region.args] + [False]
    hoisted = split(region_fn(region), avals, weights)
    inputs = [a for a, w in zip(avals, weights, strict=True) if not w]
    prepared = jax.eval_shape(
        hoisted.prepare, [a for a, w in zip(avals, weights, strict=True) if w]
    )
    exported = onednn.exported(hoisted.call, prepared, inputs)
    key = region_key(region, options, constants=constants)
    return Job(
        key,
        bytes(exported.serialize()),
        tuple(options),
        constants=len(prepared) if constants else 0,
        targets=onednn.targets(exported),
    )


def region_sample(region: Region, seconds: float) -> Sample:
    """What calibration learns from the region's time."""
    flops, n_bytes = work.node_work(region.node, region.args)
    return Sample(region.op_class, flops, n_bytes, seconds, region.form)


def wrapping_bytes(region: Region) -> float:
    """Bytes the wrapping operations move beyond the anchor, if nothing of them is fused."""
    if region.in_partition or region.op_class not in _WRAPPED:
        return 0.0
    if region.node.dtype not in ops.FLOAT_DTYPES:
        return 0.0
    inputs = [a for a in region.args if a.op == "input" and a.dtype in ops.FLOAT_DTYPES]
    return 2.0 * sum(_size(n) for n in (region.node, *inputs))


def _size(node: Node) -> float:
    return float(np.prod(node.shape)) * ops.DTYPE_BYTES[ops.DTYPE_CODE[node.dtype]]
