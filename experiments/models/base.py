"""Common parts of the networks: their interface, the initialisation of weights, shared layers.

A network is written as an ordinary JAX user would write it, with no tuning for the optimiser. Its
weights come from a NumPy generator, so that they do not depend on the JAX version, and are scaled
by fan-in, so that activations neither vanish nor explode and the outputs distinguish inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax


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
    """Return a float32 array of `shape`, normal with mean 0 and standard deviation `std`."""
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)


def conv_kernel(
    rng: np.random.Generator, out_channels: int, in_channels: int, size: int, *, gain: float = 2.0
) -> np.ndarray:
    """Return an OIHW kernel with variance `gain` / fan-in.

    Gain 2 keeps the second moment through a ReLU (He et al. 2015, arXiv:1502.01852).
    """
    std = math.sqrt(gain / (in_channels * size * size))
    return normal(rng, (out_channels, in_channels, size, size), std=std)


def norm_weights(
    rng: np.random.Generator, channels: int, *, scale: float = 1.0
) -> dict[str, np.ndarray]:
    """Return plausible weights and statistics for `batch_norm`, with scales around `scale`."""
    return {
        "scale": (scale * rng.uniform(0.8, 1.2, channels)).astype(np.float32),
        "bias": normal(rng, (channels,), std=0.1),
        "mean": normal(rng, (channels,), std=0.1),
        "var": rng.uniform(0.7, 1.4, channels).astype(np.float32),
    }


def dense_weights(
    rng: np.random.Generator, inputs: int, outputs: int, *, gain: float = 1.0
) -> dict[str, np.ndarray]:
    """Return a kernel [inputs, outputs] with variance `gain` / fan-in, and a small bias."""
    return {
        "kernel": normal(rng, (inputs, outputs), std=math.sqrt(gain) * inputs**-0.5),
        "bias": normal(rng, (outputs,), std=0.05),
    }


def image(rng: np.random.Generator, size: int) -> np.ndarray:
    """Return an example image [1, 3, size, size]: a coarse pattern with noise, about unit variance.

    Noise alone would average out in the global pooling, and all images would look alike.
    """
    coarse = rng.standard_normal((1, 3, 4, 4), dtype=np.float32)
    repeats = -(-size // 4)
    pattern = np.repeat(np.repeat(coarse, repeats, axis=2), repeats, axis=3)[:, :, :size, :size]
    return pattern + normal(rng, (1, 3, size, size), std=0.3)


def scaled(channels: int, width: float) -> int:
    """Return `channels` times the width multiplier, at least 1."""
    return max(1, round(channels * width))


def conv(
    kernel: jax.Array,
    x: jax.Array,
    *,
    stride: int = 1,
    groups: int = 1,
    padding: str | Sequence[tuple[int, int]] | None = None,
) -> jax.Array:
    """Convolve [N, C, H, W] with an OIHW kernel.

    `padding` is as in lax; by default, half of the kernel's (odd) size on all sides.
    """
    half = kernel.shape[2] // 2
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        [(half, half)] * 2 if padding is None else padding,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        feature_group_count=groups,
    )


def batch_norm(layer: dict[str, Any], x: jax.Array, *, epsilon: float = 1e-5) -> jax.Array:
    """Apply batch norm with stored statistics to [N, C, H, W]."""
    mean, var = layer["mean"][:, None, None], layer["var"][:, None, None]
    scale, bias = layer["scale"][:, None, None], layer["bias"][:, None, None]
    return (x - mean) * lax.rsqrt(var + epsilon) * scale + bias
