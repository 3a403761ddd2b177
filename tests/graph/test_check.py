"""`check` finds what is wrong with a graph and names it; the check inside jit agrees."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from tests.graph.generators import graphs
from tests.graph.parsed import parse_graph
from tests.graph.valid import is_valid
from xrl_jax.graph import ops
from xrl_jax.graph.bindings import Array, Call, Equation, Input
from xrl_jax.graph.check import check
from xrl_jax.graph.graph import (
    GraphError,
    Node,
    args_of,
    build,
    pack_attrs,
    with_args,
)
from xrl_jax.graph.passes import remove_dead
from xrl_jax.program.check import check_program
from xrl_jax.program.program import Body, Program
from xrl_jax.runtime.engine_jit import engine_jit

_valid = engine_jit(is_valid)
_GRAPH = parse_graph("""graph {
  %1: float32[4,6] = input() ref=@0
  %2: float32[6,3] = weight() ref=@1
  %3: float32[] = const() value=2.0
  %4: float32[4,3] = dot(%1, %2) {lhs_contract=[1], rhs_contract=[0]}
  %5: float32[4,3] = mul(%4, %3)
  %6: float32[3,4] = transpose(%5) {perm=(1, 0)}
  return %6
}""")


def _nodes(graph=_GRAPH, **changes):
    """Return the graph with entries of node features set, e.g. `rank=(5, 3)`."""
    features = {k: getattr(graph.nodes, k).at[at].set(v) for k, (at, v) in changes.items()}
    return graph._replace(nodes=graph.nodes._replace(**features))


def _args(*row, slot):
    padded = jnp.zeros(6, jnp.int32).at[: len(row)].set(jnp.asarray(row, jnp.int32))
    return with_args(_GRAPH, args_of(_GRAPH).at[slot].set(padded))


def _globals(**changes):
    values = {k: getattr(_GRAPH.globals, k).at[at].set(v) for k, (at, v) in changes.items()}
    return _GRAPH._replace(globals=_GRAPH.globals._replace(**values))


@settings(max_examples=15, deadline=None)
@given(graphs())
def test_random_graphs_are_well_formed(case):
    graph = build(*case, bucket=64)
    check(graph)
    assert bool(_valid(graph))


def test_a_graph_with_new_holes_is_well_formed():
    cleaned = engine_jit(remove_dead)(_globals(outputs=(0, 4)))
    check(cleaned)
    assert bool(_valid(cleaned))


_LOCAL = [  # found by both checks
    (_args(4, slot=5), r"%5 \(mul\): takes 2 arguments, got 1"),
    (_args(4, 9, slot=5), r"%5 \(mul\): argument %9 is a hole"),
    (_args(4, 99, slot=5), r"%5 \(mul\): argument %99 is outside the bucket of 64"),
    (_args(0, 4, 3, slot=5), r"%5 \(mul\): there is a gap in its arguments \[0, 4, 3, 0, 0, 0\]"),
    (_args(1, slot=9), r"%9 \(hole\): a hole has arguments \[1\]"),
    (_args(1, 6, slot=4), r"%4 \(dot\): is part of a cycle: %4 <- %6 <- %5 <- %4"),
    (_args(1, 4, slot=4), r"%4 \(dot\): is part of a cycle: %4 <- %4"),
    (
        _globals(depth=(4, 32)),
        r"%4 \(dot\): depth 32 is not greater than those of its arguments, {'%1': 32, '%2': 32}",
    ),
    (_nodes(op=(5, 999)), r"%5 \(op code 999\): unknown op code"),
    (_nodes(op=(0, 3)), r"%0 \(array\): slot 0 must be a hole"),
    (_nodes(shape=((6, 1), 5)), r"type float32\[3,5\], but its shape rule gives float32\[3,4\]"),
    (_nodes(rank=(6, 3)), r"type float32\[3,4,1\], but its shape rule gives float32\[3,4\]"),
    (_nodes(dtype=(6, 15)), r"type float16\[3,4\], but its shape rule gives float32\[3,4\]"),
    (_nodes(dtype=(3, 15)), r"%5 \(mul\): arguments must have one dtype, got float16, float32"),
    (_nodes(shape=((2, 0), 5)), r"%4 \(dot\): arguments and attributes do not fit its shape rule"),
    (
        _nodes(weight_only=(5, True)),
        r"%5 \(mul\): weight_only is True, but must be False",
    ),
    (_nodes(weight_only=(3, False)), r"%3 \(const\): weight_only is False"),
    (_nodes(weight_only=(1, True)), r"%1 \(input\): weight_only is True"),
    (_globals(outputs=(0, 9)), r"output 0 is not a node: %9: hole"),
    (_globals(outputs=(1, 0)), r"output 1 is not a node: %0: hole"),
]
_HOST_ONLY = [
    (_nodes(dtype=(2, 77)), r"%2 \(weight\): unknown dtype code 77"),
    (_nodes(rank=(3, -1)), r"%3 \(const\): rank -1 is negative"),
    (
        _nodes(shape=((3, 2), 4)),
        r"%3 \(const\): shape \[1, 1, 4, 1, 1, 1\] must be 0 sizes, then ones",
    ),
    (_nodes(lowering=(5, -1)), r"%5 \(mul\): lowering -1 is out of range"),
    (_nodes(attrs=((5, 2), 1)), r"%5 \(mul\): attribute integers from entry 0 on are not zero"),
    (_nodes(attrs=((4, 5), 99)), r"%4 \(dot\): attribute dtype=99 is out of range"),
    (_nodes(attrs=((4, 4), 44)), r"%4 \(dot\): attribute precision=44 is out of range"),
    (_nodes(attrs=((4, 0), 8)), r"lhs_contract=8 is not a list of distinct axes below 2"),
    (_nodes(attrs=((4, 2), 2)), r"%4 \(dot\): lhs axes \[1\] are both contracted and batched"),
    (_nodes(ref=(5, 0)), r"%5 \(mul\): refers to binding @0, but mul takes none"),
    (
        _nodes(ref=(2, -1)),
        r"%2 \(weight\): refers to no binding, but weight needs one of kind Input",
    ),
    (_globals(outputs=(2, 3)), r"outputs .* must be slots, then -1"),
]


@pytest.mark.parametrize(
    ("graph", "message"), _LOCAL + _HOST_ONLY, ids=lambda v: v if isinstance(v, str) else ""
)
def test_the_error_names_the_node(graph, message):
    with pytest.raises(GraphError, match=message):
        check(graph)


def test_the_jit_check_finds_errors_local_to_a_node():
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), _GRAPH, *(g for g, _ in _LOCAL))
    assert engine_jit(jax.vmap(is_valid))(batch).tolist() == [True] + [False] * len(_LOCAL)


def test_the_report_shows_the_node_its_arguments_and_its_consumers():
    with pytest.raises(GraphError) as error:
        check(_nodes(dtype=(3, 15)), name="main")
    assert (
        str(error.value)
        == """\
