"""Attention becomes one kernel in any spelling, and computes what its equations compute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from tests.libraries.triton.spellings import SPELLINGS, Spelling, heads_first, marked
from xrl_jax.libraries.triton.partition import interpreted, partitioned


def names_of(closed: Any) -> list[str]:
    return [e.primitive.name for e in closed.jaxpr.eqns]


def interpreted_kernels(closed: Any) -> Any:
    with interpreted():
        return partitioned(closed)


def inputs_of(spelling: Spelling, dtype: str = "float32") -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(spelling.shapes))
    each = zip(keys, spelling.shapes, strict=True)
    return [jax.random.normal(k, s).astype(dtype) for k, s in each]


def in_kernels(fn: Any, *args: jax.Array) -> np.ndarray:
    """Return the result of a function whose attention runs as an interpreted kernel."""
    closed = interpreted_kernels(marked(fn, *args))
    assert names_of(closed).count("pallas_call") == 1
    (result,) = jaxpr_as_fun(closed)(*args)
    return np.asarray(result)


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_one_kernel(name: str) -> None:
    fn, args = SPELLINGS[name].fn, inputs_of(SPELLINGS[name])
    with jax.enable_x64(True):
        exact = np.asarray(fn(*(a.astype("float64") for a in args)))
    error = np.abs(in_kernels(fn, *args) - exact).max()
    assert error <= 4 * max(np.abs(fn(*args) - exact).max(), 1e-7)


@pytest.mark.parametrize(
    ("name", "dtype"), [("packed", "float16"), ("packed", "bfloat16"), ("of jax", "bfloat16")]
)
def test_narrow_types_are_summed_in_float32(name: str, dtype: str) -> None:
    fn, args = SPELLINGS[name].fn, inputs_of(SPELLINGS[name], dtype)
    exact = np.asarray(fn(*(a.astype("float32") for a in args)))
    error = np.abs(in_kernels(fn, *args).astype("float32") - exact).max()
    assert error <= 1.5 * np.abs(fn(*args).astype("float32") - exact).max()


@pytest.mark.parametrize("columns", [9, 600])
def test_special_values_go_where_they_went(columns: int) -> None:
    nan, inf = np.nan, np.inf
    q, k, v, mask = inputs_of(
        Spelling(
            heads_first, ((1, 2, 6, 64), (1, 2, columns, 64), (1, 2, columns, 64), (6, columns))
        )
    )
    q = q.at[0, 0, 0, 3].set(nan).at[0, 0, 1, 3].set(inf)
    k = k.at[0, 1, 5, 2].set(inf)
    v = v.at[0, 0, 7, 1].set(-inf)
    # A row that is masked as a whole, and one in which only the first columns are.
    mask = mask.at[2].set(-inf).at[3, :7].set(-inf)
    np.testing.assert_allclose(
        in_kernels(heads_first, q, k, v, mask), heads_first(q, k, v, mask), rtol=2e-5, atol=2e-6
    )


def test_biases_and_slices_are_read_by_the_kernel() -> None:
    fn, args = SPELLINGS["packed"].fn, inputs_of(SPELLINGS["packed"])
    closed = interpreted_kernels(marked(fn, *args))
    (call,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "pallas_call")
    assert [v.aval.size for v in call.invars] == [24 * 192, 192]


def test_the_kernel_writes_the_result_in_its_last_order() -> None:
    fn, args = SPELLINGS["packed"].fn, inputs_of(SPELLINGS["packed"])
    assert names_of(interpreted_kernels(marked(fn, *args)))[-2:] == [
        "pallas_call",
        "reshape",
    ]


def test_a_layer_reads_what_the_kernel_before_it_wrote() -> None:
    fn, args = SPELLINGS["of jax"].fn, inputs_of(SPELLINGS["of jax"])[:1]

    def two_layers(x: jax.Array) -> jax.Array:
        once = fn(x, x, x)
        return fn(once, once, once)

    closed = interpreted_kernels(marked(two_layers, *args))
    assert names_of(closed).count("pallas_call") == 2
    (result,) = jaxpr_as_fun(closed)(*args)
    np.testing.assert_allclose(result, two_layers(*args), rtol=1e-5, atol=1e-6)


def test_a_repeated_number_is_no_input() -> None:
    fn, args = SPELLINGS["windowed"].fn, inputs_of(SPELLINGS["windowed"])
    closed = interpreted_kernels(marked(fn, *args))
    (call,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "pallas_call")
    assert [v.aval.size for v in call.invars] == [2 * 40 * 16] * 3 + [40 * 40]


def test_operands_may_be_cast_as_they_are_read() -> None:
    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (x.astype("bfloat16") for x in (q, k, v))
        return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v

    args = inputs_of(Spelling(fn, ((2, 20, 16),) * 3))
    closed = interpreted_kernels(marked(fn, *args))
    (call,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "pallas_call")
    assert {str(v.aval.dtype) for v in call.invars} == {"float32"}
    np.testing.assert_allclose(in_kernels(fn, *args), fn(*args), rtol=0.05, atol=0.01)


def test_operands_that_are_one_number_stay_outside() -> None:
    def fn(k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.full((2, 4, 8), 0.5) @ k.swapaxes(-1, -2)) @ v

    closed = marked(fn, *[jnp.ones((2, 4, 8))] * 2)
    assert interpreted_kernels(closed) is closed


def test_weights_that_are_returned_stay_outside() -> None:
    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2))
        return weights @ v, weights

    closed = marked(fn, *[jnp.ones((2, 4, 8))] * 3)
    assert partitioned(closed) is closed


def test_operators_across_rows_stay_outside() -> None:
    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.softmax(q @ k.swapaxes(-1, -2), axis=-2) @ v

    closed = marked(fn, *[jnp.ones((2, 4, 8))] * 3)
    assert partitioned(closed) is closed


def test_a_sum_over_the_rows_of_scores_is_not_attention() -> None:
    def fn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.einsum("bij,bid->bjd", jax.nn.softmax(q @ k.swapaxes(-1, -2)), v)

    closed = marked(fn, *[jnp.ones((2, 4, 8))] * 3)
    assert partitioned(closed) is closed


def test_another_platform_computes_the_equations() -> None:
    fn, args = SPELLINGS["packed"].fn, inputs_of(SPELLINGS["packed"])
    (result,) = jax.jit(jaxpr_as_fun(partitioned(marked(fn, *args))))(*args)
    np.testing.assert_allclose(result, fn(*args), rtol=1e-5, atol=1e-6)
