"""How results of products lie in memory, where they are turned round next."""

from __future__ import annotations

from collections import Counter

from xrl_jax.backends.dnnl.library import row_major
from xrl_jax.backends.dnnl.spec import Dot, Partition, Reshape, Shape, Transpose


def written(partition: Partition) -> dict[int, Shape]:
    """Strides of those results of products that are row-major only after what follows: the heads of
    an attention, which are to lie side by side. Written so they need not be copied.
    """
    n = len(partition.inputs)
    users: dict[int, int] = {}
    uses = Counter(partition.outputs)
    for v, i in enumerate(partition.code, n):
        uses.update(i.args)
        users.update(dict.fromkeys(i.args, v))
    found: dict[int, Shape] = {}
    for v, i in enumerate(partition.code, n):
        if not isinstance(i.op, Dot) or i.op.after.addend:
            continue
        at = v
        while at in users and uses[at] == 1:
            before, at = at, users[at]
            op = partition.code[at - n].op
            if isinstance(op, Transpose):
                strides = _before(op, partition.shape(before), i.shape)
                if strides[-1] == 1:
                    found[v] = strides
                break
            if not isinstance(op, Reshape) or _longer(partition.shape(at)) != _longer(i.shape):
                break
    return found


def _longer(shape: Shape) -> Shape:
    """Without axes of size 1."""
    return tuple(n for n in shape if n != 1)


def _before(op: Transpose, shape: Shape, result: Shape) -> Shape:
    """Strides of a result that, in this shape and with its axes turned so, is row-major."""
    after = row_major([shape[a] for a in op.order])
    steps = iter([after[op.order.index(a)] for a, n in enumerate(shape) if n != 1])
    usual = zip(result, row_major(result), strict=True)
    return tuple(stride if n == 1 else next(steps) for n, stride in usual)