main: node %5 (mul): arguments must have one dtype, got float16, float32
  %5: float32[4,3] = mul(%4, %3)
its arguments:
  %4: float32[4,3] = dot(%1, %2) {lhs_contract=[1], rhs_contract=[0]}
  %3: float16[] = const() value=2.0
used by:
  %6: float32[3,4] = transpose(%5) {perm=(1, 0)}"""
    )


@pytest.mark.parametrize(
    ("op", "attrs", "shape", "message"),
    [
        ("concat", {"axis": 2}, (3, 4), r"axis=2 is outside 0..1"),
        ("reduce_sum", {"axes": 4}, (3, 4), r"axes=4 is not a mask of 2 axes"),
        ("cumsum", {"reverse": 2}, (3, 4), r"reverse=2 is out of range: 0 to 1"),
        (
            "slice",
            {"limit": (3, 4, 0)},
            (3, 4),
            r"limit=.* must have \(1, 1, 1, 1\) from entry 2 on",
        ),
        (
            "reshape",
            {"shape": (-3, -4), "rank": 2},
            (3, 4),
            r"shape=-3 is out of range: at least 0",
        ),
        ("window_sum", {"stride": (0, 1)}, (3, 4), r"stride=0 is out of range: at least 1"),
    ],
)
def test_attributes_out_of_range_are_refused(op, attrs, shape, message):
    nodes = [Node("input", shape=(3, 4), ref=0), Node(op, (0,), pack_attrs(op, attrs), shape=shape)]
    with pytest.raises(GraphError, match=rf"%2 \({op}\): attribute {message}"):
        check(build(nodes, (1,)))


def test_lowerings_are_checked_against_the_known_ones():
    graph = _nodes(lowering=(4, 2))
    check(graph)
    check(graph, lowerings={"dot": 3})
    with pytest.raises(
        GraphError, match=r"%4 \(dot\): lowering 2 is out of range \(known: 0 to 1\)"
    ):
        check(graph, lowerings={"dot": 2})
    with pytest.raises(GraphError, match=r"lowering 2 is out of range \(known: 0 to 0\)"):
        check(graph, lowerings={})


def test_edges_out_of_order_are_named():
    swapped = _GRAPH._replace(edges=_GRAPH.edges.at[24].set(1))
    with pytest.raises(
        GraphError, match=r"%4 \(dot\): edges are not in .* edge 24 is \(4, 1\), not \(4, 0\)"
    ):
        check(swapped)
    with pytest.raises(GraphError, match="64 nodes need 384 edges"):
        check(_GRAPH._replace(edges=_GRAPH.edges[:-1]))
    with pytest.raises(GraphError, match="n_node and n_edge must be 64 and 384"):
        check(_GRAPH._replace(n_node=jnp.asarray([6])))


def test_arrays_of_high_rank_are_for_opaque_nodes_only():
    wide = Node("input", shape=(1,) * 8, ref=0)
    held = Node("opaque", (0,), pack_attrs("opaque", {"n_args": 1}), ref=1)
    check(build([wide, held], (1,)))
    with pytest.raises(GraphError, match="takes arrays of at most 6 dimensions"):
        check(build([wide, Node("neg", (0,), shape=(1,) * 8)], (1,)))


_AVAL = jax.ShapeDtypeStruct((2,), jnp.float32)
_MAIN = """graph {
  %1: float32[2] = input() ref=@0
  %2: float32[2] = weight() ref=@1
  %3: float32[2] = array() ref=@2
  %4: tuple[] = opaque(%1) {n_args=1} ref=@3
  %5: float32[2] = proj(%4) {index=1}
  %6: float32[2] = call(%5, %2) {n_args=2} ref=@4
  %7: float32[2] = add(%6, %3)
  return %7
}"""
_BODY = """graph {
  %1: float32[2] = input() ref=@0
  %2: float32[2] = input() ref=@1
  %3: float32[2] = mul(%1, %2)
  return %3
}"""
_SORT = Equation(jax.lax.sort_p, {"dimension": 0}, 2, (_AVAL, _AVAL))


def _program(main=_MAIN, body=_BODY, call=None, **changes):
    bindings = (
        Input(0),
        Input(1),
        Array(np.zeros(2, np.float32)),
        _SORT,
        call or Call("inline", (0,)),
        Input(2),
    )
    program = Program(
        graph=parse_graph(main),
        bodies=(Body(parse_graph(body), (_AVAL, _AVAL), 1, 12.0),),
        bindings=bindings,
        in_avals=(_AVAL, _AVAL),
        weights=(False, True),
        in_tree=None,
        out_tree=None,
        n_outputs=1,
    )
    return replace(program, **changes)


def test_a_consistent_program_is_well_formed():
    check_program(_program())


def _scan(n_consts):
    params = {"num_consts": n_consts, "num_carry": 1}
    return Equation(jax.lax.scan_p, params, 1, (_AVAL,))


def _while(n_cond, n_body):
    return Equation(jax.lax.while_p, {"cond_nconsts": n_cond, "body_nconsts": n_body}, 1, (_AVAL,))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            _program(_MAIN.replace("ref=@2", "ref=@9")),
            r"%3 \(array\): refers to binding @9, but there are 6 bindings",
        ),
        (
            _program(_MAIN.replace("ref=@2", "ref=@0")),
            r"%3 \(array\): @0 is of kind Input, but array needs Array",
        ),
        (
            _program(_MAIN.replace("ref=@3", "ref=@4")),
            r"%4 \(opaque\): @4 is of kind Call, but opaque needs Equation",
        ),
        (
            _program(
                bindings=(
                    *_program().bindings[:2],
                    Array(np.zeros(3, np.int32)),
                    *_program().bindings[3:],
                )
            ),
            r"%3 \(array\): its type differs from @2, int32\[3\]",
        ),
        (
            _program(_MAIN.replace("{index=1}", "{index=2}")),
            r"%5 \(proj\): index 2 is out of range: sort has 2 results",
        ),
        (
            _program(_MAIN.replace("ref=@1", "ref=@5")),
            r"%2 \(weight\): is argument 2, but there are 2 arguments",
        ),
        (
            _program(_MAIN.replace("weight()", "input()")),
            r"main: node %2 \(input\): argument 1 of the program must be weight, not input",
        ),
        (
            _program(in_avals=(_AVAL, jax.ShapeDtypeStruct((3,), jnp.float32))),
            r"%2 \(weight\): its type differs from argument 1, float32\[3\]",
        ),
        (
            _program(body=_BODY.replace("input() ref", "input() {carried=2} ref")),
            r"body0: node %1 \(input\): carried is 2, but the body has 1 results",
        ),
        (
            _program(_MAIN.replace("input() ref", "input() {carried=1} ref")),
            r"main: node %1 \(input\): carried is 1, but the body has 0 results",
        ),
        (_program(weights=(False,)), "2 arguments, but 1 weight flags"),
        (_program(n_outputs=2), "main: has 1 outputs, should have 2"),
        (
            _program(body=_BODY.replace("return %3", "return %3, %1")),
            "body0: has 2 outputs, should have 1",
        ),
        (
            _program(_MAIN.replace("call(%5, %2) {n_args=2}", "call(%5) {n_args=1}")),
            r"%6 \(call\): has 1 operands, but its inline takes 2",
        ),
        (
            _program(_MAIN.replace("{n_args=2}", "{n_args=3}")),
            r"%6 \(call\): n_args is 3, but it has 2 operands",
        ),
        (_program(call=Call("inline", (1,))), r"%6 \(call\): runs body1"),
        (_program(call=Call("inline", (0, 0))), r"a call of kind inline cannot have 2 bodies"),
        (
            _program(call=Call("loop", (0,))),
            r"unknown call kind 'loop' \(known: inline, scan, while, cond\)",
        ),
        (_program(call=Call("cond", (0, 0))), r"has 2 operands, but its cond takes 3"),
        (
            _program(call=Call("while", (0, 0), _while(1, 0))),
            r"the bodies of this while differ in their inputs",
        ),
        (
            _program(call=Call("while", (0, 0), _while(1, 1))),
            r"has 2 operands, but its while takes 3",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_inconsistencies_of_a_program_are_named(program, message):
    with pytest.raises(GraphError, match=message):
        check_program(program)


@pytest.mark.parametrize(
    "call", [Call("scan", (0,), _scan(1)), Call("while", (0, 0), _while(0, 0))]
)
def test_loops_whose_bodies_take_the_operands_are_well_formed(call):
    check_program(_program(call=call))


@pytest.mark.parametrize(
    ("body", "main", "message"),
    [
        (
            "graph {\n  %1: int32[2] = iota()\n  return %1\n}",
            _MAIN,
            r"%6 \(call\): its type differs from result 0 of its body, int32\[2\]",
        ),
        (
            _BODY,
            _MAIN.replace("float32[2] = call", "tuple[] = call").replace(
                "%7: float32[2] = add(%6, %3)", "%7: float32[2] = proj(%6) {index=1}"
            ),
            r"%7 \(proj\): index 1 is out of range: its body has 1 results",
        ),
        (
            _BODY,
            _MAIN.replace("call(%5, %2)", "call(%4, %2)"),
            r"%6 \(call\): operand 0 is %4, but its body takes float32\[2\]",
        ),
    ],
)
def test_inlined_bodies_have_the_types_of_their_call(body, main, message):
    with pytest.raises(GraphError, match=message):
        check_program(_program(main, body))


def test_a_body_may_not_run_itself():
    body = _BODY.replace("mul(%1, %2)", "call(%1, %2) {n_args=2} ref=@4")
    with pytest.raises(GraphError, match=r"body0: node %3 \(call\): runs body0"):
        check_program(_program(body=body))


def test_every_op_code_has_a_row_in_the_tables_of_the_jit_check():
    source = Node("input", shape=(2,), ref=0)
    for spec in ops.OPS.values():
        if spec.shape == "elementwise" and spec.dtype == "arg0":
            node = Node(spec.name, (0,) * spec.arity[0], shape=(2,))
            assert bool(_valid(build([source, node], (1,))))
