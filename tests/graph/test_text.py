"""The text form: literal examples, round trips, and the positions that errors report."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from tests.graph.generators import graphs
from tests.graph.parsed import parse_graph
from xrl_jax.graph import attributes, ops
from xrl_jax.graph.bindings import Array, Call, Equation, Input
from xrl_jax.graph.graph import Node, build, nodes_of, pack_attrs
from xrl_jax.graph.hash import identity
from xrl_jax.graph.ops import LAYOUT_CODE, mask_of, pack_dims
from xrl_jax.graph.passes import raise_depths
from xrl_jax.graph.text import GraphTextError, format_graph
from xrl_jax.program.program import Body, Program
from xrl_jax.program.text import parse_program

F32 = ops.DTYPE_CODE["float32"]
_DIGESTS = np.random.default_rng(0).integers(0, 2**32, (64, 2), np.uint32)
_hash = jax.jit(identity)

_EXAMPLE = """\
graph {
  %1: float32[2,3] = input() ref=@0
  %2: float32[] = const() value=0.5
  %3: float32[2] = reduce_sum(%1) {axes=[1]}
  %4: float32[2] = mul(%3, %2) lowering=1
  return %4, %1
}"""


def test_a_graph_is_one_line_per_node_in_topological_order():
    nodes = [
        Node("input", shape=(2, 3), ref=0),
        Node("const", value=0.5),
        Node("reduce_sum", (0,), pack_attrs("reduce_sum", {"axes": 0b10}), shape=(2,)),
        Node("mul", (2, 1), lowering=1, shape=(2,)),
    ]
    assert format_graph(build(nodes, (3, 0))) == _EXAMPLE


def test_formatting_a_parsed_graph_gives_the_same_text():
    assert format_graph(parse_graph(_EXAMPLE)) == _EXAMPLE


def _line(op, args, attrs, shape, dtype="float32"):
    """Return the text of the last node of a graph with inputs of the shapes `args`."""
    nodes = [Node("input", shape=s, ref=i) for i, s in enumerate(args)]
    node = Node(op, tuple(range(len(args))), pack_attrs(op, attrs), shape=shape, dtype=dtype)
    graph = build([*nodes, node], (len(nodes),))
    text = format_graph(graph)
    assert nodes_of(parse_graph(text))[0][-1] == node
    return text.splitlines()[-3].split(" = ")[1]


_CONV = dict(
    stride=(2, 1),
    low=(1, 0),
    lhs_layout=LAYOUT_CODE[0, 1, 2, 3],
    rhs_layout=LAYOUT_CODE[3, 2, 0, 1],
    out_layout=LAYOUT_CODE[0, 3, 1, 2],
    precision=9,
    dtype=F32,
)


@pytest.mark.parametrize(
    ("op", "args", "attrs", "shape", "text"),
    [
        ("neg", [(2,)], {}, (2,), "neg(%1)"),
        ("transpose", [(2, 3, 4)], {"perm": (1, 0)}, (3, 2, 4), "{perm=(1, 0, 2)}"),
        ("transpose", [(2, 3, 4)], {}, (2, 3, 4), "transpose(%1)"),
        ("reshape", [(2, 3)], {"shape": (6,), "rank": 1}, (6,), "reshape(%1)"),
        ("broadcast", [(3,)], {"shape": (2, 3), "rank": 2, "dims": (1,)}, (2, 3), "{dims=(1,)}"),
        (
            "slice",
            [(4, 5)],
            {"start": (1,), "limit": (4, 5)},
            (3, 5),
            "{start=(1, 0), limit=(4, 5)}",
        ),
        ("rev", [(4, 5)], {"axes": mask_of((0, 1))}, (4, 5), "{axes=[0, 1]}"),
        ("reduce_sum", [(4, 5)], {"axes": 0}, (4, 5), "reduce_sum(%1)"),
        (
            "dot",
            [(2, 3), (4, 3)],
            {"lhs_contract": pack_dims((1,)), "rhs_contract": pack_dims((1,)), "dtype": F32},
            (2, 4),
            "{lhs_contract=[1], rhs_contract=[1]}",
        ),
        (
            "dot",
            [(2,), (3,)],
            {"precision": 2, "dtype": F32},
            (2, 3),
            "{precision=DEFAULT|HIGH}",
        ),
        (
            "dot",
            [(2,), (3,)],
            {"precision": 10 + 14, "dtype": F32},
            (2, 3),
            "{precision=algorithm:F32_F32_F32}",
        ),
        (
            "conv",
            [(1, 3, 8, 8), (2, 2, 3, 16)],
            _CONV,
            (1, 4, 7, 16),
            "{stride=(2, 1), low=(1, 0), lhs_layout=NCHW, rhs_layout=HWIO, out_layout=NHWC, "
            "precision=HIGHEST}",
        ),
        (
            "conv",
            [(1, 3, 8), (5, 3, 2)],
            {"rhs_layout": LAYOUT_CODE[0, 1, 2], "stride": (3,), "dtype": F32},
            (1, 5, 3),
            "{stride=(3,)}",
        ),
    ],
)
def test_attributes_are_readable_and_defaults_are_left_out(op, args, attrs, shape, text):
    assert _line(op, args, attrs, shape).endswith(text)


def test_the_dtype_of_a_cast_is_shown_in_its_type():
    text = _line("cast", [(2,)], {"dtype": ops.DTYPE_CODE["int8"]}, (2,), "int8")
    assert text == "cast(%1)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.0"),
        (0.1, "0.1"),
        (-0.0, "-0.0"),
        (1e-45, "1e-45"),
        (3.4028235e38, "3.4028235e+38"),
        (float("-inf"), "-inf"),
        (float("nan"), "nan"),
        (16777217.0, "1.6777216e+07"),
    ],
)
def test_constants_are_exact(value, text):
    graph = build([Node("const", value=value)], (0,))
    assert format_graph(graph).splitlines()[1].endswith(f"value={text}")
    again = parse_graph(format_graph(graph)).nodes.value[1]
    assert np.asarray(again).tobytes() == np.asarray(graph.nodes.value[1]).tobytes()


def test_an_unusual_nan_is_written_by_its_bits():
    value = np.uint32(0xFFC00001).view(np.float32)
    graph = build([Node("const")], (0,))
    graph = graph._replace(nodes=graph.nodes._replace(value=graph.nodes.value.at[1].set(value)))
    text = format_graph(graph)
    assert "value=0xffc00001" in text
    assert np.asarray(parse_graph(text).nodes.value[1]).tobytes() == value.tobytes()


@pytest.mark.parametrize("field", ["precision", "lhs_layout", "rhs_layout", "dtype"])
def test_every_code_of_an_enumerated_field_has_a_name_of_its_own(field):
    field = ops.OPS["conv"].field(field)
    names = attributes.names_of(field.kind)
    assert names is not None
    assert len(set(names.values())) == len(names)
    for code in names:
        assert attributes.decode(field, attributes.encode(field, code)) == code


@settings(max_examples=40, deadline=None)
@given(graphs())
def test_random_graphs_survive_formatting_and_parsing(case):
    graph = build(*case, bucket=64)
    text = format_graph(graph)
    again = parse_graph(text)
    assert format_graph(again) == text
    assert _hash(again, _DIGESTS).tolist() == _hash(graph, _DIGESTS).tolist()


def test_the_text_does_not_depend_on_depths():
    graph = parse_graph(_EXAMPLE)
    depth = graph.globals.depth.at[1].set(900)
    lifted = jax.jit(raise_depths)(graph._replace(globals=graph.globals._replace(depth=depth)))
    assert format_graph(lifted) == _EXAMPLE


def test_dead_nodes_are_not_written():
    nodes = [Node("input", shape=(2,), ref=0), Node("exp", (0,), shape=(2,))]
    assert "exp" not in format_graph(build(nodes, (0,)))


def test_opaque_nodes_and_their_results_survive_parsing_and_formatting():
    text = """\
