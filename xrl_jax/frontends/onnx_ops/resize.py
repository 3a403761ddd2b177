"""Resize and Upsample of ONNX, one axis at a time, by constant indices or a constant matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import (
    Array,
    Node,
    OnnxError,
    Translation,
    Value,
    axis_of,
    device,
    is_float,
    like,
)
from xrl_jax.frontends.onnx_ops.shape import take


def positions(mode: str, size: int, new: int, scale: Any, roi: tuple[float, float]) -> np.ndarray:
    """Return the input coordinate of each of the `new` outputs along an axis.

    The scale is a NumPy scalar, whose dtype is the precision of the computation.
    """
    y = np.arange(new, dtype=scale.dtype)
    width = scale * size
    if mode == "align_corners":
        return np.zeros(new) if width == 1 else y * (size - 1) / (width - 1)
    if mode == "asymmetric":
        return y / scale
    if mode == "tf_crop_and_resize":
        start, end = roi
        if new == 1:
            return np.full(1, (start + end) * (size - 1) / 2)
        return start * (size - 1) + y * (end - start) * (size - 1) / (width - 1)
    if mode == "tf_half_pixel_for_nn":  # of opsets 11 and 12
        return (y + 0.5) / scale
    half = (y + 0.5) / scale - 0.5
    if mode == "half_pixel":
        return half
    if mode == "pytorch_half_pixel":
        return half if new > 1 else np.zeros(1)
    if mode == "half_pixel_symmetric":
        return size / 2 * (1 - new / width) + half
    raise OnnxError(f"coordinate_transformation_mode {mode!r} does not exist")


ROUNDING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def hat(x: np.ndarray) -> np.ndarray:
    """Evaluate the linear interpolation kernel."""
    return np.maximum(1 - np.abs(x), 0)


def cubic(a: float) -> Callable[[np.ndarray], np.ndarray]:
    """Return Keys' cubic convolution kernel."""

    def kernel(x: np.ndarray) -> np.ndarray:
        x = np.abs(x)
        near = (a + 2) * x**3 - (a + 3) * x**2 + 1
        far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
        return np.where(x <= 1, near, np.where(x < 2, far, 0))

    return kernel


def interpolation_matrix(
    x: np.ndarray,
    size: int,
    kernel: Callable[[np.ndarray], np.ndarray],
    support: int,
    stretch: float,
    exclude_outside: bool,
) -> np.ndarray:
    """Return [len(x), size], the weight of each input at each coordinate; rows sum to 1.

    `stretch` below 1 widens the kernel (antialiasing). Beyond the edge the last value repeats or,
    with `exclude_outside`, has weight 0.
    """
    reach = math.ceil(support / stretch) + 1
    taps = np.floor(x)[:, None].astype(int) + np.arange(-reach, reach + 2)
    weights = kernel(stretch * (taps - x[:, None]))
    if exclude_outside:
        weights = np.where((taps < 0) | (taps >= size), 0, weights)
    weights = weights / weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((len(x), size))
    rows = np.broadcast_to(np.arange(len(x))[:, None], taps.shape)
    np.add.at(matrix, (rows, np.clip(taps, 0, size - 1)), weights)
    return matrix


def apply_matrix(x: Array, matrix: np.ndarray, axis: int) -> Array:
    """Multiply by a matrix [new, old] along an axis."""
    weights = device(matrix.astype(x.dtype if is_float(x) else np.float32))
    numbers = (((axis,), (1,)), ((), ()))
    result = lax.dot_general(
        x.astype(weights.dtype), weights, numbers, precision=lax.Precision.HIGHEST
    )
    return jnp.moveaxis(result, -1, axis)


def repeat(x: Array, index: np.ndarray, axis: int) -> Array:
    """Select along an axis by constant indices; enlargement by an integer is a broadcast."""
    size = x.shape[axis]
    times = len(index) // size if size else 0
    if times > 1 and np.array_equal(index, np.repeat(np.arange(size), times)):
        shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
        kept = tuple(i + (i > axis) for i in range(x.ndim))
        wide = lax.broadcast_in_dim(x, shape, kept)
        return jnp.reshape(wide, (*x.shape[:axis], size * times, *x.shape[axis + 1 :]))
    return take(x, index, axis)


