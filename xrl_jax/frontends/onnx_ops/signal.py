"""Fourier transforms of ONNX, where the last axis holds the real and imaginary parts."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from xrl_jax.frontends.onnx_ops.base import (
    Array,
    Node,
    OnnxError,
    Translation,
    Value,
    axis_of,
    device,
)


def to_complex(x: Array) -> Array:
    """Convert [..., 1 or 2] to complex [...]."""
    if x.shape[-1] == 1:
        return lax.complex(x[..., 0], lax.full_like(x[..., 0], 0))
    return lax.complex(x[..., 0], x[..., 1])


def from_complex(x: Array) -> Array:
    return jnp.stack([lax.real(x), lax.imag(x)], axis=-1)


def dft(
    node: Node, x: Value, length: Value | None = None, axis_input: Value | None = None
) -> Array:
    x = device(x)
    axis = node.get("axis", 1) if node.opset < 20 else -2
    if axis_input is not None:
        axis = int(node.host(axis_input, "axis").reshape(()))
    axis = axis_of(axis, x.ndim)
    inverse, onesided = bool(node.get("inverse", 0)), bool(node.get("onesided", 0))
    count = None if length is None else int(node.host(length, "dft_length").reshape(()))
    if inverse and onesided:
        count = 2 * (x.shape[axis] - 1) if count is None else count
        return lax.expand_dims(jnp.fft.irfft(to_complex(x), n=count, axis=axis), (x.ndim - 1,))
    if inverse:
        return from_complex(jnp.fft.ifft(to_complex(x), n=count, axis=axis))
    return from_complex(forward(x, count, axis, onesided))


def forward(x: Array, count: int | None, axis: int, onesided: bool) -> Array:
    """Transform along an axis; onesided keeps the first half, which suffices for real input."""
    size = x.shape[axis] if count is None else count
    half = size // 2 + 1
    if x.shape[-1] == 2:
        result = jnp.fft.fft(to_complex(x), n=size, axis=axis)
        return lax.slice_in_dim(result, 0, half, axis=axis) if onesided else result
    result = jnp.fft.rfft(x[..., 0], n=size, axis=axis)
    if onesided:
        return result
    # The other half is the conjugate of the first, mirrored and without its ends.
    inner = lax.slice_in_dim(result, 1, (size + 1) // 2, axis=axis)
    return lax.concatenate([result, lax.conj(lax.rev(inner, (axis,)))], axis)


def stft(
    node: Node, signal: Value, step: Value, window: Value | None = None, length: Value | None = None
) -> Array:
    """Transform windows of a signal [B, L, 1 or 2] to [B, frames, bins, 2]."""
    signal = device(signal)
    hop = int(node.host(step, "frame_step").reshape(()))
    if length is not None:
        size = int(node.host(length, "frame_length").reshape(()))
    elif window is not None:
        size = window.shape[0]
    else:
        raise OnnxError("needs a window or a frame_length")
    frames = (signal.shape[1] - size) // hop + 1
    cut = [lax.slice_in_dim(signal, i * hop, i * hop + size, axis=1) for i in range(frames)]
    framed = jnp.stack(cut, axis=1)
    if window is not None:
        framed = framed * lax.expand_dims(device(window), (1,))
    return from_complex(forward(framed, None, 2, bool(node.get("onesided", 1))))


TRANSLATIONS: dict[str, Translation] = {"DFT": dft, "STFT": stft}
