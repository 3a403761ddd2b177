"""Shape and dtype rules, in array form: one entry per rule named in the op table.

A rule sees one node: `(xp, attrs [K], shapes [A, R], ranks [A], n_args) -> (shape [R], rank, ok)`,
with shapes padded by ones. `xp` is `numpy` on the host and `jax.numpy` inside jit, so the same rule
checks a parsed graph and infers the types of a rewrite under vmap. `ok` is false where the
arguments or attributes do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from xrl_jax.graph import ops

ShapeRule = Callable[..., tuple[Any, Any, Any]]
R = ops.MAX_RANK


def unpack(xp: Any, code: Any) -> Any:
    """Unpack dimension numbers packed by `ops.pack_dims` to a vector [R] padded with -1."""
    return ((code >> (3 * xp.arange(R))) & 7) - 1


def _index(xp: Any) -> Any:
    return xp.arange(R)


def _at(xp: Any, values: Any, index: Any) -> Any:
    """Return `values` [R] at `index` [I]; 0 where that is out of range.

    It is a sum because XLA:CPU takes longer to compile a gather.
    """
    return xp.sum(xp.where(index[:, None] == _index(xp), values, 0), axis=1)


def _compress(xp: Any, sizes: Any, valid: Any) -> tuple[Any, Any, Any]:
    """Return the valid sizes padded by ones to R, their number, and whether they fit into R."""
    n, lane = xp.sum(valid), xp.arange(len(valid))
    place = xp.sum(valid & (lane < lane[:, None]), axis=1)
    chosen = (place == _index(xp)[:, None]) & valid
    return xp.where(_index(xp) < n, xp.sum(chosen * sizes, axis=1), 1), n, n <= R


def elementwise(xp: Any, attrs: Any, shapes: Any, ranks: Any, n_args: Any) -> tuple[Any, Any, Any]:
    """Require equal shapes, except that any argument may be a scalar (as in jaxprs)."""
    present = xp.arange(ops.MAX_ARGS) < n_args
    ranks = xp.where(present, ranks, 0)
    scalar = (ranks == 0)[:, None]
    # Where the shapes are equal, their maximum is any of them.
    rank, largest = xp.max(ranks), xp.max(xp.where(scalar, 0, shapes), axis=0)
    fits = scalar | ((ranks == rank)[:, None] & (shapes == largest))
    return xp.where(rank == 0, 1, largest), rank, xp.all(fits)


def like_first(xp: Any, attrs: Any, shapes: Any, ranks: Any, n_args: Any) -> tuple[Any, Any, Any]:
    """Keep the first argument's shape."""
    return shapes[0], ranks[0], ranks[0] <= R


def transpose(xp: Any, attrs: Any, shapes: Any, ranks: Any, n_args: Any) -> tuple[Any, Any, Any]:
    """Permute sizes: out[i] = in[perm[i]]; `perm` is padded with the identity."""
    perm = attrs[:R]
    there = xp.any(perm[:, None] == _index(xp), axis=0)
    ok = xp.all(there & ((_index(xp) < ranks[0]) | (perm == _index(xp))))
    return _at(xp, shapes[0], perm), ranks[0], ok


def reshape(xp: Any, attrs: Any, shapes: Any, ranks: Any, n_args: Any) -> tuple[Any, Any, Any]:
    """Take the shape from the attribute; the number of elements must stay the same."""
    shape = attrs[:R]
    return shape, attrs[R], xp.prod(shape) == xp.prod(shapes[0])


def broadcast(xp: Any, attrs: Any, shapes: Any, ranks: Any, n_args: Any) -> tuple[Any, Any, Any]:
    """Map input dimension i to output dimension dims[i], of the same size or stretched from 1."""
    shape, rank, dims = attrs[:R], attrs[R], attrs[R + 1 : 2 * R + 1]
    used = _index(xp) < ranks[0]
    target = _at(xp, shape, dims)
    rising = xp.all((dims[1:] > dims[:-1]) | ~used[1:])
    fits = (dims >= 0) & (dims < rank) & ((shapes[0] == target) | (shapes[0] == 1))
    return shape, rank, xp.all(fits | ~used) & rising