graph {
  %1: float32[4] = input() ref=@0
  %2: tuple[] = opaque(%1) {pinned=1, n_args=1} ref=@1
  %3: extended[2] = proj(%2) {index=1}
  return %3
}"""
    assert format_graph(parse_graph(text)) == text


_BROKEN = [
    ("  %1: float32[2] = foo()\n  return %1", 2, 20, "unknown operator 'foo'"),
    ("  %1: float99[2] = input()\n  return %1", 2, 7, "unknown dtype 'float99'"),
    ("  %1: float32[2] = neg(%0)\n  return %1", 2, 24, "%0 is not defined above"),
    ("  %1: float32[2] = input(\n  return %1", 2, 26, "expected an argument"),
    ("  %1: float32[x] = input()\n  return %1", 2, 15, "expected a size, found 'x]'"),
    ("  %1: float32[2] = input()\n  %1: float32[2] = input()", 3, 3, "%1 is defined twice"),
    ("  %1: float32[2] = input()\n  return %3", 3, 10, "%3 is not defined above"),
    ("  %1: float32[2] = input() ref=7\n  return %1", 2, 28, "unexpected 'ref=7'"),
    ("  %1: float32[2] = input()", 3, 1, "the graph has no 'return'"),
    ("  %1: float32[2] = input()\n  return %1\n  return %1", 4, 3, "expected '}'"),
    (
        "  %1: float32[2] = input()\n  %2: float32[2] = add(%1)\n  return %2",
        3,
        20,
        "add takes 2 arguments, got 1",
    ),
    (
        "  %1: float32[2] = input()\n  %2: float32[3] = neg(%1)\n  return %2",
        3,
        7,
        "the type must be float32[2] by the shape rule of neg",
    ),
    (
        "  %1: float32[2] = input()\n  %2: float32[] = reduce_sum(%1) {axis=[0]}",
        3,
        35,
        "'reduce_sum' has no attribute 'axis'",
    ),
    (
        "  %1: float32[2] = input()\n  %2: float32[] = reduce_sum(%1) {axes=[7]}",
        3,
        40,
        "axes does not take [7]",
    ),
    (
        "  %1: float32[2] = input()\n  %2: float32[] = dot(%1, %1) {lhs_contract=[0]}",
        3,
        19,
        "dot with these attributes does not accept float32[2], float32[2]",
    ),
    (
        "  %1: float32[2] = input()\n  %2: float32[2] = transpose(%1) {perm=(0,1,2,3,4,5,6)}",
        3,
        40,
        "transpose.perm takes at most 6 values, got 7",
    ),
    (
        "  %1: float32[2] = input()\n  %2: float32[2,2] = dot(%1, %1) {precision=HUGE}",
        3,
        45,
        "precision takes one of none, DEFAULT",
    ),
]


@pytest.mark.parametrize(("body", "line", "column", "message"), _BROKEN)
def test_errors_give_line_and_column(body, line, column, message):
    text = f"graph {{\n{body}\n}}"
    with pytest.raises(GraphTextError) as error:
        parse_graph(text)
    assert (error.value.line, error.value.column) == (line, column)
    assert message in error.value.message


def test_an_error_shows_the_line_with_a_caret():
    with pytest.raises(GraphTextError) as error:
        parse_graph("graph {\n  %1: float32[2] = foo()  # what is this\n}")
    assert str(error.value) == (
        "line 2, column 20: unknown operator 'foo'\n"
        "  %1: float32[2] = foo()  # what is this\n"
        "                   ^"
    )


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("graph {\n  %1: float32[2] = input()", 2, "the graph is not closed"),
        ("node {\n}", 1, "expected 'graph', found 'node'"),
    ],
)
def test_texts_that_are_not_one_graph_are_refused(text, line, message):
    with pytest.raises(GraphTextError) as error:
        parse_graph(text)
    assert error.value.line == line
    assert message in error.value.message


def _program():
    main = parse_graph("""graph {
  %1: float32[2] = input() ref=@0
  %2: float32[2] = weight() ref=@1
  %3: float32[2] = array() ref=@2
  %4: float32[2] = opaque(%1) {n_args=1} ref=@3
  %5: float32[2] = call(%4, %2) {n_args=2} ref=@4
  %6: float32[2] = add(%5, %3)
  return %6
}""")
    body = parse_graph("""graph {
  %1: float32[2] = input() ref=@0
  %2: float32[2] = input() ref=@1
  %3: float32[2] = mul(%1, %2)
  return %3
}""")
    aval = jax.ShapeDtypeStruct((2,), jnp.float32)
    tree = jax.tree.structure(((0, 0), {}))
    return Program(
        graph=main,
        bodies=(Body(body, (aval, aval), 1, 12.0, "layer"),),
        bindings=(
            Input(0),
            Input(1),
            Array(np.zeros(2, np.float32)),
            Equation(
                jax.lax.sort_p, {"dimension": 0, "is_stable": True, "num_keys": 1}, 1, (aval,)
            ),
            Call("inline", (0,)),
        ),
        in_avals=(aval, aval),
        weights=(False, True),
        in_tree=tree,
        out_tree=jax.tree.structure(0),
        n_outputs=1,
    )


def test_the_text_of_a_program_shows_its_graphs_and_explains_references():
    assert (
        str(_program())
        == """\