def new_sizes(
    node: Node, x: Array, axes: list[int], scales: Value | None, sizes: Value | None
) -> tuple[list[int], list[float]]:
    """Return the size and the scale of each resized axis."""
    old = [x.shape[axis] for axis in axes]
    if scales is not None and scales.size:
        factors = [float(v) for v in node.host(scales, "scales").reshape(-1)]
        # float32 scales such as 0.6 are slightly off; ONNX floors the product without correction.
        return [math.floor(n * s) for n, s in zip(old, factors, strict=True)], factors
    if sizes is None:
        raise OnnxError("needs scales or sizes")
    wanted = list(node.ints(sizes, "sizes"))
    policy = node.get("keep_aspect_ratio_policy", "stretch")
    factors = [new / n for new, n in zip(wanted, old, strict=True)]
    if policy != "stretch":
        common = min(factors) if policy == "not_larger" else max(factors)
        return [math.floor(common * n + 0.5) for n in old], [common] * len(old)
    return wanted, factors


def resize_axes(
    node: Node,
    x: Array,
    axes: list[int],
    sizes: list[int],
    scales: list[float],
    roi: np.ndarray,
    coordinates: str,
    rounding: str,
) -> Array:
    mode = node.get("mode", "nearest")
    dtype = x.dtype
    for i, axis in enumerate(axes):
        size, new, scale = x.shape[axis], sizes[i], scales[i]
        if size == new and scale == 1 and coordinates != "tf_crop_and_resize":
            continue
        # The nearest element depends on how halves round; runtimes compute in single precision.
        kind = np.float32 if mode == "nearest" else np.float64
        bounds = (roi[i], roi[i + len(axes)])
        where = positions(coordinates, size, new, kind(scale), bounds).astype(np.float64)
        if mode == "nearest":
            index = np.clip(ROUNDING[rounding](where), 0, size - 1).astype(int)
            x = repeat(x, index, axis)
        else:
            kernel, support = (
                (hat, 1)
                if mode.endswith("linear")
                else (
                    cubic(node.get("cubic_coeff_a", -0.75)),
                    2,
                )
            )
            stretch = min(scale, 1.0) if node.get("antialias", 0) else 1.0
            outside = bool(node.get("exclude_outside", 0))
            matrix = interpolation_matrix(where, size, kernel, support, stretch, outside)
            x = apply_matrix(x, matrix, axis)
        if coordinates == "tf_crop_and_resize":
            beyond = (where < 0) | (where > size - 1)
            if beyond.any():
                fill = like(x, node.get("extrapolation_value", 0.0))
                shape = [-1 if j == axis else 1 for j in range(x.ndim)]
                mask = jnp.broadcast_to(beyond.reshape(shape), x.shape)
                x = lax.select(mask, lax.full_like(x, fill), x)
    if x.dtype != dtype:
        x = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN).astype(dtype)
    return x


def resize(
    node: Node,
    x: Value,
    roi: Value | None = None,
    scales: Value | None = None,
    sizes: Value | None = None,
) -> Array:
    x = device(x)
    if node.opset < 11:
        return upsample(node, x, roi)
    axes = [axis_of(axis, x.ndim) for axis in node.get("axes", tuple(range(x.ndim)))]
    new, factors = new_sizes(node, x, axes, scales, sizes)
    coordinates = node.get("coordinate_transformation_mode", "half_pixel")
    bounds = np.concatenate([np.zeros(len(axes)), np.ones(len(axes))])
    if coordinates == "tf_crop_and_resize":
        if roi is None:
            raise OnnxError("tf_crop_and_resize needs roi")
        bounds = node.host(roi, "roi").reshape(-1).astype(np.float64)
    rounding = node.get("nearest_mode", "round_prefer_floor")
    return resize_axes(node, x, axes, new, factors, bounds, coordinates, rounding)


def upsample(node: Node, x: Value, scales: Value | None = None) -> Array:
    """Resize with coordinates y / scale, rounded down (also Resize of opset 10)."""
    x = device(x)
    if scales is None:
        factors = [float(v) for v in node.attributes["scales"]]
    else:
        factors = [float(v) for v in node.host(scales, "scales").reshape(-1)]
    axes = list(range(x.ndim))
    sizes = [math.floor(n * s) for n, s in zip(x.shape, factors, strict=True)]
    roi = np.zeros(2 * x.ndim)
    return resize_axes(node, x, axes, sizes, factors, roi, "asymmetric", "floor")


TRANSLATIONS: dict[str, Translation] = {"Resize": resize, "Upsample": upsample}
