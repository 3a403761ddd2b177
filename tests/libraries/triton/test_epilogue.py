"""A product with what follows it becomes one kernel, and computes what its equations compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from tests.libraries.triton.spellings import marked
from xrl_jax.libraries.triton.error_function import erf, erfc
from xrl_jax.libraries.triton.partition import interpreted, partitioned

X, W, B = (2, 50, 40), (40, 72), (72,)


class Layer(NamedTuple):
    """A layer, the shapes of its arguments, and the equations that its kernel leaves over."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    left: tuple[str, ...] = ()


def gelu(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ w + b, approximate=False)


LAYERS = {
    "product": Layer(lambda x, w: x @ w, (X, W)),
    "gelu": Layer(gelu, (X, W, B)),
    "gelu by tanh": Layer(lambda x, w, b: jax.nn.gelu(x @ w + b), (X, W, B)),
    "gelu by erf": Layer(
        lambda x, w, b: (y := x @ w + b) * 0.5 * (1 + jax.lax.erf(y / 2**0.5)), (X, W, B)
    ),
    "swish": Layer(lambda x, w: jax.nn.swish(x @ w), (X, W)),
    "relu and residual": Layer(
        lambda x, w, b, r: r + jnp.maximum(x @ w + b, 0), (X, W, B, (2, 50, 72))
    ),
    "one row": Layer(gelu, ((1, 40), W, B)),
    "mask of rows": Layer(lambda x, w, m: jnp.where(m, x @ w, 0), (X, W, (2, 50, 1)), ("ne",)),
    "weight stored by output": Layer(lambda x, w: jnp.einsum("btd,nd->btn", x, w), (X, (72, 40))),
    "written transposed": Layer(lambda x, w: (x @ w).swapaxes(1, 2), (X, W)),
    "heads": Layer(lambda x, w: (x @ w).reshape(2, 50, 6, 12).transpose(0, 2, 1, 3), (X, W)),
    "scaled operand": Layer(lambda x, s, w: (x * s) @ w, (X, (40,), W)),
    "norm follows": Layer(
        lambda x, w, r: jax.nn.standardize(x @ w + r), (X, W, (2, 50, 72)), ("reduce_sum",)
    ),
    "two results": Layer(lambda x, w: [y := x @ w, jnp.tanh(y)], (X, W), ("tanh",)),
}


def inputs_of(layer: Layer, dtype: str = "float32") -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(layer.shapes))
    each = zip(keys, layer.shapes, strict=True)
    return [jax.random.normal(k, s).astype(dtype) for k, s in each]


def in_kernels(fn: Any, *args: jax.Array) -> Any:
    """Return the closed jaxpr with interpreted kernels."""
    with interpreted():
        return partitioned(marked(fn, *args))


def names_of(closed: Any) -> list[str]:
    """Return the equations that the results need: a kernel may compute others again as it reads."""
    needed, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return [e.primitive.name for e in needed.eqns]


MOVES = {"pallas_call", "reshape", "broadcast_in_dim", "squeeze", "jit"}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_one_kernel(name: str) -> None:
    layer = LAYERS[name]
    args = inputs_of(layer)
    closed = in_kernels(layer.fn, *args)
    assert names_of(closed).count("pallas_call") == 1
    others = set(names_of(closed)) - MOVES
    assert set(layer.left) <= others and (layer.left or not others)
    with jax.enable_x64(True):
        exact = jax.tree.leaves(layer.fn(*(a.astype("float64") for a in args)))
    for got, want in zip(jaxpr_as_fun(closed)(*args), exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_types_are_summed_in_float32(dtype: str) -> None:
    args = inputs_of(LAYERS["gelu"], dtype)
    exact = gelu(*(a.astype("float32") for a in args))
    (got,) = jaxpr_as_fun(in_kernels(gelu, *args))(*args)
    assert got.dtype == dtype
    error = np.abs(got.astype("float32") - exact).max()
    assert error <= 1.5 * np.abs(gelu(*args).astype("float32") - exact).max()


def test_special_values_go_where_they_went() -> None:
    x, w, b = inputs_of(LAYERS["gelu"])
    x = x.at[0, 0, 3].set(np.nan).at[1, 2, 3].set(np.inf).at[1, 4].set(1e30)
    b = b.at[5].set(-np.inf).at[6].set(np.nan)
    (got,) = jaxpr_as_fun(in_kernels(gelu, x, w, b))(x, w, b)
    np.testing.assert_allclose(got, gelu(x, w, b), rtol=2e-5, atol=2e-5)


def test_a_batch_of_products_is_left_to_xla() -> None:
    closed = in_kernels(jnp.matmul, jnp.ones((3, 20, 40)), jnp.ones((3, 40, 72)))
    assert names_of(closed) == ["triton_product"]


def test_what_attention_reads_is_a_result_of_its_product() -> None:
    """The kernel of attention reads queries, keys and values before the head axis has moved."""

    def layer(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        y = (x @ w + b).reshape(50, 3, 4, 6)
        q, k, v = (y[:, i].swapaxes(0, 1) for i in range(3))
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2))
        return (weights @ v).swapaxes(0, 1).reshape(50, 24)

    args = inputs_of(Layer(layer, ((50, 40), W, B)))
    closed = in_kernels(layer, *args)
    assert names_of(closed).count("pallas_call") == 2
    (got,) = jaxpr_as_fun(closed)(*args)
    np.testing.assert_allclose(got, layer(*args), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("width", "kernels"), [(72, 1), (300, 2)])
def test_two_layers_are_one_kernel_if_the_first_stays_in_registers(
    width: int, kernels: int
) -> None:
    def mlp(x: jax.Array, w: jax.Array, b: jax.Array, v: jax.Array) -> jax.Array:
        return gelu(x, w, b) @ v + x

    args = inputs_of(Layer(mlp, ((2, 50, width), (width, 72), B, (72, width))))
    closed = in_kernels(mlp, *args)
    assert names_of(closed).count("pallas_call") == kernels
    (got,) = jaxpr_as_fun(closed)(*args)
    np.testing.assert_allclose(got, mlp(*args), rtol=2e-5, atol=2e-3)


def test_error_functions_agree_with_those_of_xla() -> None:
    x = jnp.concatenate([jnp.linspace(-12, 12, 4001), jnp.array([np.nan, np.inf, -np.inf, 1e-30])])
    np.testing.assert_allclose(erf(x), jax.lax.erf(x), rtol=5e-7)
    np.testing.assert_allclose(erfc(x), jax.lax.erfc(x), rtol=1e-5, atol=1e-37)
