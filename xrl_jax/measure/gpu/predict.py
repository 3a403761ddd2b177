"""Predicted seconds of kernels on a GPU.

Loops and reductions take what XLA's own model says. That model knows neither cuDNN's convolutions
nor precision, and sees the tiles that the compiler takes without a GPU to try them on. So products
and convolutions are predicted here, from tiles: the time of the fullest multiprocessor.
Nothing here was fitted to a GPU yet: the constants are estimates, and the figures order programs,
no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from xrl_jax.measure.gpu.devices import Gpu
from xrl_jax.measure.gpu.kernels import Kernel, Product

# Tiles of a product that one multiprocessor computes at a time, and the share of its rate that each
# reaches: small ones load more operands for each multiplication.
_TILES = ((128, 128, 0.75), (128, 64, 0.65), (64, 64, 0.5), (64, 32, 0.35), (32, 32, 0.25))
_SPLITS = (1, 2, 4, 8)  # parts of the summed dimension, each on its own multiprocessor
_SPLIT_SECONDS = 1e-6  # to add the parts
_STEP = 32  # of the summed dimension: as much as is loaded at a time
_STEP_SECONDS = 1e-7  # least time of a step: the next operands have to arrive
_START_SECONDS = 2.5e-6  # to load the first operands and to write the last result
_LEAST_LOOP = 8e-7


def kernel_seconds(kernel: Kernel, gpu: Gpu) -> float:
    """Return the predicted seconds of one run of a kernel, without its launch."""
    moved = kernel.bytes / (gpu.bandwidth * gpu.reached)
    if kernel.products:
        return _START_SECONDS + max(moved, sum(_product_seconds(p, gpu) for p in kernel.products))
    return max(moved if kernel.xla_seconds is None else kernel.xla_seconds, _LEAST_LOOP)


def _product_seconds(product: Product, gpu: Gpu) -> float:
    rate = gpu.rates[product.dtype] / gpu.cores / product.passes

    def seconds(tile: tuple[int, int, float], split: int) -> float:
        m, n, reached = tile
        tiles = product.batch * math.ceil(product.m / m) * math.ceil(product.n / n) * split
        step = max(2.0 * m * n * _STEP / (rate * reached), _STEP_SECONDS)
        each = math.ceil(product.k / split / _STEP) * step
        return math.ceil(tiles / gpu.cores) * each + _SPLIT_SECONDS * (split > 1)

    if product.tile is not None:
        return min(seconds(tile, 1) for tile in _TILES if tile[:2] == product.tile)
    return min(seconds(tile, split) for tile in _TILES for split in _SPLITS)


def program_seconds(
    kernels: Sequence[Kernel], gpu: Gpu, factors: Mapping[str, float] | None = None
) -> float:
    """Return the predicted seconds of a call of a program with these kernels.

    A CUDA graph is launched once. Of the kernels that the host launches one by one, each takes at
    least as long as its launch.

    Args:
      factors: corrections by the kind of a kernel; see `fit`.
    """
    factors = factors or {}
    total = gpu.launch * len({k.graph for k in kernels if k.graph})
    for kernel in kernels:
        busy = factors.get(kernel.kind, 1.0) * kernel_seconds(kernel, gpu) + gpu.graph_gap
        total += kernel.times * (busy if kernel.graph else max(busy, gpu.launch))
    return total


def summary(kernels: Sequence[Kernel]) -> dict[str, int]:
    """Return how many kernels of each kind a call launches, and how many CUDA graphs hold them."""
    kinds: dict[str, int] = {}
    for kernel in kernels:
        kinds[kernel.kind] = kinds.get(kernel.kind, 0) + kernel.times
    graphs = len({k.graph for k in kernels if k.graph})
    alone = sum(k.times for k in kernels if not k.graph)
    return {**kinds, "all": sum(kinds.values()), "graphs": graphs, "outside graphs": alone}
