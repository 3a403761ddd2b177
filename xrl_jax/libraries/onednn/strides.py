"""Layouts for results of products that are transposed next, to save the copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from xrl_jax.libraries.onednn.spec import Attention, Dot, Partition, Reshape, Shape, Transpose, swap


def result_strides(partition: Partition) -> dict[int, Shape]:
    """Return strides, by value, for results of products that make their later transposes free.

    The results are row-major only after the reshapes and transposes that follow, as the heads of an
    attention are once they are concatenated. Written so, they need not be copied.
    """
    n = len(partition.inputs)
    users: dict[int, int] = {}
    uses = Counter(partition.outputs)
    for v, i in enumerate(partition.code, n):
        uses.update(i.args)
        users.update(dict.fromkeys(i.args, v))
    found: dict[int, Shape] = {}
    for v, i in enumerate(partition.code, n):
        if not isinstance(i.op, Dot | Attention) or (isinstance(i.op, Dot) and i.op.after.addend):
            continue
        moves: list[Reshape | Transpose] = []
        at, shape = v, i.shape
        if isinstance(i.op, Attention) and i.op.transposed:
            order = swap(len(shape))
            moves.append(Transpose(order))
            shape = tuple(shape[a] for a in order)
        while at in users and uses[at] == 1:
            before, at = at, users[at]
            user = partition.code[at - n]
            if isinstance(user.op, Reshape | Transpose):
                moves.append(user.op)
                continue
            if isinstance(user.op, Dot) and user.op.left_transposed and user.args[0] == before:
                moves.append(Transpose(swap(len(partition.shape(before)))))
            break
        strides = _before(moves, shape)
        if strides is not None and strides[-1] == 1:
            found[v] = strides
    return found


def _before(moves: Sequence[Reshape | Transpose], shape: Shape) -> Shape | None:
    """Return the strides of an array that is row-major after the last transpose of these moves.

    None if there is no transpose, or if no strides achieve that.
    """
    turns = [k for k, move in enumerate(moves) if isinstance(move, Transpose)]
    if not turns:
        return None
    moves = moves[: turns[-1] + 1]
    shapes = [shape]
    for move in moves:
        transposed = isinstance(move, Transpose)
        shapes.append(tuple(shapes[-1][a] for a in move.order) if transposed else move.shape)
    array = np.empty(shapes[-1], np.int8)  # only its strides are of interest
    for move, before in zip(reversed(moves), reversed(shapes[:-1]), strict=True):
        if isinstance(move, Transpose):
            array = array.transpose(np.argsort(move.order))
            continue
        try:
            array = np.reshape(array, before, copy=False)
        except ValueError:
            return None
    return array.strides
