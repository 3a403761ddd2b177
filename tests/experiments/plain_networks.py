"""Layers in plain NumPy, from which the tests build the networks independently."""

from __future__ import annotations

import numpy as np


def np_conv(
    x: np.ndarray, kernel: np.ndarray, stride: int, pad: int, groups: int = 1
) -> np.ndarray:
    """Compute a direct convolution: one einsum per output position."""
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    outs, size = kernel.shape[0], kernel.shape[2]
    rows, cols = ((n - size) // stride + 1 for n in x.shape[2:])
    kernel = kernel.reshape(groups, outs // groups, *kernel.shape[1:])
    y = np.zeros((x.shape[0], outs, rows, cols))
    for i in range(rows):
        for j in range(cols):
            patch = x[:, :, i * stride : i * stride + size, j * stride : j * stride + size]
            patch = patch.reshape(x.shape[0], groups, -1, size, size)
            y[:, :, i, j] = np.einsum("ngchw,gochw->ngo", patch, kernel).reshape(-1, outs)
    return y


def np_pool(x: np.ndarray, pad: int) -> np.ndarray:
    """Apply 3x3 max pooling with stride 2."""
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=-np.inf)
    rows, cols = ((n - 3) // 2 + 1 for n in x.shape[2:])
    y = np.zeros((*x.shape[:2], rows, cols))
    for i in range(rows):
        for j in range(cols):
            y[:, :, i, j] = x[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max(axis=(2, 3))
    return y