def concat(xp: Any, attrs: Any, shapes: Any, ranks: Any, n_args: Any) -> tuple[Any, Any, Any]:
    """Add sizes along `axis`; they must agree elsewhere."""
    present = (xp.arange(ops.MAX_ARGS) < n_args)[:, None]
    along = _index(xp) == attrs[0]
    total = xp.sum(xp.where(present, shapes, 0), axis=0)
    same = ((shapes == shapes[0]) | along) & (ranks == ranks[0])[:, None]
    return (
        xp.where(along, total, shapes[0]),
        ranks[0],
        xp.all(same | ~present) & (attrs[0] >= 0) & (attrs[0] < ranks[0]),
    )


def slice_(xp: Any, attrs: Any, shapes: Any, ranks: Any, n_args: Any) -> tuple[Any, Any, Any]:
    """Slice in[start:limit:stride] in every dimension."""
    start, limit, stride = attrs[:R], attrs[R : 2 * R], attrs[2 * R : 3 * R]
    ok = xp.all((start >= 0) & (start <= limit) & (limit <= shapes[0]) & (stride >= 1))
    return (limit - start + stride - 1) // xp.maximum(stride, 1), ranks[0], ok


def pad(xp: Any, attrs: Any, shapes: Any, ranks: Any, n_args: Any) -> tuple[Any, Any, Any]:
    """Pad by `low` and `high`, which may be negative, and by `interior` between neighbours."""
    low, high, interior = attrs[:R], attrs[R : 2 * R], attrs[2 * R : 3 * R]
    size = shapes[0]
    shape = low + high + size + xp.maximum(size - 1, 0) * interior
    return shape, ranks[0], xp.all((shape >= 0) & (interior >= 0)) & (ranks[1] == 0)


def reduce(xp: Any, attrs: Any, shapes: Any, ranks: Any, n_args: Any) -> tuple[Any, Any, Any]:
    """Remove the axes of the mask."""
    gone = (attrs[0] >> _index(xp)) & 1
    shape, rank, _ = _compress(xp, shapes[0], (gone == 0) & (_index(xp) < ranks[0]))
    return shape, rank, (attrs[0] >> ranks[0]) == 0


