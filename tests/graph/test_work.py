"""Flops and bytes: literal values, inside jit, and XLA's own count where it is comparable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.graph.generators import random_graph
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, args_of, build, infer, nodes_of, pack_attrs
from xrl_jax.graph.ops import LAYOUT_CODE, mask_of, pack_dims
from xrl_jax.graph.work import FAMILY, NO_BYTES, WEIGHTS, WORK_FAMILIES, node_work, traced_work

F32 = ops.DTYPE_CODE["float32"]
NCHW, NHWC, HWIO = LAYOUT_CODE[0, 1, 2, 3], LAYOUT_CODE[0, 3, 1, 2], LAYOUT_CODE[3, 2, 0, 1]
DOT = dict(lhs_contract=pack_dims((1,)), rhs_contract=pack_dims((0,)), dtype=F32)
CONV = dict(lhs_layout=NCHW, rhs_layout=NCHW, out_layout=NCHW, dtype=F32)


def _work(op, attrs, *args, dtype="float32"):
    packed = pack_attrs(op, attrs)
    nodes = [Node("input", shape=shape, dtype=dtype) for shape in args]
    found = infer(op, packed, nodes)
    assert found is not None
    return node_work(Node(op, attrs=packed, shape=found[0], dtype=found[1]), nodes)


@pytest.mark.parametrize(
    ("op", "attrs", "args", "flops", "n_bytes"),
    [
        ("add", {}, [(4, 5), (4, 5)], 20, 3 * 20 * 4),
        ("add", {}, [(4, 5), ()], 20, (20 + 1 + 20) * 4),
        ("exp", {}, [(4, 5)], 200, 2 * 20 * 4),
        ("transpose", {"perm": (1, 0)}, [(4, 5)], 0, 2 * 20 * 4),
        ("reshape", {"shape": (20,), "rank": 1}, [(4, 5)], 0, 0),
        ("slice", {"limit": (4, 2)}, [(4, 5)], 0, 2 * 8 * 4),
        ("broadcast", {"shape": (4, 5), "rank": 2, "dims": (1,)}, [(5,)], 0, (5 + 20) * 4),
        ("concat", {"axis": 0}, [(4, 5), (2, 5)], 0, (20 + 10 + 30) * 4),
        ("lt", {}, [(4, 5), (4, 5)], 20, 2 * 20 * 4 + 20),
        ("reduce_sum", {"axes": mask_of((1,))}, [(4, 5)], 16, (20 + 4) * 4),
        ("cumsum", {"axis": 1}, [(4, 5)], 20, 2 * 20 * 4),
        ("softmax", {"axes": mask_of((1,))}, [(4, 5)], 400, 2 * 20 * 4),
        ("window_max", {"window": (1, 1, 2, 2)}, [(1, 1, 4, 4)], 9 * 3, (16 + 9) * 4),
        ("dot", DOT, [(2, 3), (3, 5)], 2 * 2 * 3 * 5, (6 + 15 + 10) * 4),
        ("conv", CONV, [(1, 3, 8, 8), (16, 3, 3, 3)], 2 * 16 * 36 * 27, (192 + 432 + 576) * 4),
        (
            "conv",
            {**CONV, "groups": 4},
            [(1, 8, 5, 5), (8, 2, 1, 1)],
            2 * 200 * 2,
            (200 + 16 + 200) * 4,
        ),
        (
            "conv",
            dict(lhs_layout=NHWC, rhs_layout=HWIO, out_layout=NHWC, dtype=F32),
            [(1, 8, 8, 3), (3, 3, 3, 16)],
            2 * 16 * 36 * 27,
            (192 + 432 + 576) * 4,
        ),
    ],
)
def test_flops_and_bytes(op, attrs, args, flops, n_bytes):
    assert _work(op, attrs, *args) == (flops, n_bytes)


def test_bytes_follow_the_dtype():
    assert _work("neg", {}, (8,), dtype="bfloat16") == (8.0, 32.0)


@pytest.mark.parametrize("op", ops.OPS)
def test_every_op_has_a_family_and_a_weight(op):
    assert FAMILY[op] in WORK_FAMILIES
    assert WEIGHTS[op] >= 1.0
    if op in NO_BYTES:
        assert FAMILY[op] == "nothing"


def test_large_networks_do_not_overflow():
    flops, n_bytes = _work("dot", DOT, (2**16, 2**16), (2**16, 2**16))
    assert flops == 2.0**49
    assert n_bytes == 3 * 2.0**34


def _graph_work(graph):
    f, args = graph.nodes, args_of(graph)
    shapes = jnp.where((args > 0)[..., None], f.shape[args], 1)
    ranks, dtypes = (jnp.where(args > 0, x[args], 0) for x in (f.rank, f.dtype))
    return jax.vmap(traced_work)(f.op, f.attrs, shapes, ranks, dtypes, f.shape, f.dtype)


def test_a_graph_under_jit_and_vmap_agrees_with_the_host():
    graphs = [build(*random_graph(np.random.default_rng(s)), bucket=64) for s in range(6)]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *graphs)
    flops, n_bytes = jax.jit(jax.vmap(_graph_work))(batch)
    assert flops.dtype == n_bytes.dtype == jnp.float32
    for i, graph in enumerate(graphs):
        nodes, _, slots = nodes_of(graph)
        wanted = np.zeros((64, 2), np.float32)
        for node, slot in zip(nodes, slots, strict=True):
            wanted[slot] = node_work(node, [nodes[a] for a in node.args])
        np.testing.assert_array_equal(np.stack([flops[i], n_bytes[i]], axis=1), wanted)


def _xla_flops(fn, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    analysis = jax.jit(fn).lower(*args).compile().cost_analysis()
    assert analysis is not None
    return analysis["flops"]


def test_dot_counts_what_xla_counts():
    xla = _xla_flops(jnp.matmul, (7, 12, 16), (7, 16, 9))
    attrs = dict(
        lhs_contract=pack_dims((2,)),
        rhs_contract=pack_dims((1,)),
        lhs_batch=pack_dims((0,)),
        rhs_batch=pack_dims((0,)),
        dtype=F32,
    )
    assert _work("dot", attrs, (7, 12, 16), (7, 16, 9))[0] == xla


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 4)])
def test_a_convolution_without_padding_counts_what_xla_counts(stride, groups):
    lhs, rhs = (2, 8, 12, 12), (16, 8 // groups, 3, 3)
    xla = _xla_flops(
        lambda x, w: lax.conv_general_dilated(
            x, w, (stride, stride), "VALID", feature_group_count=groups
        ),
        lhs,
        rhs,
    )
    attrs = {**CONV, "stride": (stride, stride), "groups": groups}
    assert _work("conv", attrs, lhs, rhs)[0] == xla


def test_a_sum_counts_what_xla_counts():
    assert _work("reduce_sum", {"axes": 0b10}, (16, 32))[0] == _xla_flops(
        lambda x: jnp.sum(x, axis=1), (16, 32)
    )
