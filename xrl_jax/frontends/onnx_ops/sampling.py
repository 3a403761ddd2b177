"""Operators of ONNX that sample images between pixels: GridSample, RoiAlign, DeformConv."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.frontends.onnx_ops.base import Array, Node, like, on_device, select
from xrl_jax.frontends.onnx_ops.convolution import add_bias, steps
from xrl_jax.frontends.onnx_ops.indexing import gather_points, wrap
from xrl_jax.frontends.onnx_ops.shape import gather_axis


def pixels(x: Array, places: Sequence[Array]) -> Array:
    """Return x [N, C, ...] at integer positions, one array [N, *P] per axis, as [N, C, *P]."""
    last = jnp.moveaxis(x, 1, -1)
    found = gather_points(last, jnp.stack(places, axis=-1), batch=1)
    return jnp.moveaxis(found, -1, 1)


def reflect(x: Array, low: float, high: float) -> Array:
    """Reflect positions at low and high until they are in [low, high]."""
    if high <= low:
        return lax.full_like(x, low)
    width = like(x, high - low)
    distance = lax.abs(x - like(x, low))
    turns = lax.floor(distance / width)
    rest = distance - turns * width
    odd = lax.rem(turns, like(x, 2)) != like(x, 0)
    return select(odd, like(x, high) - rest, like(x, low) + rest)


def cubic_weights(t: Array) -> list[Array]:
    """Return the weights of Keys' kernel (a = -0.75) at the taps -1, 0, 1, 2 for a fraction t."""
    a = -0.75

    def near(d: Array) -> Array:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Array) -> Array:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def interpolate(
    x: Array,
    where: Sequence[Array],
    mode: str = "linear",
    padding: str = "zeros",
    borders: Sequence[tuple[float, float]] = (),
) -> Array:
    """Interpolate x [N, C, ...] at positions, one array [N, *P] per axis.

    `padding` is as in GridSample; `borders` are the limits of reflection per axis.
    """
    sizes = x.shape[2:]
    if mode == "nearest":
        where = [lax.round(w, lax.RoundingMethod.TO_NEAREST_EVEN) for w in where]
    if padding == "border":
        where = [
            lax.clamp(like(w, 0), w, like(w, n - 1)) for w, n in zip(where, sizes, strict=True)
        ]
    elif padding == "reflection":
        where = [reflect(w, *border) for w, border in zip(where, borders, strict=True)]
    bases = [lax.floor(w) for w in where]
    fractions = [w - base for w, base in zip(where, bases, strict=True)]
    if mode == "nearest":
        first, weights = 0, [[lax.full_like(f, 1)] for f in fractions]
    elif mode == "linear":
        first, weights = 0, [[1 - f, f] for f in fractions]
    else:
        first, weights = -1, [cubic_weights(f) for f in fractions]
    total = None
    for taps in itertools.product(range(len(weights[0])), repeat=len(sizes)):
        weight, places = None, []
        for axis, tap in enumerate(taps):
            size = sizes[axis]
            position = bases[axis] + like(bases[axis], first + tap)
            factor = weights[axis][tap]
            if padding == "reflection":
                position = reflect(position, *borders[axis])
            elif padding == "zeros":
                inside = (position >= like(position, 0)) & (position <= like(position, size - 1))
                factor = lax.select(inside, factor, lax.full_like(factor, 0))
            position = lax.clamp(like(position, 0), position, like(position, size - 1))
            places.append(lax.convert_element_type(position, np.int32))
            weight = factor if weight is None else weight * factor
        assert weight is not None
        term = pixels(x, places) * lax.expand_dims(weight, (1,)).astype(x.dtype)
        total = term if total is None else total + term
    assert total is not None
    return total


def grid_sample(node: Node, x: Array, grid: Array) -> Array:
    """Sample x [N, C, ...] at a grid [N, *P, D] of positions in [-1, 1], last axis first."""
    corners = bool(node.get("align_corners", 0))
    where, borders = [], []
    for axis, size in enumerate(x.shape[2:]):
        part = grid[..., grid.shape[-1] - 1 - axis] + like(grid, 1)
        if corners:
            where.append(part * like(grid, (size - 1) / 2))
            borders.append((0.0, size - 1.0))
        else:
            where.append((part * like(grid, size) - like(grid, 1)) * like(grid, 0.5))
            borders.append((-0.5, size - 0.5))
    mode = node.get("mode", "linear").removeprefix("bi")
    return interpolate(x, where, mode, node.get("padding_mode", "zeros"), borders)


