"""`from_jax` on small functions: the nodes, bodies and bindings of the resulting program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xrl_jax.frontends.jaxpr import TraceError, from_jax
from xrl_jax.graph import ops
from xrl_jax.graph.bindings import Array, Call, Equation, Input
from xrl_jax.graph.graph import Node, TensorGraph, nodes_of
from xrl_jax.graph.operands import flat_operands
from xrl_jax.program.arguments import flatten_args
from xrl_jax.program.program import Program, evaluate

X = np.arange(6, dtype=np.float32).reshape(2, 3)
W = np.ones((3, 3), np.float32)


def main(program: Program) -> list[Node]:
    return nodes_of(program.graph)[0]


def names(program: Program) -> list[str]:
    return [n.op for n in main(program)]


def only(nodes: list[Node], op: str) -> Node:
    (node,) = (n for n in nodes if n.op == op)
    return node


def call_of(program: Program, node: Node) -> Call:
    call = program.bindings[node.ref]
    assert isinstance(call, Call)
    return call


def count(graph: TensorGraph, op: str) -> int:
    return sum(n.op == op for n in nodes_of(graph)[0])


def sources_of(program: Program, graph: TensorGraph) -> set[tuple[str, int]]:
    """Return (op, position) of every input of a graph."""
    return {
        (n.op, program.bindings[n.ref].position)  # type: ignore[union-attr]
        for n in nodes_of(graph)[0]
        if n.op in ("input", "weight")
    }


def run(program: Program, *args: Any) -> list[Any]:
    return evaluate(program, 0, args)


# --- sources


def test_inputs_and_weights_refer_to_flat_arguments() -> None:
    program = from_jax(lambda x, p: x @ p["w"] + p["b"], X, {"b": W[0], "w": W}, weights=(1,))
    assert sources_of(program, program.graph) == {("input", 0), ("weight", 1), ("weight", 2)}
    assert [a.shape for a in program.in_avals] == [(2, 3), (3,), (3, 3)]
    assert program.weights == (False, True, True)


def test_weight_positions_may_count_from_the_end() -> None:
    assert from_jax(jnp.add, X, X, weights=-1).weights == (False, True)


@pytest.mark.parametrize("position", [2, -3])
def test_a_weight_position_out_of_range_is_refused(position: int) -> None:
    with pytest.raises(ValueError, match=f"no positional argument {position}.*called with 2"):
        from_jax(jnp.add, X, X, weights=(position,))


@pytest.mark.parametrize("weights", [None, "params", True, (0, 1.0)])
def test_weights_that_are_no_positions_are_refused(weights: Any) -> None:
    with pytest.raises(ValueError, match="^weights=.*: give positions of arguments: 0 or"):
        from_jax(lambda w, x: w * x, 1.0, 2.0, weights=weights)


def test_keyword_arguments_come_after_positional_ones() -> None:
    program = from_jax(
        lambda x, *, scale: x * scale, X, scale=jax.ShapeDtypeStruct((3,), "float32")
    )
    assert [a.shape for a in program.in_avals] == [(2, 3), (3,)]
    assert program.weights == (False, False)


def test_python_numbers_are_weakly_typed_inputs() -> None:
    (aval,) = from_jax(lambda n: n + 1, 3).in_avals
    assert (aval.shape, aval.dtype, aval.weak_type) == ((), jnp.int32, True)


def test_other_leaves_are_static() -> None:
    def scaled(x: jax.Array, options: dict[str, Any], act: Callable[..., jax.Array]) -> jax.Array:
        return act(x) if options["mode"] == "act" else x * options["scale"]

    program = from_jax(scaled, X, {"mode": "act", "scale": 2.0, "dtype": np.float32}, jnp.tanh)
    assert names(program) == ["input", "tanh"]
    assert len(program.in_avals) == 2
    leaves, tree = flatten_args(
        (X, {"mode": "act", "scale": 5.0, "dtype": np.float32}, jnp.tanh), {}
    )
    assert tree == program.in_tree and len(leaves) == 2
    other = flatten_args((X, {"mode": "no", "scale": 5.0, "dtype": np.float32}, jnp.tanh), {})[1]
    assert other != program.in_tree


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        (np.float32(1.5), 1.5),
        (np.float32(-0.0), -0.0),
        (np.float32(-np.inf), -np.inf),
        (np.int32(2**24), 2.0**24),
        (np.int32(-(2**31)), -(2.0**31)),
        (np.bool_(True), 1.0),
        (jnp.bfloat16(0.5), 0.5),
    ],
)
def test_scalars_that_are_exact_in_float32_are_values(literal: Any, value: float) -> None:
    node = only(main(from_jax(lambda: literal)), "const")
    assert (node.value, np.signbit(node.value), node.ref) == (value, np.signbit(value), -1)
    assert node.dtype == literal.dtype.name


@pytest.mark.parametrize(
    "literal",
    [
        np.int32(2**24 + 1),
        np.int32(2**31 - 1),
        np.float32(np.nan),
        np.complex64(1j),
        np.float32(1e-40),
    ],
)
def test_other_scalars_are_bindings(literal: Any) -> None:
    program = from_jax(lambda: literal)
    binding = program.bindings[only(main(program), "const").ref]
    assert isinstance(binding, Array)
    assert np.asarray(binding.value).tobytes() == literal.tobytes()


def test_equal_sources_are_one_node() -> None:
    program = from_jax(
        lambda x: (x + 2.0) * 2.0 + x + lax.iota("float32", 3) * lax.iota("float32", 3), X
    )
    assert (
        names(program).count("const")
        == names(program).count("iota")
        == names(program).count("input")
        == 1
    )


def test_zero_and_minus_zero_are_two_nodes() -> None:
    program = from_jax(lambda x: (x + 0.0) * np.float32(-0.0), X)
    assert [str(n.value) for n in main(program) if n.op == "const"] == ["0.0", "-0.0"]


def test_closed_over_arrays_are_array_nodes_and_weights() -> None:
    program = from_jax(lambda x: x @ W, X)
    node = only(main(program), "array")
    binding = program.bindings[node.ref]
    assert isinstance(binding, Array) and np.array_equal(binding.value, W)
    slot = nodes_of(program.graph)[2][main(program).index(node)]
    assert bool(program.graph.nodes.weight_only[slot])


def test_outputs_may_be_inputs_constants_and_equal() -> None:
    program = from_jax(lambda x, y: (y, 1.0, jnp.sin(x), jnp.sin(y) * 0 + y, y), X, X)
    nodes, outputs, _ = nodes_of(program.graph)
    assert [nodes[o].op for o in outputs] == ["input", "const", "sin", "add", "input"]
    assert outputs[0] == outputs[4]
    assert program.n_outputs == 5


def test_dead_code_is_dropped() -> None:
    program = from_jax(lambda x, y: (jnp.cos(y), jnp.linalg.inv(W), x + 1)[2], X, X)
    assert sorted(names(program)) == ["add", "const", "input"]
    assert len(program.bindings) == 1


# --- native nodes


def test_attributes_of_a_convolution() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            w,
            (2, 1),
            ((1, 0), (2, 3)),
            rhs_dilation=(1, 2),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=2,
            precision="highest",
        )

    node = only(
        main(from_jax(fn, np.zeros((1, 8, 8, 4), "f"), np.zeros((3, 3, 2, 6), "f"))), "conv"
    )
    expected = dict(
        stride=(2, 1),
        low=(1, 2),
        high=(0, 3),
        lhs_dilation=(1, 1),
        rhs_dilation=(1, 2),
        groups=2,
        batch_groups=1,
    )
    assert {name: node.attr(name) for name in expected} == expected
    layouts = [ops.LAYOUTS[node.attr(f)] for f in ("lhs_layout", "rhs_layout", "out_layout")]  # type: ignore[index]
    assert layouts == [(0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)]
    assert ops.decode_precision(node.attr("precision")) == (lax.Precision.HIGHEST,) * 2  # type: ignore[arg-type]


def test_attributes_of_a_dot() -> None:
    program = from_jax(
        lambda x, y: jnp.einsum("bqhd,bkhd->bhqk", x, y), *[np.zeros((2, 3, 4, 5), "f")] * 2
    )
    node = only(main(program), "dot")
    dims = [node.attr(f) for f in ("lhs_contract", "rhs_contract", "lhs_batch", "rhs_batch")]
    assert dims == [ops.pack_dims(d) for d in ((3,), (3,), (0, 2), (0, 2))]
    assert (node.shape, node.attr("precision")) == ((2, 4, 3, 3), 0)


def test_implicit_broadcasts_become_nodes() -> None:
    program = from_jax(lambda x: x - x.max(1, keepdims=True), X)
    node = only(main(program), "sub")
    stretched = main(program)[node.args[1]]
    assert (stretched.op, stretched.shape) == ("broadcast", (2, 3))
    assert stretched.attr("dims") == (0, 1, -1, -1, -1, -1)


def test_a_long_concatenation_is_a_chain() -> None:
    program = from_jax(lambda *xs: jnp.concatenate(xs), *[X] * 12)
    shapes = [(len(n.args), n.shape) for n in main(program) if n.op == "concat"]
    assert shapes == [(6, (12, 3)), (6, (22, 3)), (2, (24, 3))]


def test_stop_gradient_copy_and_a_cast_to_the_same_dtype_leave_no_node() -> None:
    program = from_jax(lambda x: lax.stop_gradient(jnp.copy(x)).astype("float32") + 1.0, X)
    assert names(program) == ["input", "const", "add"]


def test_nested_calls_and_custom_derivatives_are_inlined() -> None:
    program = from_jax(lambda x: jax.jit(jax.nn.relu)(jax.checkpoint(jnp.sin)(x)), X)
    assert sorted(names(program)) == ["const", "input", "max", "sin"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.abs(x + 1j),
        lambda x: x.astype(jnp.float8_e4m3fn).astype("float32"),
        lambda x: jnp.sin(x.reshape(1, 1, 1, 1, 2, 1, 3)).sum((0, 4)),
        lambda x: lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST),
        lambda x: lax.reduce_window(
            x, 0.0, lax.add, (1, 2), (1, 1), "SAME", window_dilation=(1, 2)
        ),
    ],
    ids=["complex_abs", "float8", "rank_7", "accuracy", "window_dilation"],
)
def test_equations_outside_the_operator_table_are_opaque(fn: Callable[..., Any]) -> None:
    program = from_jax(fn, X)
    assert "opaque" in names(program)
    assert np.array_equal(run(program, X)[0], jax.jit(fn)(X))


def test_an_equation_with_several_results_has_projections() -> None:
    program = from_jax(lambda x: lax.top_k(x, 2)[1], X)
    opaque = only(main(program), "opaque")
    projection = only(main(program), "proj")
    assert (opaque.dtype, projection.attr("index"), projection.dtype) == ("tuple", 1, "int32")
    equation = program.bindings[opaque.ref]
    assert isinstance(equation, Equation)
    assert (equation.name, equation.n_outputs) == ("top_k", 2)


@pytest.mark.parametrize("n", [1, 6, 7, 11, 12, 30])
def test_any_number_of_operands_is_supported(n: int) -> None:
    program = from_jax(lambda *xs: lax.optimization_barrier(xs), *[X + i for i in range(n)])
    nodes = main(program)
    operands = flat_operands(nodes, only(nodes, "opaque"))
    bindings = [program.bindings[nodes[o].ref] for o in operands]
    assert bindings == [Input(i) for i in range(n)]
    assert all(len(node.args) <= ops.MAX_ARGS for node in nodes)


# --- effects


@pytest.mark.parametrize("n", [1, 6, 7])
def test_equations_with_effects_are_pinned_and_chained(n: int) -> None:
    seen: list[float] = []

    def fn(*xs: jax.Array) -> jax.Array:
        jax.debug.callback(lambda *v: seen.append(float(v[0])), *xs, ordered=True)
        jax.debug.callback(lambda *v: seen.append(-float(v[0])), *xs, ordered=True)
        return xs[0] + 1

    program = from_jax(fn, *[1.0] * n)
    nodes = main(program)
    first, second = (i for i, node in enumerate(nodes) if node.op == "opaque")
    assert nodes[first].attr("pinned") == nodes[second].attr("pinned") == 1
    assert nodes[second].args[-1] == first
    assert nodes[first].attr("n_args") == nodes[second].attr("n_args") == n
    assert first not in flat_operands(nodes, nodes[second])
    jax.jit(lambda *xs: run(program, *xs))(*[3.0] * n)
    jax.effects_barrier()
    assert seen == [3.0, -3.0]


def test_a_function_of_effects_alone_keeps_them() -> None:
    program = from_jax(lambda x: jax.debug.print("{}", x), X)
    assert names(program) == ["input", "opaque"]
    assert program.n_outputs == 0


def test_a_loop_with_effects_is_pinned() -> None:
    def step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        jax.debug.print("{}", c)
        return c + 1, None

    program = from_jax(lambda x: (lax.scan(step, x, length=2), x)[1], X)
    assert only(main(program), "call").attr("pinned") == 1
    assert only(nodes_of(program.bodies[0].graph)[0], "opaque").attr("pinned") == 1


def test_loops_over_mutable_arrays_stay_opaque() -> None:
    def fn(x: jax.Array) -> jax.Array:
        total = jax.new_ref(jnp.zeros(3))

        def step(_: int, carry: None) -> None:
            total[...] += x[0]

        lax.fori_loop(0, 4, step, None)
        return total[...]

    program = from_jax(fn, X)
    assert "call" not in names(program)
    np.testing.assert_array_equal(jax.jit(lambda x: run(program, x))(X)[0], X[0] * 4)


# --- bodies


def test_scan_is_a_call_of_a_body_that_runs_length_times() -> None:
    def scan(w: jax.Array, h: jax.Array, xs: jax.Array) -> Any:
        return lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h * 2), h, xs)

    # Constants and scanned rows of weights are weights; a carry is not, even if it starts as one.
    program = from_jax(scan, W, X[0], np.zeros((5, 3), "f"), weights=(0, 1, 2))
    call = call_of(program, only(main(program), "call"))
    assert (call.kind, call.bodies) == ("scan", (0,))
    (body,) = program.bodies
    assert (body.count, body.n_outputs) == (5.0, 2)
    assert sources_of(program, body.graph) == {("weight", 0), ("input", 1), ("weight", 2)}


def test_while_runs_an_estimated_number_of_times() -> None:
    def fn(x: jax.Array, n: float) -> jax.Array:
        return lax.while_loop(lambda c: c.sum() < n, lambda c: c * 2 + n, x)

    program = from_jax(fn, X, 9.0, weights=(1,))
    assert call_of(program, only(main(program), "call")).bodies == (0, 1)
    assert [b.count for b in program.bodies] == [8.0, 8.0]
    assert [count(b.graph, "weight") for b in program.bodies] == [1, 1]


def test_execution_counts_are_split_over_branches_and_multiply_in_loops() -> None:
    def step(c: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return lax.switch(x, [jnp.sin, jnp.cos, jnp.tan], c), None

    program = from_jax(lambda c, xs: lax.scan(step, c, xs)[0], X, np.zeros(6, np.int32))
    assert [b.count for b in program.bodies] == [2.0, 2.0, 2.0, 6.0]
    scan = call_of(program, only(main(program), "call"))
    assert scan.bodies == (3,)  # callees stand before callers


@jax.jit
def long_layer(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return x


@jax.jit
def short_layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def test_a_long_jit_called_twice_is_a_body() -> None:
    program = from_jax(lambda x, w: long_layer(long_layer(x, w) + 1.0, w), X, W, weights=(1,))
    assert names(program).count("call") == 2
    (body,) = program.bodies
    assert (body.name, body.count) == ("long_layer", 2.0)
    assert (count(body.graph, "weight"), count(body.graph, "input")) == (1, 1)


def test_an_argument_that_is_a_weight_in_one_call_only_is_an_input() -> None:
    program = from_jax(lambda x, w: long_layer(x, w) + long_layer(x, w + x[:1]), X, W, weights=(1,))
    (body,) = program.bodies
    assert count(body.graph, "weight") == 0


def test_short_jits_and_jits_called_once_are_inlined() -> None:
    twice = from_jax(lambda x, w: short_layer(short_layer(x, w) + 1.0, w), X, W)
    once = from_jax(lambda x, w: long_layer(x, w), X, W, fold=False)
    assert not twice.bodies and not once.bodies


def test_without_folding_jits_are_inlined() -> None:
    program = from_jax(lambda x, w: long_layer(long_layer(x, w), w), X, W, fold=False)
    assert not program.bodies
    assert names(program).count("dot") == 16


# --- errors and size


def test_a_branch_on_traced_values_is_refused_with_advice() -> None:
    def branches(x: jax.Array) -> jax.Array:
        return x if x.sum() > 0 else -x

    with pytest.raises(
        TraceError, match=r"cannot trace 'branches'(.|\n)*TracerBool(.|\n)*Close over"
    ):
        from_jax(branches, X)


def test_an_error_of_the_function_itself_is_quoted() -> None:
    def broken(x: jax.Array) -> jax.Array:
        return x @ x

    with pytest.raises(TraceError, match=r"'broken'(.|\n)*dot_general(.|\n)*jax.jit"):
        from_jax(broken, X)


def test_a_result_that_is_no_array_is_refused() -> None:
    with pytest.raises(TraceError, match="cannot trace"):
        from_jax(lambda x: "text", X)


def test_five_thousand_equations() -> None:
    def deep(x: jax.Array) -> jax.Array:
        for i in range(2500):
            x = lax.add(lax.sin(x), np.float32(i))
        return x

    program = from_jax(deep, X)
    assert names(program).count("sin") == 2500
