"""oneDNN's kernels, called through the library and through XLA: whether they are available, what
they compute, and what replaces them elsewhere.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xrl_jax.backends import loading
from xrl_jax.backends.fast import Fast
from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, pack_attrs
from xrl_jax.libraries.onednn import calls as onednn
from xrl_jax.libraries.onednn.c_api import library
from xrl_jax.lower.table import LOWERINGS, lower

IMAGE = jnp.arange(9.0).reshape(1, 3, 3, 1)
KERNEL = jnp.ones((2, 2, 1, 2)) * jnp.array([1.0, -1.0])
WINDOWS = np.array([[8.0, 12.0], [20.0, 24.0]])  # sums of the image's 2x2 windows

needs_kernels = pytest.mark.skipif(not onednn.available(), reason="jaxlib has no oneDNN here")


@pytest.fixture(params=["library", "xla"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with both ways of calling the kernels, see `onednn`."""
    if request.param == "xla":
        for module in ("calls", "library"):
            monkeypatch.setattr(f"xrl_jax.libraries.onednn.{module}.library", lambda: None)
    elif library() is None:
        pytest.skip("oneDNN is not installed")
    return request.param


def conv(x: jax.Array, w: jax.Array, **options) -> jax.Array:
    given = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}
    return onednn.convolution(x, w, **(given | options))


def calls(fn, *args) -> bool:
    text = jax.jit(lambda *a: fn(*a)).lower(*args).as_text()
    return "__onednn$" in text or "xrl_jax.onednn." in text


@pytest.mark.skipif(
    jax.default_backend() != "cpu" or platform.machine() != "x86_64", reason="an x86 CPU's"
)
def test_the_kernels_are_available_under_the_pinned_jaxlib() -> None:
    """If this fails after an upgrade: add the new version to `onednn._TESTED`, and run the tests of
    this file and `test_conformance` with it.
    """
    assert onednn.available()


@needs_kernels
def test_a_convolution() -> None:
    y = np.asarray(jax.jit(lambda x, w: conv(x, w))(IMAGE, KERNEL))
    np.testing.assert_array_equal(y[0, :, :, 0], WINDOWS)
    np.testing.assert_array_equal(y[0, :, :, 1], -WINDOWS)


@needs_kernels
def test_a_convolution_with_an_epilogue() -> None:
    addend = jnp.ones((1, 2, 2, 2))
    epilogue = onednn.Epilogue(jnp.array([-11.0, 21.0]), addend, relu=True)
    y = np.asarray(jax.jit(lambda x, w: conv(x, w, epilogue=epilogue))(IMAGE, KERNEL))
    np.testing.assert_array_equal(y[0, :, :, 0], [[0, 2], [10, 14]])
    np.testing.assert_array_equal(y[0, :, :, 1], [[14, 10], [2, 0]])


@needs_kernels
def test_a_rectifier_keeps_nan_and_infinities() -> None:
    """The image is NaN, infinity or 1, in one window each."""
    x = jnp.asarray([np.nan, np.inf, 1.0]).reshape(1, 3, 1, 1)
    w = jnp.ones((1, 1, 1, 2)) * jnp.array([1.0, -1.0])
    y = jax.jit(lambda x, w: conv(x, w, epilogue=onednn.Epilogue(relu=True)))(x, w)
    np.testing.assert_array_equal(y[0, :, 0], [[np.nan, np.nan], [np.inf, 0], [1, 0]])


@needs_kernels
@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("right", [0, 1])
def test_a_product_may_contract_either_axis(left: int, right: int) -> None:
    a, b = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[0.0, 1.0], [10.0, 0.0]])
    numbers = (((left,), (right,)), ((), ()))
    epilogue = onednn.Epilogue(bias=jnp.array([0.5, 0.0]))
    y = jax.jit(lambda a, b: onednn.dot_general(a, b, numbers, epilogue))(a, b)
    expected = (a.T if left == 0 else a) @ (b.T if right == 1 else b) + np.array([0.5, 0.0])
    np.testing.assert_array_equal(y, expected)


@needs_kernels
def test_derivatives_are_those_of_lax() -> None:
    def plain(x, w):
        dims = lax.conv_dimension_numbers(x.shape, w.shape, ("NHWC", "HWIO", "NHWC"))
        y = lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=dims)
        return jax.nn.relu(y + 1).sum()

    def by_kernel(x, w):
        return conv(x, w, epilogue=onednn.Epilogue(jnp.ones(2), relu=True)).sum()

    for got, expected in zip(
        jax.jit(jax.grad(by_kernel, (0, 1)))(IMAGE, KERNEL),
        jax.grad(plain, (0, 1))(IMAGE, KERNEL),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)


