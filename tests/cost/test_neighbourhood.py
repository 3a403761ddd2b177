"""Neighbourhoods: programs of the nodes near a node, which compute the same as the network."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from xrl_jax.cost.neighbourhood import neighbourhood
from xrl_jax.cost.programs import program_job
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, TensorGraph, build, nodes_of, pack_attrs
from xrl_jax.lower.table import number_of
from xrl_jax.program.program import Program

DIMS = {"lhs_contract": ops.pack_dims((1,)), "rhs_contract": ops.pack_dims((0,))}
CONTRACT = pack_attrs("dot", {**DIMS, "dtype": ops.DTYPE_CODE["float32"]})
TWO = (2, 2)
TRANSPOSED = number_of("dot", "transposed")


def node(op: str, *args: int, **fields) -> Node:
    return Node(op, args, CONTRACT if op == "dot" else (0,) * ops.MAX_ATTRS, shape=TWO, **fields)


# x -> exp -> tanh -> (dot with neg(w)) -> abs -> sin -> cos
#              |                           |
#              +--------- mul -------------+   (a second output)
NODES = (
    node("input", ref=0),  # 0
    node("weight", ref=1),  # 1
    node("neg", 1),  # 2
    node("exp", 0),  # 3
    node("tanh", 3),  # 4
    node("dot", 4, 2),  # 5
    node("abs", 5),  # 6
    node("sin", 6),  # 7
    node("cos", 7),  # 8
    node("mul", 4, 6),  # 9
)
OUTPUTS = (8, 9)
DOT = 5 + 1  # its slot


def graph(lowering: int = 0, **others: Node) -> TensorGraph:
    nodes = [node("dot", 4, 2, lowering=lowering) if n.op == "dot" else n for n in NODES]
    return build([others.get(n.op, n) for n in nodes], OUTPUTS)


def around(radius: int, **others) -> Program:
    found = neighbourhood(graph(**others), DOT, radius)
    assert found is not None
    return found


def text(program: Program) -> tuple[list[str], list[str]]:
    """Return the nodes with their arguments, and the outputs."""
    nodes, outputs, _ = nodes_of(program.graph)
    return [" ".join([n.op, *(nodes[a].op for a in n.args)]) for n in nodes], [
        nodes[o].op for o in outputs
    ]


def test_radius_0_is_the_operator_and_the_work_on_its_weights():
    program = around(0)
    assert text(program) == (["weight", "input", "neg weight", "dot input neg"], ["dot"])
    assert program.weights == (True, False)


def test_at_radius_1_values_read_outside_are_outputs_too():
    nodes, outputs = text(around(1))
    assert sorted(nodes) == sorted(
        ["weight", "input", "neg weight", "tanh input", "dot tanh neg", "abs dot"]
    )
    assert outputs == ["tanh", "abs"]


def test_at_radius_2_branches_of_consumers_are_inside():
    nodes, outputs = text(around(2))
    assert "exp input" in nodes and "sin abs" in nodes and "mul tanh abs" in nodes
    assert not any(n.startswith("cos") for n in nodes)
    assert outputs == ["sin", "mul"]


def test_opaque_operators_are_never_inside():
    opaque = Node("opaque", (0,), pack_attrs("opaque", {"n_args": 1}), shape=TWO, ref=2)
    nodes, _ = text(around(3, exp=opaque))
    assert "tanh input" in nodes and not any(n.startswith("opaque") for n in nodes)


def test_an_operator_next_to_random_keys_has_no_neighbourhood():
    assert neighbourhood(graph(exp=node("exp", 0, dtype="extended")), DOT, 1) is None


@pytest.mark.parametrize("lowering", [0, TRANSPOSED])
def test_a_neighbourhood_computes_the_networks_values_in_either_lowering(lowering):
    program = around(2, lowering=lowering)
    x, w = (np.asarray(jax.random.normal(jax.random.key(i), TWO)) for i in range(2))
    by_kind = {True: w, False: x}
    sin, mul = program(*(by_kind[k] for k in program.weights))
    y = np.tanh(np.exp(x))
    z = np.abs(y @ -w)
    np.testing.assert_allclose(sin, np.sin(z), rtol=1e-5)
    np.testing.assert_allclose(mul, y * z, rtol=1e-5)


def test_keys_depend_on_lowering_and_surroundings():
    keys = {program_job(around(r, lowering=f)).key for r in (0, 1) for f in (0, TRANSPOSED)}
    assert len(keys) == 4
    assert program_job(around(1)).key == program_job(around(1)).key
