"""What every network here provides, and how its weights are drawn.

A network is written as an ordinary JAX user would write it, with no tuning for the optimiser. Its
weights come from a NumPy generator, so that they do not depend on the JAX version, and are scaled
by fan-in, so that activations neither die nor blow up and the outputs tell inputs apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Model:
    """A network with weights and example inputs.

    Attributes:
      name: the name under which the registry knows it.
      fn: `fn(weights, *inputs)`, a pure JAX function.
      weights: pytree of float32 NumPy arrays.
      inputs: example arrays, one for each further argument of `fn`.
    """

    name: str
    fn: Callable[..., Any]
    weights: Any
    inputs: tuple[np.ndarray, ...]


def normal(rng: np.random.Generator, shape: tuple[int, ...], *, std: float) -> np.ndarray:
    """Float32 array of `shape`, normal with mean 0 and standard deviation `std`."""
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)


def conv_kernel(
    rng: np.random.Generator, out_channels: int, in_channels: int, size: int, *, gain: float = 2.0
) -> np.ndarray:
    """OIHW kernel with variance `gain` / fan-in.

    Gain 2 keeps the second moment through a ReLU (He et al. 2015, arXiv:1502.01852).
    """
    std = math.sqrt(gain / (in_channels * size * size))
    return normal(rng, (out_channels, in_channels, size, size), std=std)


def image(rng: np.random.Generator, size: int) -> np.ndarray:
    """Example image [1, 3, size, size]: a coarse pattern with noise on it, about unit variance.

    Noise alone would average out in the global pooling, and all images would look alike.
    """
    coarse = rng.standard_normal((1, 3, 4, 4), dtype=np.float32)
    repeats = -(-size // 4)
    pattern = np.repeat(np.repeat(coarse, repeats, axis=2), repeats, axis=3)[:, :, :size, :size]
    return pattern + normal(rng, (1, 3, size, size), std=0.3)


def scaled(channels: int, width: float) -> int:
    """`channels` times the width multiplier, at least 1."""
    return max(1, round(channels * width))
