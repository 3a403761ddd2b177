"""Networks in bfloat16 and float16 are computed in float32, with conversions at their borders."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph import ops
from xrl_jax.graph.graph import TensorGraph, nodes_of
from xrl_jax.transform.widen import widened

W = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)
X = np.linspace(-2.0, 2.0, 6, dtype=np.float32).reshape(2, 3)


def listed(graph: TensorGraph) -> list[tuple[str, str]]:
    """Return the operators of a graph and their types, in order."""
    nodes = sorted(zip(*nodes_of(graph)[::2], strict=True), key=lambda n: n[1])
    return [(n.op, n.dtype) for n, _ in nodes]


@pytest.mark.parametrize("dtype", ops.NARROW_DTYPES)
def test_arithmetic_is_in_float32_between_casts(dtype: str) -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) * 2

    program = widened(from_jax(fn, W.astype(dtype), X.astype(dtype), weights=0))
    assert listed(program.graph) == [
        ("weight", dtype),
        ("input", dtype),
        ("cast", "float32"),
        ("dot", "float32"),
        ("tanh", "float32"),
        ("const", "float32"),
        ("mul", "float32"),
        ("cast", dtype),
    ]


def test_a_program_in_float32_is_returned_itself() -> None:
    program = from_jax(jnp.tanh, X)
    assert widened(program) is program


def test_intermediate_results_are_not_rounded() -> None:
    """In bfloat16, which has no 257, the result is 0."""
    x = jnp.asarray([1.0], jnp.bfloat16)
    assert float(widened(from_jax(lambda x: (x + 256) - 256, x))(x)[0]) == 1.0


def test_conversions_by_the_user_are_not_repeated() -> None:
    """Layer norms in bfloat16 networks compute in float32: only the borders convert."""

    def fn(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide - wide.mean()).astype(jnp.bfloat16) + x

    program = widened(from_jax(fn, X.astype(jnp.bfloat16)))
    assert [op for op, _ in listed(program.graph)].count("cast") == 2


def test_what_overflowed_in_float16_does_not() -> None:
    x = np.asarray([300.0], np.float16)
    program = widened(from_jax(lambda x: x * x / x, x))
    assert program(x) == np.asarray([300.0], np.float16)


def test_special_values_stay() -> None:
    x = np.asarray([np.nan, np.inf, -np.inf, -0.0], jnp.bfloat16)
    got = widened(from_jax(lambda x: (x + 1) * 2, x))(x)
    np.testing.assert_array_equal(np.float32(got), [np.nan, np.inf, -np.inf, 2.0])


def test_the_next_number_is_that_of_the_type() -> None:
    x = jnp.asarray([1.0], jnp.bfloat16)
    program = widened(from_jax(lambda x: jnp.nextafter(x, x + 1), x))
    assert float(program(x)[0]) == 1.0078125


def test_products_give_float32_from_narrow_operands() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.dot(x, w, preferred_element_type=jnp.float32)

    w, x = W.astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    program = widened(from_jax(fn, w, x))
    assert program(w, x).dtype == jnp.float32
    assert ("dot", "float32") in listed(program.graph)


def test_an_algorithm_for_narrow_operands_is_not_asked_of_wide_ones() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.dot(x, w, precision=lax.DotAlgorithmPreset.BF16_BF16_F32)

    w, x = W.astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    program = widened(from_jax(fn, w, x))
    (dot,) = [n for n in nodes_of(program.graph)[0] if n.op == "dot"]
    assert dot.attr("precision") == 0


@jax.jit
def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    """Apply a layer that is one body of a traced network."""
    for _ in range(4):  # enough operators to be worth a body
        x = x + jnp.tanh(x @ w) * 2
    return x


def test_activations_cross_the_border_of_a_body_in_float32_and_weights_as_stored() -> None:
    w, x = jnp.eye(3, dtype=jnp.bfloat16), jnp.asarray(X, jnp.bfloat16)

    def network(ws: Any, x: jax.Array) -> jax.Array:
        return layer(ws[1], layer(ws[0], x))

    program = widened(from_jax(network, (w, 2 * w), x, weights=0))
    assert [t for op, t in listed(program.graph) if op in ("weight", "call")] == [
        "bfloat16", "bfloat16", "float32", "float32",
    ]  # fmt: skip
    (body,) = program.bodies
    assert {op: t for op, t in listed(body.graph) if op in ("weight", "input")} == {
        "weight": "bfloat16",
        "input": "float32",
    }
    np.testing.assert_allclose(
        np.float32(program((w, 2 * w), x)), np.float32(network((w, 2 * w), x)), rtol=0.02
    )


def test_loops_carry_their_own_types() -> None:
    x = X.astype(jnp.bfloat16)

    def fn(x: jax.Array) -> Any:
        return lax.while_loop(lambda s: s[0, 0] < 10, lambda s: s * s + 1, x)

    program = widened(from_jax(fn, x))
    assert ("call", "bfloat16") in listed(program.graph)
    assert ("mul", "float32") in [o for b in program.bodies for o in listed(b.graph)]
    assert program(x).dtype == jnp.bfloat16


def test_equations_outside_the_table_take_their_own_types() -> None:
    x = X.astype(jnp.float16)
    program = widened(from_jax(lambda x: jnp.sort(x + 1) * 2, x))
    assert ("opaque", "float16") in listed(program.graph)
    np.testing.assert_array_equal(program(x), jnp.sort(x + 1) * 2)


def test_what_is_only_moved_is_moved_as_it_is_stored() -> None:
    x = X.astype(jnp.bfloat16)
    program = widened(from_jax(lambda x: jnp.tanh(x.T.reshape(6)[1:]), x))
    assert listed(program.graph) == [
        ("input", "bfloat16"),
        ("transpose", "bfloat16"),
        ("reshape", "bfloat16"),
        ("slice", "bfloat16"),
        ("cast", "float32"),
        ("tanh", "float32"),
        ("cast", "bfloat16"),
    ]


@pytest.mark.parametrize(("rows", "read"), [(16, "bfloat16"), (17, "float32")])
def test_products_of_few_rows_read_weights_as_they_are_stored(rows: int, read: str) -> None:
    w, x = W.astype(jnp.bfloat16), np.ones((rows, 3), jnp.bfloat16)
    program = widened(from_jax(lambda w, x: x @ w, w, x, weights=0))
    nodes = nodes_of(program.graph)[0]
    (dot,) = [n for n in nodes if n.op == "dot"]
    assert [nodes[a].dtype for a in dot.args] == ["float32", read]
    np.testing.assert_array_equal(program(w, x), jnp.asarray(x) @ w)


def test_operands_that_are_no_weights_are_widened() -> None:
    w, x = W.astype(jnp.bfloat16), X.astype(jnp.bfloat16)
    nodes = nodes_of(widened(from_jax(lambda w, x: x @ w, w, x)).graph)[0]
    (dot,) = [n for n in nodes if n.op == "dot"]
    assert [nodes[a].dtype for a in dot.args] == ["float32", "float32"]


def test_a_value_that_is_rounded_elsewhere_is_moved_unrounded() -> None:
    """Sorting takes bfloat16, which has no 257; the transpose must not read what sorting reads."""
    x = jnp.asarray([[1.0, 0.0]], jnp.bfloat16)

    def fn(x: jax.Array) -> Any:
        y = x + 256
        return jnp.sort(y), y.T - 256

    np.testing.assert_array_equal(widened(from_jax(fn, x))(x)[1], [[1.0], [0.0]])