def window(xp: Any, attrs: Any, shapes: Any, ranks: Any, n_args: Any) -> tuple[Any, Any, Any]:
    """Pool over at most four dimensions: (in + low + high - window) // stride + 1."""
    size, stride, low, high = (attrs[4 * i : 4 * i + 4] for i in range(4))
    room = shapes[0][:4] + low + high - size
    out = xp.where(room < 0, 0, room // xp.maximum(stride, 1) + 1)
    tail = xp.ones(R - 4, out.dtype)
    return xp.concatenate([out, tail]), ranks[0], (ranks[0] <= 4) & xp.all(size >= 1)


def dot(xp: Any, attrs: Any, shapes: Any, ranks: Any, n_args: Any) -> tuple[Any, Any, Any]:
    """Follow `dot_general`: batch dimensions, then the free ones of the left and of the right."""
    lc, rc, lb, rb = (unpack(xp, attrs[i]) for i in range(4))
    lhs, rhs = shapes[0], shapes[1]

    def free(contract: Any, batch: Any, rank: Any) -> Any:
        taken = (contract[:, None] == _index(xp)) | (batch[:, None] == _index(xp))
        return ~xp.any(taken, axis=0) & (_index(xp) < rank)

    def agree(left: Any, right: Any) -> Any:
        sizes = _at(xp, lhs, left) == _at(xp, rhs, right)
        inside = (left < ranks[0]) & (right < ranks[1])
        return ((sizes & inside) | (left < 0)) & ((left < 0) == (right < 0))

    sizes = xp.concatenate([_at(xp, lhs, lb), lhs, rhs])
    valid = xp.concatenate([lb >= 0, free(lc, lb, ranks[0]), free(rc, rb, ranks[1])])
    shape, rank, fits = _compress(xp, sizes, valid)
    return shape, rank, xp.all(agree(lc, rc) & agree(lb, rb)) & fits


def conv(xp: Any, attrs: Any, shapes: Any, ranks: Any, n_args: Any) -> tuple[Any, Any, Any]:
    """Follow `conv_general_dilated`, over one or two spatial dimensions."""
    stride, low, high, lhs_dilation, rhs_dilation = (attrs[2 * i : 2 * i + 2] for i in range(5))
    groups, batch_groups = attrs[10], attrs[11]
    is_code = attrs[12:15, None] == xp.arange(len(ops.LAYOUTS))
    positions = xp.sum(xp.where(is_code[..., None], xp.asarray(ops.LAYOUTS), 0), axis=1)
    lhs_at, rhs_at, out_at = (positions[i] for i in range(3))
    lhs, rhs = _at(xp, shapes[0], lhs_at), _at(xp, shapes[1], rhs_at)
    two = lhs_at[3] >= 0
    used = xp.stack([two | True, two])

    def dilate(n: Any, d: Any) -> Any:
        return xp.where(n == 0, 0, (n - 1) * d + 1)

    room = dilate(lhs[2:], lhs_dilation) + low + high - dilate(rhs[2:], rhs_dilation)
    spatial = xp.where(room < 0, 0, room // xp.maximum(stride, 1) + 1)
    sizes = xp.concatenate(
        [
            xp.stack([lhs[0] // xp.maximum(batch_groups, 1), rhs[0]]),
            xp.where(used, spatial, 1),
        ]
    )
    place = out_at[:, None] == _index(xp)
    shape = xp.where(xp.any(place, axis=0), xp.sum(place * sizes[:, None], axis=0), 1)
    same_rank = (rhs_at[3] >= 0) == two
    ok = (ranks[0] == xp.where(two, 4, 3)) & (ranks[1] == ranks[0]) & same_rank
    ok &= ((out_at[3] >= 0) == two) & (lhs[1] == rhs[1] * groups)
    parts = xp.maximum(xp.stack([groups, batch_groups, batch_groups]), 1)
    ok &= xp.all(xp.stack([rhs[0], lhs[0], rhs[0]]) % parts == 0)
    # As in lax, feature groups and batch groups exclude each other.
    ok &= (groups == 1) | (batch_groups == 1)
    ok &= xp.all(xp.any(is_code, axis=1)) & xp.all(stride >= 1)
    return shape, ranks[0], ok & (groups >= 1) & (batch_groups >= 1)


# "given" nodes carry their shape; the only such node that a rewrite makes is a scalar constant.
SHAPE_RULES: Mapping[str, ShapeRule] = MappingProxyType(
    {
        "given": lambda xp, attrs, shapes, ranks, n_args: (
            xp.ones(R, shapes.dtype),
            xp.zeros((), ranks.dtype),
            n_args == 0,
        ),
        "elementwise": elementwise,
        "arg0": like_first,
        "transpose": transpose,
        "reshape": reshape,
        "broadcast": broadcast,
        "concat": concat,
        "slice": slice_,
        "pad": pad,
        "reduce": reduce,
        "window": window,
        "dot": dot,
        "conv": conv,
    }
)
SHAPE_FAMILIES: tuple[str, ...] = tuple(SHAPE_RULES)


def shape_of(
    op: ops.OpSpec, attrs: Any, shapes: Any, ranks: Any, n_args: int
) -> tuple[Any, Any, Any]:
    """Infer the shape of one node on the host; see the module docstring for the arguments."""
    return SHAPE_RULES[op.shape](
        np, np.asarray(attrs), np.asarray(shapes), np.asarray(ranks), n_args
    )


def dtype_of(op: ops.OpSpec, attrs: Any, arg_dtypes: tuple[int, ...]) -> int:
    """Return the dtype code of a node's output, on the host; -1 where it is given with the node."""
    match op.dtype:
        case "arg0":
            return arg_dtypes[0]
        case "arg1":
            return arg_dtypes[1]
        case "bool":
            return ops.DTYPE_CODE["bool"]
        case "attr":
            return int(attrs[op.field("dtype").offset])
        case _:
            return -1