def roi_align(node: Node, x: Array, rois: Array, batch: Array) -> Array:
    """Return the average or maximum of bilinear samples per bin of each region [x1, y1, x2, y2]."""
    ratio = node.get("sampling_ratio", 0)
    if ratio <= 0:
        raise node.unsupported("sampling_ratio=0 (a number of samples that depends on data)")
    rows, columns = node.get("output_height", 1), node.get("output_width", 1)
    old = node.opset < 16
    half = not old and node.get("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    scale, offset = like(x, node.get("spatial_scale", 1.0)), like(x, 0.5 if half else 0)
    corners = [rois[:, i] * scale - offset for i in range(4)]
    axes = []
    for low, high, bins in ((corners[1], corners[3], rows), (corners[0], corners[2], columns)):
        extent = high - low if half else lax.max(high - low, like(x, 1))
        steps = (np.arange(bins * ratio) + 0.5) / ratio
        step = lax.expand_dims(extent / like(x, bins), (1,))
        axes.append(lax.expand_dims(low, (1,)) + step * steps.astype(x.dtype))
    count = rois.shape[0]
    shape = (count, rows * ratio, columns * ratio)
    images = gather_axis(x, wrap(batch, x.shape[0]), 0)  # one per region
    weights, places = [], []
    for i, position in enumerate(axes):
        size = x.shape[i + 2]
        outside = (position < like(x, -1)) | (position > like(x, size))
        position = lax.clamp(like(x, 0), position, like(x, size - 1))
        low = lax.min(lax.floor(position), like(x, max(size - 2, 0)))
        fraction = position - low
        live = lax.select(outside, lax.full_like(position, 0), lax.full_like(position, 1))
        spread = [(1 - fraction) * live, fraction * live]
        index = lax.convert_element_type(low, np.int32)
        nexts = lax.min(index + np.int32(1), np.int32(size - 1))
        keep = (0, i + 1)
        weights.append([lax.broadcast_in_dim(w, shape, keep) for w in spread])
        places.append([lax.broadcast_in_dim(p, shape, keep) for p in (index, nexts)])
    terms = []
    for i, j in itertools.product(range(2), repeat=2):
        weight = lax.expand_dims(weights[0][i] * weights[1][j], (1,))
        terms.append(pixels(images, [places[0][i], places[1][j]]) * weight)
    binned = (count, x.shape[1], rows, ratio, columns, ratio)
    if node.get("mode", "avg") == "max":
        best = lax.max(lax.max(terms[0], terms[1]), lax.max(terms[2], terms[3]))
        return jnp.max(jnp.reshape(best, binned), axis=(3, 5))
    return jnp.mean(jnp.reshape(terms[0] + terms[1] + terms[2] + terms[3], binned), axis=(3, 5))


def deform_conv(
    node: Node,
    x: Array,
    kernel: Array,
    offset: Array,
    bias: Array | None = None,
    mask: Array | None = None,
) -> Array:
    """Convolve, with taps moved by `offset` and weighted by `mask`, which are both inputs."""
    size = kernel.shape[2:]
    spatial, taps = len(size), math.prod(size)
    strides, dilations = steps(node, spatial)
    pads = node.get("pads", (0,) * (2 * spatial))
    sets, groups = node.get("offset_group", 1), node.get("group", 1)
    batch, channels = x.shape[:2]
    out = offset.shape[2:]
    offset = jnp.reshape(offset, (batch * sets, taps, spatial, *out))
    places = list(np.ndindex(*size))
    where = []
    for axis in range(spatial):
        start = np.arange(out[axis]) * strides[axis] - pads[axis]
        start = start.reshape([-1 if i == axis else 1 for i in range(spatial)])
        tap = np.array([place[axis] * dilations[axis] for place in places])
        grid = tap.reshape(-1, *(1,) * spatial) + start
        where.append(offset[:, :, axis] + grid.astype(x.dtype))
    # The channels of a set share their offsets, so sets become batch entries.
    split = jnp.reshape(x, (batch * sets, channels // sets, *x.shape[2:]))
    found = interpolate(split, where)
    if mask is not None:
        found = found * jnp.reshape(mask, (batch * sets, 1, taps, *out))
    found = jnp.reshape(found, (batch, groups, channels // groups * taps, -1))
    weights = jnp.reshape(kernel, (groups, kernel.shape[0] // groups, -1))
    result = lax.dot_general(found, weights, (((2,), (2,)), ((1,), (0,))))
    result = lax.transpose(result, (1, 0, 3, 2))
    return add_bias(jnp.reshape(result, (batch, kernel.shape[0], *out)), bias)


TRANSLATIONS = on_device(
    {
        "DeformConv": deform_conv,
        "GridSample": grid_sample,
        "RoiAlign": roi_align,
    }
)
