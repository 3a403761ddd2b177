"""Predicted seconds of kernels on a GPU."""

from __future__ import annotations

import pytest

from xrl_jax.measure.gpu.devices import gpu_of
from xrl_jax.measure.gpu.kernels import Kernel, Product
from xrl_jax.measure.gpu.predict import kernel_seconds, program_seconds, summary

H200 = gpu_of("h200")


def product(m: int, n: int, k: int, dtype: str = "tf32", passes: int = 1) -> Kernel:
    return Kernel(
        "p", "product", 4 * (m * k + k * n + m * n), products=(Product(1, m, n, k, dtype, passes),)
    )


def test_a_large_product_takes_most_of_the_rate() -> None:
    seconds = kernel_seconds(product(8192, 8192, 8192), H200)
    assert 0.6 < 2 * 8192**3 / seconds / H200.rates["tf32"] < 0.8


def test_half_the_bytes_and_twice_the_rate() -> None:
    single, half = (kernel_seconds(product(4096, 4096, 4096, t), H200) for t in ("tf32", "float16"))
    assert single == pytest.approx(2 * half, rel=0.01)


def test_three_passes_take_three_times_as_long() -> None:
    once, thrice = (kernel_seconds(product(4096, 4096, 4096, "tf32", n), H200) for n in (1, 3))
    assert thrice == pytest.approx(3 * once, rel=0.01)


def test_a_product_of_one_row_takes_what_its_weights_take() -> None:
    row = product(1, 16384, 16384)
    loading = row.bytes / (H200.bandwidth * H200.reached)
    assert kernel_seconds(row, H200) == pytest.approx(loading, rel=0.02)


def test_a_small_product_takes_its_start_and_its_steps() -> None:
    assert kernel_seconds(product(32, 32, 32), H200) == pytest.approx(2.5e-6 + 0.1e-6)
    assert kernel_seconds(product(32, 32, 320), H200) == pytest.approx(2.5e-6 + 1e-6)


def test_parts_of_a_long_sum_are_computed_side_by_side() -> None:
    assert kernel_seconds(product(32, 32, 32 * 80), H200) == pytest.approx(2.5e-6 + 2e-6)


def test_a_kernel_with_a_tile_of_its_own_splits_no_sum() -> None:
    own = Kernel("p", "product", 0, products=(Product(1, 32, 32, 32 * 80, "tf32", tile=(32, 32)),))
    assert kernel_seconds(own, H200) == pytest.approx(2.5e-6 + 8e-6)


def test_xla_predicts_loops() -> None:
    assert kernel_seconds(Kernel("l", "loop", 10**6, xla_seconds=3e-6), H200) == 3e-6


def test_the_host_launches_what_no_graph_holds() -> None:
    in_graph = [Kernel("l", "loop", 0, graph=1, xla_seconds=1e-6)] * 10
    alone = [Kernel("l", "loop", 0, xla_seconds=1e-6)] * 10
    assert program_seconds(in_graph, H200) == pytest.approx(H200.launch + 10 * 2.2e-6)
    assert program_seconds(alone, H200) == pytest.approx(10 * H200.launch)


def test_a_loop_counts_every_turn() -> None:
    kernels = [Kernel("a", "loop", 0, times=8, graph=1), Kernel("b", "conv", 0)]
    expected = {"loop": 8, "conv": 1, "all": 9, "graphs": 1, "outside graphs": 1}
    assert summary(kernels) == expected


def test_an_unknown_gpu_is_named() -> None:
    with pytest.raises(ValueError, match=r"no GPU 'h300' .*h100, h200"):
        gpu_of("h300")