@needs_kernels
def test_vmap_over_either_argument() -> None:
    a, b = jnp.arange(12.0).reshape(2, 2, 3), jnp.arange(6.0).reshape(3, 2)
    product = lambda a, b: onednn.dot_general(a, b, (((1,), (0,)), ((), ())))  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.vmap(product, (0, None)))(a, b), a @ b)
    np.testing.assert_array_equal(jax.jit(jax.vmap(product, (None, 0)))(b, a), b @ a)


@needs_kernels
@pytest.mark.parametrize(("dtype", "called"), [("float32", True), ("bfloat16", False)])
def test_other_dtypes_go_to_xla(dtype: str, called: bool) -> None:
    assert calls(product_with_lowering("onednn", dtype), *operands(dtype)) == called


def test_without_the_kernels_the_lowering_falls_back_to_xla(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program found on a machine with the kernels also runs on one without them."""
    monkeypatch.setattr(onednn, "available", lambda: False)
    fn = product_with_lowering("onednn", "float32")
    assert not calls(fn, *operands("float32"))
    np.testing.assert_array_equal(fn(*operands("float32")), [[3.0, 3.0], [3.0, 3.0]])


def operands(dtype: str) -> tuple[jax.Array, jax.Array]:
    return jnp.ones((2, 3), dtype), jnp.ones((3, 2), dtype)


def product_with_lowering(name: str, dtype: str):
    number = [f.name for f in LOWERINGS["dot"]].index(name)
    over = {"lhs_contract": ops.pack_dims((1,)), "rhs_contract": ops.pack_dims((0,))}
    attrs = pack_attrs("dot", {**over, "dtype": ops.DTYPE_CODE[dtype]})
    node = Node("dot", (0, 1), attrs, number, shape=(2, 2), dtype=dtype)
    return lambda a, b: lower(node, a, b)


@needs_kernels
def test_a_file_with_xlas_kernels_is_refused_under_another_jaxlib(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration of these calls is XLA's internal format, and may mean something else in
    another version.
    """
    if way == "library":
        pytest.skip("its files name the library: see `dnnl`")
    x, w = operands("float32")
    program = from_jax(product_with_lowering("onednn", "float32"), x, w, weights=(1,))
    Fast(program, None).save(tmp_path / "f.xrl")
    np.testing.assert_array_equal(loading.load(tmp_path / "f.xrl")(x, w), np.full((2, 2), 3.0))
    monkeypatch.setattr(loading, "version_of", lambda package: "99.0")
    with pytest.raises(
        loading.LoadError, match=r"kernels of jaxlib .*, but 99\.0 is installed: install"
    ):
        loading.load(tmp_path / "f.xrl")


@needs_kernels
def test_a_persistent_cache_causes_no_warnings(tmp_path: Path) -> None:
    """XLA cannot serialise these calls; JAX would otherwise warn of that at every compilation."""
    code = """
import jax, jax.numpy as jnp
from xrl_jax.libraries.onednn import calls as onednn
a = jnp.ones((2, 2))
print(jax.jit(lambda a: onednn.dot_general(a, a, (((1,), (0,)), ((), ()))))(a)[0, 0])
"""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cpu",
    }
    words = [sys.executable, "-W", "default", "-c", code]
    done = subprocess.run(words, env=os.environ | cache, capture_output=True, text=True, check=True)
    assert done.stdout == "2.0\n" and "persistent" not in done.stderr
    assert any(tmp_path.iterdir())  # entries of other functions: the cache was in use


@needs_kernels
def test_arguments_that_are_sharded_over_devices() -> None:
    """XLA's partitioner does not know the calls: it gathers their operands."""
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from xrl_jax.libraries.onednn import calls as onednn
a, b = jnp.arange(12.0).reshape(4, 3), jnp.arange(6.0).reshape(3, 2)
mesh = jax.make_mesh((2,), ("rows",))
rows = jax.device_put(a, NamedSharding(mesh, P("rows")))
product = jax.jit(lambda a, b: onednn.dot_general(a, b, (((1,), (0,)), ((), ()))))
np.testing.assert_array_equal(product(rows, b), a @ b)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=os.environ | flags, check=True)
