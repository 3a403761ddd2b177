"""Shape and dtype rules on literal examples; and the same rules inside jit and on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.graph.generators import random_graph
from xrl_jax.graph import ops, shapes
from xrl_jax.graph.graph import GraphError, Node, infer, pack_attrs, padded
from xrl_jax.graph.ops import LAYOUT_CODE, mask_of, pack_dims

F32, I32 = ops.DTYPE_CODE["float32"], ops.DTYPE_CODE["int32"]
NCHW, OIHW = LAYOUT_CODE[0, 1, 2, 3], LAYOUT_CODE[0, 1, 2, 3]
NHWC, HWIO = LAYOUT_CODE[0, 3, 1, 2], LAYOUT_CODE[3, 2, 0, 1]
DOT = dict(lhs_contract=pack_dims((1,)), rhs_contract=pack_dims((0,)), dtype=F32)
CONV = dict(lhs_layout=NCHW, rhs_layout=OIHW, out_layout=NCHW, dtype=F32)
BATCHED = dict(
    lhs_contract=pack_dims((3,)),
    rhs_contract=pack_dims((2,)),
    lhs_batch=pack_dims((0, 1)),
    rhs_batch=pack_dims((0, 1)),
    dtype=F32,
)

# op, attributes, argument shapes, result shape (None: does not fit)
CASES = [
    ("neg", {}, [(2, 3)], (2, 3)),
    ("add", {}, [(2, 3), (2, 3)], (2, 3)),
    ("add", {}, [(), (2, 3)], (2, 3)),
    ("add", {}, [(), ()], ()),
    ("add", {}, [(2, 3), (3,)], None),
    ("add", {}, [(2, 3), (1, 3)], None),
    ("select", {}, [(), (4,), (4,)], (4,)),
    ("clamp", {}, [(), (4,), ()], (4,)),
    ("transpose", {"perm": (2, 0, 1)}, [(4, 5, 6)], (6, 4, 5)),
    ("transpose", {"perm": (0, 0, 1)}, [(4, 5, 6)], None),
    ("transpose", {"perm": (0, 1, 3, 2)}, [(4, 5, 6)], None),
    ("reshape", {"shape": (6, 4), "rank": 2}, [(2, 3, 4)], (6, 4)),
    ("reshape", {"shape": (), "rank": 0}, [(1, 1)], ()),
    ("reshape", {"shape": (5, 5), "rank": 2}, [(2, 3, 4)], None),
    ("broadcast", {"shape": (2, 3), "rank": 2, "dims": (1,)}, [(3,)], (2, 3)),
    ("broadcast", {"shape": (2, 3), "rank": 2, "dims": (0,)}, [(1,)], (2, 3)),
    ("broadcast", {"shape": (2, 3), "rank": 2, "dims": ()}, [()], (2, 3)),
    ("broadcast", {"shape": (2, 3), "rank": 2, "dims": (0,)}, [(3,)], None),
    ("broadcast", {"shape": (3, 2), "rank": 2, "dims": (1, 0)}, [(2, 3)], None),
    ("concat", {"axis": 1}, [(2, 3), (2, 4), (2, 1)], (2, 8)),
    ("concat", {"axis": 0}, [(2, 3), (2, 4)], None),
    ("concat", {"axis": 2}, [(2, 3)], None),
    ("slice", {"start": (1, 0), "limit": (4, 5), "stride": (2, 3)}, [(4, 5)], (2, 2)),
    ("slice", {"start": (2,), "limit": (2,)}, [(4,)], (0,)),
    ("slice", {"start": (0,), "limit": (5,)}, [(4,)], None),
    ("pad", {"low": (1,), "high": (2,), "interior": (1,)}, [(3,), ()], (8,)),
    ("pad", {"low": (-1,), "high": (0,)}, [(3,), ()], (2,)),
    ("pad", {"low": (-4,), "high": (0,)}, [(3,), ()], None),
    ("pad", {"low": (1,)}, [(3,), (1,)], None),
    ("rev", {"axes": mask_of((0,))}, [(3, 2)], (3, 2)),
    ("reduce_sum", {"axes": mask_of((0, 2))}, [(4, 5, 6)], (5,)),
    ("reduce_max", {"axes": 0}, [(4, 5)], (4, 5)),
    ("reduce_sum", {"axes": mask_of((2,))}, [(4, 5)], None),
    ("argmax", {"axes": mask_of((1,)), "dtype": I32}, [(4, 5)], (4,)),
    ("cumsum", {"axis": 1}, [(4, 5)], (4, 5)),
    ("softmax", {"axes": mask_of((1,))}, [(4, 5)], (4, 5)),
    (
        "window_max",
        {"window": (1, 1, 3, 3), "stride": (1, 1, 2, 2), "high": (0, 0, 1, 1)},
        [(1, 8, 6, 7)],
        (1, 8, 3, 3),
    ),
    ("window_sum", {"window": (5,)}, [(3,)], (0,)),
    ("window_sum", {}, [(2,) * 5], None),
    ("dot", DOT, [(2, 3), (3, 4)], (2, 4)),
    ("dot", DOT, [(2, 3), (4, 3)], None),
    ("dot", DOT, [(2, 3), (3,)], (2,)),
    ("dot", BATCHED, [(2, 3, 4, 5), (2, 3, 5, 6)], (2, 3, 4, 6)),
    ("dot", BATCHED, [(2, 3, 4, 5), (2, 2, 5, 6)], None),
    ("dot", {"dtype": F32}, [(2,), (3,)], (2, 3)),
    ("dot", {"dtype": F32}, [(2,) * 4, (3,) * 3], None),
    ("conv", CONV, [(1, 3, 8, 8), (16, 3, 3, 3)], (1, 16, 6, 6)),
    (
        "conv",
        {**CONV, "stride": (2, 2), "low": (1, 1), "high": (1, 1)},
        [(1, 3, 8, 8), (16, 3, 3, 3)],
        (1, 16, 4, 4),
    ),
    ("conv", {**CONV, "rhs_dilation": (2, 1)}, [(1, 3, 8, 8), (16, 3, 3, 3)], (1, 16, 4, 6)),
    ("conv", {**CONV, "lhs_dilation": (2, 2)}, [(1, 3, 4, 4), (8, 3, 2, 2)], (1, 8, 6, 6)),
    ("conv", {**CONV, "groups": 4}, [(1, 8, 5, 5), (8, 2, 1, 1)], (1, 8, 5, 5)),
    ("conv", {**CONV, "groups": 3}, [(1, 8, 5, 5), (8, 2, 1, 1)], None),
    ("conv", {**CONV, "batch_groups": 2}, [(4, 3, 5, 5), (6, 3, 1, 1)], (2, 6, 5, 5)),
    ("conv", {**CONV, "batch_groups": 2}, [(4, 3, 5, 5), (7, 3, 1, 1)], None),
    ("conv", {**CONV, "batch_groups": 2, "groups": 3}, [(4, 3, 5, 5), (6, 1, 1, 1)], None),
    (
        "conv",
        dict(lhs_layout=NHWC, rhs_layout=HWIO, out_layout=NCHW, dtype=F32),
        [(1, 8, 9, 3), (3, 3, 3, 16)],
        (1, 16, 6, 7),
    ),
    ("conv", {"dtype": F32}, [(1, 3, 8), (5, 3, 2)], (1, 5, 7)),
    ("conv", {"dtype": F32}, [(1, 3, 8, 8), (5, 3, 2, 2)], None),
]


@pytest.mark.parametrize(("op", "attrs", "args", "expected"), CASES)
def test_result_shapes(op, attrs, args, expected):
    nodes = [Node("input", shape=shape) for shape in args]
    found = infer(op, pack_attrs(op, attrs), nodes)
    assert (found and found[0]) == expected


@pytest.mark.parametrize(
    ("op", "attrs", "args", "expected"),
    [
        ("add", {}, ["float16", "float16"], "float16"),
        ("select", {}, ["bool", "int32", "int32"], "int32"),
        ("lt", {}, ["float32", "float32"], "bool"),
        ("is_finite", {}, ["float32"], "bool"),
        ("cast", {"dtype": I32}, ["float32"], "int32"),
        ("dot", {"dtype": F32}, ["bfloat16", "bfloat16"], "float32"),
    ],
)
def test_result_dtypes(op, attrs, args, expected):
    found = infer(op, pack_attrs(op, attrs), [Node("input", dtype=dtype) for dtype in args])
    assert found == ((), expected)


def test_the_shape_of_an_input_cannot_be_inferred():
    with pytest.raises(GraphError, match="'input' node cannot be inferred"):
        infer("input", pack_attrs("input", {}), [])


def _row(op, attrs, args):
    sizes = np.ones((ops.MAX_ARGS, ops.MAX_RANK), np.int32)
    ranks = np.zeros(ops.MAX_ARGS, np.int32)
    for i, shape in enumerate(args):
        sizes[i], ranks[i] = padded(shape), len(shape)
    return np.asarray(attrs, np.int32), sizes, ranks, np.int32(len(args))


def _cases_by_family() -> dict[str, list]:
    rows: dict[str, list] = {}
    for op, attrs, args, _ in CASES:
        rows.setdefault(ops.OPS[op].shape, []).append(_row(op, pack_attrs(op, attrs), args))
    for seed in range(10):
        nodes, _ = random_graph(np.random.default_rng(seed))
        for node in nodes:
            if node.args:
                args = [nodes[a].shape for a in node.args]
                rows.setdefault(node.spec.shape, []).append(_row(node.op, node.attrs, args))
    return rows


@pytest.mark.parametrize("family", [f for f in shapes.SHAPE_FAMILIES if f != "given"])
def test_the_rules_agree_under_jit_and_vmap_with_the_host(family):
    rows = _cases_by_family()[family]
    rule = shapes.SHAPE_RULES[family]
    batch = [jnp.asarray(np.stack(column)) for column in zip(*rows, strict=True)]
    shape, rank, ok = jax.jit(jax.vmap(lambda *node: rule(jnp, *node)))(*batch)
    for i, row in enumerate(rows):
        host_shape, host_rank, host_ok = rule(np, *row)
        assert bool(ok[i]) == bool(host_ok)
        if host_ok:
            assert shape[i].tolist() == host_shape.tolist()
            assert int(rank[i]) == int(host_rank)