graph main {
  %1: float32[2] = input() ref=@0  # argument 0
  %2: float32[2] = weight() ref=@1  # argument 1
  %3: float32[2] = array() ref=@2  # array float32[2]
  %4: float32[2] = opaque(%1) {n_args=1} ref=@3  # equation sort
  %5: float32[2] = call(%4, %2) {n_args=2} ref=@4  # inline of body0
  %6: float32[2] = add(%5, %3)
  return %6
}

# layer, 12 times
graph body0 {
  %1: float32[2] = input() ref=@0  # argument 0
  %2: float32[2] = input() ref=@1  # argument 1
  %3: float32[2] = mul(%1, %2)
  return %3
}"""
    )


def test_a_program_is_parsed_with_the_bindings_of_a_given_program():
    program = _program()
    text = str(program).replace("mul(%1, %2)", "max(%2, %1)")
    edited = parse_program(text, like=program)
    assert str(edited) == text
    assert edited.bindings is program.bindings
    again = replace(edited, graph=program.graph, bodies=program.bodies)
    assert vars(again) == vars(program)


def test_a_program_with_other_graphs_is_refused():
    program = _program()
    main = str(program).split("\n\n")[0]
    with pytest.raises(GraphTextError, match="graph body0 is missing"):
        parse_program(main, like=program)
    with pytest.raises(
        GraphTextError, match="line 10, column 1: expected body0, found graph 'main'"
    ):
        parse_program(f"{main}\n{main}", like=program)
