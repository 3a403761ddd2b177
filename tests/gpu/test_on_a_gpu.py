"""What a GPU adds to the tests: `make gpu-test`. Without a GPU they are skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xrl_jax
from tests.libraries.triton.spellings import SPELLINGS
from tests.libraries.triton.test_library import all_in_triton, in_triton, layer
from xrl_jax import Budget, from_jax
from xrl_jax.accept.accuracy import relative_error
from xrl_jax.backends.fast import Fast
from xrl_jax.backends.layouts import wanted_formats
from xrl_jax.cost.programs import IN_ONE_GRAPH
from xrl_jax.measure.worker_process import option_value

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU")
_TF32 = 1e-3  # error of sums of products in TF32, which XLA takes for float32


def random(shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    return [jax.random.normal(jax.random.key(i), s) for i, s in enumerate(shapes)]


def in_float64(fn: Callable[..., Any], *args: jax.Array) -> np.ndarray:
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(fn(*(np.asarray(a).astype("float64") for a in args)))


def convolutions(v: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.conv(jax.nn.relu(jax.lax.conv(x, v, (1, 1), "SAME")), w, (2, 2), "SAME")


CONVOLUTIONS = (64, 32, 3, 3), (128, 64, 1, 1), (1, 32, 28, 28)


@pytest.mark.parametrize("name", SPELLINGS)
def test_attention_is_right(name: str) -> None:
    fn, args = SPELLINGS[name].fn, random(SPELLINGS[name].shapes)
    fast = Fast(in_triton(from_jax(fn, *args)), fn)
    assert "attention_" in str(jax.jit(fast).lower(*args).compile().as_text())
    exact = in_float64(fn, *args)
    own = relative_error(np.asarray(fn(*args)), exact)
    assert relative_error(np.asarray(fast(*args)), exact) <= max(4 * own, _TF32)


def test_attention_keeps_special_values() -> None:
    fn, args = SPELLINGS["heads first"].fn, random(SPELLINGS["heads first"].shapes)
    q, k, v, mask = args
    args = [q.at[0, 0, 0, 3].set(jnp.nan), k, v, mask.at[1].set(-jnp.inf)]
    fast = Fast(in_triton(from_jax(fn, *args)), fn)
    np.testing.assert_array_equal(np.isnan(fast(*args)), np.isnan(fn(*args)))


def test_attention_is_saved_and_loaded(tmp_path: Path) -> None:
    fn, args = SPELLINGS["packed"].fn, random(SPELLINGS["packed"].shapes)
    fast = Fast(in_triton(from_jax(fn, *args)), fn)
    fast.save(tmp_path / "attention.xrl")
    loaded = xrl_jax.load(tmp_path / "attention.xrl")
    np.testing.assert_array_equal(loaded(*args), fast(*args))


def test_a_product_and_its_epilogue_are_right() -> None:
    args = random(((128, 768), (768, 3072), (3072,)))
    fast = Fast(all_in_triton(from_jax(layer, *args)), layer)
    assert "product_" in str(jax.jit(fast).lower(*args).compile().as_text())
    exact = in_float64(layer, *args)
    own = relative_error(np.asarray(layer(*args)), exact)
    assert relative_error(np.asarray(fast(*args)), exact) <= max(4 * own, _TF32)


def test_outside_of_its_domain_the_program_runs_the_original() -> None:
    v, w, x = random(CONVOLUTIONS)
    program = from_jax(convolutions, v, w, x, weights=(0, 1))
    fast = Fast(program, convolutions, domain=(None, None, 9.0), options=IN_ONE_GRAPH)
    for image in (x, x.at[0, 3, 5, 5].set(jnp.nan), x * 1e20, x):
        expected = np.asarray(jax.jit(convolutions)(v, w, image))
        np.testing.assert_allclose(np.asarray(fast(v, w, image)), expected, rtol=1e-2, atol=_TF32)


def test_the_same_function_runs_on_the_cpu_beside_the_gpu() -> None:
    fn, args = SPELLINGS["packed"].fn, random(SPELLINGS["packed"].shapes)
    fast = Fast(in_triton(from_jax(fn, *args)), fn)
    cpu = jax.devices("cpu")[0]
    found = fast(*(jax.device_put(a, cpu) for a in args))
    assert relative_error(np.asarray(found), in_float64(fn, *args)) < 1e-5


def test_prepared_weights_have_the_layouts_that_xla_wants() -> None:
    args = random(CONVOLUTIONS)
    fast = Fast(from_jax(convolutions, *args, weights=(0, 1)), convolutions)
    prepared = fast.prepare(*args[:2])
    image = jax.ShapeDtypeStruct(args[2].shape, args[2].dtype)
    wanted = wanted_formats(fast.runnable.hoisted, [image])
    assert [v.format.layout for v in prepared.values] == [f.layout for f in wanted]
    exact = in_float64(convolutions, *args)
    assert relative_error(np.asarray(fast.call(prepared, args[2])), exact) < _TF32


def test_convolutions_are_right_in_a_cuda_graph() -> None:
    args = random(CONVOLUTIONS)
    options = {name: option_value(value) for name, value in IN_ONE_GRAPH}
    run = jax.jit(convolutions, compiler_options=options)
    exact = in_float64(convolutions, *args)
    for _ in range(3):  # the first calls record the graph
        assert relative_error(np.asarray(run(*args)), exact) < _TF32


def test_optimize_returns_what_is_right() -> None:
    fn, args = SPELLINGS["packed"].fn, random(SPELLINGS["packed"].shapes)
    fast = xrl_jax.optimize(fn, *args, budget=Budget(30.0), progress=False)
    exact = in_float64(fn, *args)
    own = relative_error(np.asarray(fn(*args)), exact)
    assert relative_error(np.asarray(fast(*args)), exact) <= max(4 * own, _TF32)
