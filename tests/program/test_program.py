"""Programs as JAX functions: control flow, bodies, rebound equations, effects."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.bindings import Array, Call, Equation, Input
from xrl_jax.graph.graph import GraphError, Node, build, pack_attrs
from xrl_jax.libraries.onednn import calls as onednn
from xrl_jax.lower.table import number_of
from xrl_jax.program.program import Body, Program, evaluate, to_jax

X, XS = jnp.ones(3), jnp.ones((4, 3))


def scan_program(kind: str = "scan") -> Program:
    """Return a program that scans c -> (c + x) * [1, 2, 3] over rows x, with a body written by
    hand.
    """
    closed = jax.make_jaxpr(lambda x, xs: lax.scan(lambda c, a: (c + a, -a), x, xs))(X, XS)
    (equation,) = closed.eqns
    bound = Equation(
        equation.primitive, equation.params, 2, tuple(v.aval for v in equation.outvars)
    )
    row = jax.ShapeDtypeStruct((3,), jnp.float32)
    body = build(
        [
            Node("input", shape=(3,), ref=0),
            Node("input", shape=(3,), ref=1),
            Node("array", shape=(3,), ref=3),
            Node("add", (0, 1), shape=(3,)),
            Node("mul", (3, 2), shape=(3,)),
        ],
        (4, 1),
    )
    main = build(
        [
            Node("input", shape=(3,), ref=0),
            Node("input", shape=(4, 3), ref=1),
            Node("call", (0, 1), pack_attrs("call", {"n_args": 2}), dtype="tuple", ref=2),
            Node("proj", (2,), shape=(3,)),
            Node("proj", (2,), pack_attrs("proj", {"index": 1}), shape=(4, 3)),
        ],
        (3, 4),
    )
    return Program(
        main,
        (Body(body, (row, row), 2, 4.0),),
        (Input(0), Input(1), Call(kind, (0,), bound), Array(np.arange(3, dtype=np.float32) + 1)),
        (row, jax.ShapeDtypeStruct((4, 3), jnp.float32)),
        (False, False),
        jax.tree.structure(((0, 0), {})),
        jax.tree.structure((0, 0)),
        2,
    )


def test_a_rewritten_body_is_used_in_the_loop() -> None:
    run = to_jax(scan_program())
    last, rows = run(X, XS)
    np.testing.assert_array_equal(last, [5, 46, 201])  # c -> (c + 1) * [1, 2, 3], four times
    np.testing.assert_array_equal(rows, XS)
    np.testing.assert_array_equal(jax.jit(run)(X, XS)[0], last)
    gradient = jax.grad(lambda x: run(x, XS)[0].sum())(X)
    np.testing.assert_array_equal(gradient, [1, 2**4, 3**4])


def test_a_program_can_be_jitted_like_a_function() -> None:
    program = scan_program()
    np.testing.assert_array_equal(jax.jit(program)(X, XS)[0], [5, 46, 201])


def test_a_graph_is_evaluated_on_flat_arguments() -> None:
    carry, row = evaluate(scan_program(), 1, [X, 2 * X])
    np.testing.assert_array_equal(carry, [3, 6, 9])
    np.testing.assert_array_equal(row, [2, 2, 2])


def test_parameters_of_control_flow_are_kept() -> None:
    def fn(x, xs):
        return lax.scan(lambda c, a: (c * a, c), x, xs, reverse=True, unroll=2)

    jaxpr = jax.make_jaxpr(to_jax(from_jax(fn, X, XS)))(X, XS)
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    assert (scan.params["reverse"], scan.params["unroll"]) == (True, 2)


def test_numbers_are_arguments_and_weak_types_stay_weak() -> None:
    def fn(x: Any, s: Any) -> Any:
        return x * s, s * 2, s

    x = jnp.ones(3, jnp.bfloat16)
    scaled, twice, same = to_jax(from_jax(fn, x, 1.5))(x, 1.5)
    assert (scaled.dtype, scaled.weak_type) == (jnp.bfloat16, False)
    for number, value in ((twice, 3.0), (same, 1.5)):
        assert number == value and number.weak_type
        assert (number * x).dtype == jnp.bfloat16


def test_arguments_of_another_structure_are_refused() -> None:
    with pytest.raises(TypeError, match="the program was made for arguments of structure"):
        to_jax(scan_program())(X)


def test_a_call_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(GraphError, match="unknown kind 'loop' of a call with an equation"):
        to_jax(scan_program("loop"))(X, XS)


def test_effects_keep_their_order(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(x: Any) -> Any:
        for i in range(8):
            jax.debug.print(f"{i} {{}}", x[0], ordered=True)
        return x * 2

    to_jax(from_jax(fn, X))(X)
    jax.effects_barrier()
    assert capfd.readouterr().out == "".join(f"{i} 1.0\n" for i in range(8))


@pytest.mark.skipif(not onednn.available(), reason="jaxlib has no oneDNN here")
def test_bias_and_residual_are_fused_into_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bias and residual are part of XLA's call of the library. The rectifier, which would lose NaN
    there, is not; and the other product is left to XLA.
    """

    monkeypatch.setattr(onednn, "library", lambda: None)

    def layer(x, w, b):
        return jax.nn.relu(x + (x @ w + b)) @ w

    x, w, b = jnp.array([[1.0, -2.0], [0.0, 3.0]]), jnp.array([[0.0, 1.0], [2.0, 0.0]]), jnp.ones(2)
    program = from_jax(layer, x, w, b)
    nodes = program.graph.nodes
    first = int(np.argmax(np.asarray(nodes.op) == Node("dot").spec.code))
    number = number_of("dot", "onednn")
    lowering = nodes.lowering.at[first].set(number)
    fused = program.with_graphs([program.graph._replace(nodes=nodes._replace(lowering=lowering))])
    text = jax.jit(to_jax(fused)).lower(x, w, b).as_text()
    assert text.count("stablehlo.custom_call @__onednn$matmul") == 1
    assert text.count("maximum") == 1 and "stablehlo.add" not in text
    np.testing.assert_array_equal(to_jax(fused)(x, w, b), layer(x, w, b))
