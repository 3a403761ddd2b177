"""Products with the same weights in every step are computed once for all steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.quick import QUICK
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph.graph import nodes_of
from xrl_jax.program.check import check_program
from xrl_jax.program.program import Program, to_jax
from xrl_jax.transform import batch
from xrl_jax.transform.batch import batched
from xrl_jax.transform.unroll import unrolled

W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
U = np.linspace(1, -1, 16, dtype=np.float32).reshape(4, 4)
XS = np.linspace(-1, 2, 30, dtype=np.float32).reshape(5, 2, 3)
H = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)


def recurrent(w: Any, u: Any, xs: Any, h: Any) -> jax.Array:
    """Multiply what is read and what is carried by weights, in each step."""
    return lax.scan(lambda h, x: (jnp.tanh(x @ w + h @ u), None), h, xs)[0]


def unrolled_program(fn, *args) -> Program:
    return unrolled(from_jax(fn, *args, weights=(0, 1)))


def products(program: Program) -> list[Counter[tuple[int, ...]]]:
    """Return the shapes of the products of each graph."""
    return [Counter(n.shape for n in nodes_of(g)[0] if n.op == "dot") for g in program.graphs]


def test_products_of_step_inputs_become_one_product_before_the_loop() -> None:
    before = unrolled_program(recurrent, W, U, XS, H)
    after = batched(before)
    assert products(before) == [{}, {(2, 4): 2}]
    assert products(after) == [{(10, 4): 1}, {(2, 4): 1}]
    assert [b.count for b in after.bodies] == [5.0]
    check_program(after)
    np.testing.assert_allclose(
        to_jax(after)(W, U, XS, H), recurrent(W, U, XS, H), rtol=1e-5, atol=1e-6
    )


def test_steps_without_a_batch_are_batched() -> None:
    after = batched(unrolled_program(recurrent, W, U, XS[:, 0], H[0]))
    assert products(after) == [{(5, 4): 1}, {(4,): 1}]
    expected = recurrent(W, U, XS[:, 0], H[0])
    np.testing.assert_allclose(to_jax(after)(W, U, XS[:, 0], H[0]), expected, rtol=1e-5, atol=1e-6)


def layers(w, u, xs, h):
    """Multiply by other weights in each step."""
    return lax.scan(lambda y, w: (jnp.tanh(y @ w), None), h, jnp.stack([u, u + 1]))[0]


def one_by_one(w, u, xs, h):
    """Multiply the result of the previous step."""
    return lax.scan(lambda y, _: (jnp.tanh(y @ u), None), h, None, length=3)[0]


def inputs_alone(w, u, xs, h):
    """Multiply by an input of the network instead of a weight."""
    return lax.scan(lambda y, x: (jnp.tanh(y + x @ h), None), h, xs[:, :, :2])[0]


def no_loop(w, u, xs, h):
    return jnp.tanh(h @ u) @ u


@pytest.mark.parametrize("fn", [layers, one_by_one, inputs_alone, no_loop])
def test_other_products_stay(fn) -> None:
    program = unrolled_program(fn, W, U, XS, H)
    assert batched(program) is program


def test_products_of_too_many_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    program = unrolled_program(recurrent, W, U, XS, H)
    monkeypatch.setattr(batch, "MOST_ROWS", 1)
    assert batched(program) is program


def test_step_inputs_may_be_traced_after_an_earlier_step() -> None:
    """In a Python loop, folded, each step slices its own row."""

    def fn(w, u, xs, h):
        for t in range(5):
            a, b = xs[t] @ w, h @ u
            h = jnp.tanh(a + b) * jax.nn.sigmoid(a - b) + jnp.sin(a * b) * jnp.cos(a) - b
        return h

    program = from_jax(fn, W, U, XS, H, weights=(0, 1))
    assert products(program) == [{}, {(2, 4): 2}]
    after = batched(program)
    assert products(after) == [{(10, 4): 1}, {(2, 4): 1}]
    np.testing.assert_allclose(to_jax(after)(W, U, XS, H), fn(W, U, XS, H), rtol=1e-5, atol=1e-6)


@settings(max_examples=25)
@given(st.integers(2, 9), st.integers(1, 3), st.booleans(), st.integers(0, 3))
def test_batching_preserves_the_function_of_any_recurrent_network(
    steps, rows, reverse, seed
) -> None:
    """Each step reads two arrays, kernels are computed from weights, one product is used twice."""
    rng = np.random.default_rng(seed)
    shapes = (2, 3, 4), (4, 4), (steps, rows, 3), (steps, rows, 3), (rows, 4)
    # Halved, because a recurrence with large weights amplifies differences of rounding.
    w, u, xs, ys, h = (0.5 * rng.standard_normal(shape, np.float32) for shape in shapes)

    def fn(w, u, xs, ys, h):
        def step(h, read):
            x, y = read
            a, b = x @ w[0] - y @ w[1], x @ (2.0 * w[1])
            h = jnp.tanh(a + h @ u) * b + a
            return h, b + h

        return lax.scan(step, h, (xs, ys), reverse=reverse)

    program = batched(unrolled(from_jax(fn, w, u, xs, ys, h, weights=(0, 1))))
    check_program(program)
    assert products(program)[0] == {(rows * steps, 4): 3}
    got, expected = (
        jax.jit(f, compiler_options=QUICK)(w, u, xs, ys, h) for f in (to_jax(program), fn)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_batching_twice_changes_nothing() -> None:
    once = batched(unrolled_program(recurrent, W, U, XS, H))
    assert str(batched(once)) == str(once)
