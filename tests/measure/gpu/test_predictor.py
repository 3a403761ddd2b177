"""Jobs are compiled for a GPU that is not here, and their seconds predicted."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.export
import jax.numpy as jnp
import pytest

from xrl_jax.measure.base import EVERYTHING, Job
from xrl_jax.measure.gpu.compiler import COMPILER_FOLDER
from xrl_jax.measure.gpu.predictor import Predictor

pytestmark = pytest.mark.skipif(
    not COMPILER_FOLDER.is_dir(), reason="JAX's plugin for CUDA is not installed"
)


def job(name: str, fn, *shapes: tuple[int, ...], **more) -> Job:
    avals = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    exported = jax.export.export(jax.jit(fn), platforms=("cuda",))(*avals)
    return Job(name, bytes(exported.serialize()), **more)


@pytest.fixture(scope="module")
def h200() -> Iterator[Predictor]:
    with Predictor("h200") as predictor:
        yield predictor


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv(x, w, (1, 1), "SAME")


def test_the_target_is_the_gpu(h200: Predictor) -> None:
    assert (h200.target.device, h200.target.platform) == ("NVIDIA H200", "gpu")


def test_kernels_are_counted(h200: Predictor) -> None:
    small = job("small", lambda x: jnp.sin(x) + 1, (64, 64))
    (timing,) = h200.submit([small])
    assert timing.status == "ok", timing.error
    assert timing.kernels == {"loop": 1, "all": 1, "graphs": 0, "outside graphs": 1}


def test_a_slower_program_takes_longer_than_its_reference(h200: Predictor) -> None:
    x = (2048, 2048)
    one, two = job("one", lambda a: a @ a, x), job("two", lambda a: a @ (a @ a), x)
    (timing,) = h200.submit([two], reference=one)
    assert timing.relative == pytest.approx(2.0, rel=0.1)


def test_weights_may_be_laid_out_as_kernels_want_them(h200: Predictor) -> None:
    def two(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        return conv(jax.nn.relu(conv(x, w)), v)

    shapes = (64, 32, 3, 3), (64, 64, 3, 3), (1, 32, 28, 28)
    fixed, free = (job("convs", two, *shapes, any_layout=n) for n in (0, 2))
    fixed_timing, free_timing = h200.submit([fixed, free])
    assert fixed_timing.kernels["all"] - free_timing.kernels["all"] == 2


def test_a_convolution_alone_is_one_kernel_in_any_layout(h200: Predictor) -> None:
    shapes = (1, 32, 28, 28), (64, 32, 3, 3)
    fixed, free = (job("conv", conv, *shapes, any_layout=a) for a in (0, EVERYTHING))
    fixed_timing, free_timing = h200.submit([fixed, free])
    assert free_timing.kernels["all"] == 1 < fixed_timing.kernels["all"]


def test_options_put_convolutions_into_a_graph(h200: Predictor) -> None:
    options = (
        ("xla_gpu_enable_command_buffer", "FUSION,CONVOLUTION"),
        ("xla_gpu_graph_min_graph_size", "1"),
    )
    shapes = (1, 32, 28, 28), (64, 32, 3, 3)
    (timing,) = h200.submit([job("conv", conv, *shapes, options=options, any_layout=EVERYTHING)])
    assert (timing.kernels["graphs"], timing.kernels["outside graphs"]) == (1, 0)


def test_a_program_that_does_not_compile_says_so(h200: Predictor) -> None:
    bad = job("bad", lambda x: x + 1, (8,), options=(("xla_no_such_option", "1"),))
    (timing,) = h200.submit([bad])
    assert timing.status == "failed" and "xla_no_such_option" in timing.error
