"""Winograd convolutions in library calls; the transforms around the products are generated code."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrl_jax.libraries.onednn import winograd
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.libraries.onednn.fuse import fused
from xrl_jax.libraries.onednn.kernels import kernel
from xrl_jax.libraries.onednn.plan import plan
from xrl_jax.libraries.onednn.spec import (
    RELU,
    Binary,
    Clip,
    Epilogue,
    Instruction,
    Partition,
    Winograd,
)
from xrl_jax.libraries.onednn.tiles import Results, Tiles

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")
SAME = ((1, 1), (1, 1))
# Images [N, H, W, C] and numbers of result features: less than a vector, several vectors, and some
# with a remainder.
SIZES = [((1, 4, 4, 3), 5), ((2, 7, 9, 16), 32), ((1, 6, 5, 37), 19), ((1, 30, 30, 32), 48)]


def arrays(image: tuple[int, ...], features: int, m: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = image, (features, image[3], 3, 3)
    x, w = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)
    return x, winograd.transformed(w, m)


@pytest.mark.parametrize("m", winograd.TILES)
@pytest.mark.parametrize(("image", "features"), SIZES)
def test_winograd_kernels_equal_their_lax_code(
    image: tuple[int, ...], features: int, m: int
) -> None:
    x, w = arrays(image, features, m)
    for padding in (SAME, ((2, 0), (0, 1))):
        op = Winograd(m, padding)
        y = jax.jit(lambda x, w, op=op: kernel(op, x, w))(x, w)
        np.testing.assert_allclose(y, op(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "after",
    [
        Epilogue(bias=True),
        Epilogue(addend=True, clip=RELU),
        Epilogue(bias=True, addend=True, clip=Clip(-1.0, 1.0)),
    ],
)
def test_the_epilogue_is_applied(after: Epilogue) -> None:
    x, w = arrays((1, 7, 9, 5), 20, 3)
    bias, addend = jnp.linspace(-2.0, 2.0, 20), jnp.linspace(-9.0, 9.0, 7 * 9 * 20)
    more = [bias] * after.bias + [addend.reshape(1, 7, 9, 20)] * after.addend
    op = replace(Winograd(3, SAME), after=after)
    y = jax.jit(lambda *a: kernel(op, *a))(x, w, *more)
    np.testing.assert_allclose(y, op(x, w, *more), rtol=1e-4, atol=1e-4)


def test_a_bias_and_a_clip_are_merged_into_the_convolution() -> None:
    image = (1, 8, 8, 16)
    code = (
        Instruction(Winograd(2, SAME), (0, 1), image),
        Instruction(Binary("add"), (3, 2), image),
        Instruction(RELU, (4,), image),
    )
    part = fused(Partition((image, (16, 16, 16), (1, 1, 1, 16)), (False, True, False), code, (5,)))
    ops = [i.op for i in part.code if isinstance(i.op, Winograd)]
    assert ops == [Winograd(2, SAME, Epilogue(bias=True, clip=RELU))]
    lib = library()
    assert lib is not None
    steps = [step.primitive for step in plan(lib, part).steps]
    assert [type(s) for s in steps] == [Tiles, int, Results]


def test_the_derivative_equals_that_of_the_lax_code() -> None:
    x, w = arrays((1, 5, 5, 3), 4, 2)
    op = Winograd(2, SAME)
    found = jax.grad(lambda x: jnp.sum(kernel(op, x, w) ** 2))(x)
    expected = jax.grad(lambda x: jnp.sum(op(x, w) ** 2))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
