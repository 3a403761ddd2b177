"""Pooling operators of ONNX as reduce_window, in NC... layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import (
    Array,
    Node,
    Translation,
    Value,
    canonical,
    device,
    is_float,
    like,
    on_device,
)
from xrl_jax.frontends.onnx_ops.convolution import Pads, dilated, steps, window_pads


class Window:
    """The window of a pooling node over an input: sizes, strides, pads, and room for ceil_mode.

    `pads` are those that the model specifies. `room` is the number of positions per axis beyond
    them into which the last window reaches when the output size is rounded up.
    """

    def __init__(self, node: Node, size: Sequence[int]) -> None:
        spatial = len(size)
        self.kernel = tuple(node.attributes["kernel_shape"])
        self.strides, self.dilations = map(tuple, steps(node, spatial))
        reach = dilated(self.kernel, self.dilations)
        self.pads: Pads = window_pads(node, size, reach, self.strides)
        self.room = [0] * spatial
        if node.get("ceil_mode", 0):
            for i, (n, k, s) in enumerate(zip(size, reach, self.strides, strict=True)):
                low, high = self.pads[i]
                last = -(-(n + low + high - k) // s) * s
                # A window that would start in the end padding is left out.
                last -= s if last >= n + low else 0
                self.room[i] = max(last + k - (n + low + high), 0)

    def reduce(self, x: Any, start: Any, combine: Callable[..., Any]) -> Any:
        """Apply reduce_window over the spatial axes of one or more arrays, with pads and room."""
        pads = [(a, b + r) for (a, b), r in zip(self.pads, self.room, strict=True)]
        return lax.reduce_window(
            x,
            start,
            combine,
            (1, 1, *self.kernel),
            (1, 1, *self.strides),
            [(0, 0), (0, 0), *pads],
            window_dilation=(1, 1, *self.dilations),
        )


def lowest(x: Array) -> Any:
    return like(x, -np.inf if is_float(x) else np.iinfo(x.dtype).min)


def max_pool(node: Node, x: Array) -> Array | tuple[Array, Array]:
    window = Window(node, x.shape[2:])
    result = window.reduce(x, lowest(x), lax.max)
    if len(node.outputs) < 2 or not node.outputs[1]:
        return result
    return result, max_positions(node, x, window)


def max_positions(node: Node, x: Array, window: Window) -> Array:
    """Return the flat index in the whole tensor of each window's first maximum."""
    dtype = canonical(np.int64)
    spatial = x.shape[2:]
    order = "F" if node.get("storage_order", 0) else "C"
    images = np.arange(np.prod(x.shape[:2])).reshape(*x.shape[:2], *(1,) * len(spatial))
    inner = np.arange(np.prod(spatial)).reshape(spatial, order=order)
    index = images * np.prod(spatial) + inner
    index = jnp.asarray(index.astype(dtype))

    def better(one, two):
        larger = lax.bitwise_or(
            lax.gt(one[0], two[0]),
            lax.bitwise_and(lax.eq(one[0], two[0]), lax.lt(one[1], two[1])),
        )
        return lax.select(larger, one[0], two[0]), lax.select(larger, one[1], two[1])

    end = dtype.type(np.iinfo(dtype).max)
    return window.reduce((x, index), (lowest(x), end), better)[1]


def average_pool(node: Node, x: Array) -> Array:
    window = Window(node, x.shape[2:])
    total = window.reduce(x, like(x, 0), lax.add)
    counts = window_counts(node, window, x.shape[2:])
    if (counts == counts.flat[0]).all():
        return total / like(x, counts.flat[0])
    return total / counts.astype(x.dtype)


def window_counts(node: Node, window: Window, size: Sequence[int]) -> np.ndarray:
    """Return how many positions each window averages over, [1, 1, ...]; room never counts."""
    result = np.ones((1, 1) + (1,) * len(size), np.int64)
    padded = bool(node.get("count_include_pad", 0))
    for i, n in enumerate(size):
        low, high = window.pads[i]
        k, s, d = window.kernel[i], window.strides[i], window.dilations[i]
        starts = np.arange(0, n + low + high + window.room[i] - (k - 1) * d, s)
        places = starts[:, None] + np.arange(k) * d
        valid = places < n + low + high if padded else (places >= low) & (places < n + low)
        shape = [1] * result.ndim
        shape[i + 2] = -1
        result = result * valid.sum(axis=1).reshape(shape)
    return result


def lp_pool(node: Node, x: Array) -> Array:
    p = node.get("p", 2)
    window = Window(node, x.shape[2:])
    powers = lax.integer_pow(lax.abs(x), int(p))
    return lax.pow(window.reduce(powers, like(x, 0), lax.add), like(x, 1 / p))


def over_image(reduce: Callable[..., Array]) -> Callable[[Node, Array], Array]:
    """Return a reduction over all spatial axes, which are kept with size 1."""
    return lambda node, x: reduce(x, axis=tuple(range(2, x.ndim)), keepdims=True)


def global_lp_pool(node: Node, x: Array) -> Array:
    p = node.get("p", 2)
    total = over_image(jnp.sum)(node, lax.integer_pow(lax.abs(x), int(p)))
    return lax.pow(total, like(x, 1 / p))


def max_unpool(node: Node, x: Value, index: Value, shape: Value | None = None) -> Array:
    """Scatter values to the indices that MaxPool returned (flat, over the whole tensor)."""
    x, index = device(x), device(index)
    kernel = node.attributes["kernel_shape"]
    strides = node.get("strides", (1,) * len(kernel))
    pads = node.get("pads", (0,) * (2 * len(kernel)))
    inferred = [
        (n - 1) * s + k - pads[i] - pads[i + len(kernel)]
        for i, (n, s, k) in enumerate(zip(x.shape[2:], strides, kernel, strict=True))
    ]
    natural = (*x.shape[:2], *inferred)
    target = natural if shape is None else node.ints(shape, "output_shape")
    flat = jnp.reshape(index, (-1,))
    if tuple(target) != natural:
        # Indices refer to the inferred shape; convert them to the target shape.
        parts = jnp.unravel_index(flat, natural)
        flat = jnp.ravel_multi_index(parts, target, mode="clip")
    empty = jnp.zeros(int(np.prod(target)), x.dtype)
    filled = empty.at[flat].set(jnp.reshape(x, (-1,)))
    return jnp.reshape(filled, target)


TRANSLATIONS: dict[str, Translation] = {
    **on_device(
        {
            "AveragePool": average_pool,
            "GlobalAveragePool": over_image(jnp.mean),
            "GlobalLpPool": global_lp_pool,
            "GlobalMaxPool": over_image(jnp.max),
            "LpPool": lp_pool,
            "MaxPool": max_pool,
        }
    ),
    "MaxUnpool": max_unpool,
}
