"""Winograd convolution: fewer products, between transforms of tiles of the image and the result.

A tile of m x m results of an r x r kernel needs (m + r - 1)^2 products for each pair of features
instead of m^2 r^2:

    Y = A^T [(G g G^T) * (B^T d B)] A

with d a tile of the image, g the kernel, and * elementwise. Over all features, there is one matrix
product for each element of a tile. The kernel is transformed only once if it is a weight.

Source: Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016; the matrices
are those of Toom and Cook for interpolation at given points (Barabasz et al., "Error Analysis and
Improving the Accuracy of Winograd Convolution for Deep Neural Networks", ACM TOMS 46, 2020, which
has points of small errors).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

KERNEL = 3  # r
# The finite points: one fewer than a tile has elements along an axis, as the last is infinity.
_POINTS = {
    2: ("0", "1", "-1"),
    3: ("0", "1", "-1/2", "-2"),
    4: ("0", "3/4", "-3/4", "3/2", "-3/2"),
}
TILES = tuple(_POINTS)  # m


class Matrices(NamedTuple):
    """The transform matrices of one axis, as tuples of rows; a = m + r - 1."""

    image: tuple[tuple[float, ...], ...]  # B^T [a, a]
    kernel: tuple[tuple[float, ...], ...]  # G [a, r]
    result: tuple[tuple[float, ...], ...]  # A^T [m, a]


def _product(polynomials: Sequence[Sequence[Fraction]]) -> list[Fraction]:
    """Return the coefficients of a product of polynomials, the constant term first."""
    total = [Fraction(1)]
    for p in polynomials:
        new = [Fraction(0)] * (len(total) + len(p) - 1)
        for i, a in enumerate(total):
            for j, b in enumerate(p):
                new[i + j] += a * b
        total = new
    return total


@functools.cache
def matrices(m: int) -> Matrices:
    """Return the transform matrices for tiles of m results along an axis, m in `TILES`."""
    points = [Fraction(p) for p in _POINTS[m]]
    r = KERNEL
    others = [[q for q in points if q != p] for p in points]
    # Lagrange polynomials without their denominators, which are moved to the kernel's matrix.
    rows = [[*_product([[-q, Fraction(1)] for q in each]), Fraction(0)] for each in others]
    rows.append(_product([[-q, Fraction(1)] for q in points]))
    scale = [Fraction(1)] * len(points)
    for i, (p, each) in enumerate(zip(points, others, strict=True)):
        for q in each:
            scale[i] /= p - q
    kernel = [[s * p**k for k in range(r)] for p, s in zip(points, scale, strict=True)]
    kernel.append([Fraction(k == r - 1) for k in range(r)])
    result = [[p**i for p in points] + [Fraction(i == m - 1)] for i in range(m)]

    def plain(matrix: Sequence[Sequence[Fraction]]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(float(x) for x in row) for row in matrix)

    return Matrices(plain(rows), plain(kernel), plain(result))


def n_tiles(size: int, padding: tuple[int, int], m: int) -> int:
    """Return the number of tiles along an axis of the image; the last may extend past its end."""
    return -(-(size + sum(padding) - KERNEL + 1) // m)


def transformed(w: jax.Array, m: int) -> jax.Array:
    """Transform a kernel [O, C, r, r] to [a * a, C, O], as the products take it."""
    g = jnp.asarray(matrices(m).kernel, w.dtype)
    y = jnp.einsum("ik,jl,ockl->ijco", g, g, w, precision=lax.Precision.HIGHEST)
    return y.reshape(-1, *y.shape[2:])


def convolved(
    x: jax.Array, w: jax.Array, m: int, padding: Sequence[tuple[int, int]], precision: Any = None
) -> jax.Array:
    """Convolve images [N, H, W, C] with a kernel from `transformed`; return [N, H', W', O].

    Args:
      padding: (low, high) of either axis of the image, none negative.
    """
    n, *image, c = x.shape
    a, o = m + KERNEL - 1, w.shape[2]
    tiles = [n_tiles(size, p, m) for size, p in zip(image, padding, strict=True)]
    config = [(0, 0, 0)]
    for size, (low, _), t in zip(image, padding, tiles, strict=True):
        config.append((low, t * m + KERNEL - 1 - low - size, 0))
    x = lax.pad(x, jnp.zeros((), x.dtype), [*config, (0, 0, 0)])

    def tiled(part: jax.Array, axis: int) -> list[jax.Array]:
        span = (tiles[axis - 1] - 1) * m + 1
        each = [lax.slice_in_dim(part, i, i + span, m, axis) for i in range(a)]
        return _sums(matrices(m).image, each)

    parts = [column.reshape(-1, c) for row in tiled(x, 1) for column in tiled(row, 2)]
    y = lax.dot_general(jnp.stack(parts), w, (((2,), (1,)), ((0,), (0,))), precision=precision)
    rows = list(y.reshape(a, a, n, *tiles, o))
    columns = [_sums(matrices(m).result, list(row)) for row in _sums(matrices(m).result, rows)]
    y = jnp.stack([jnp.stack(row, axis=3) for row in columns], axis=2)
    y = y.reshape(n, tiles[0] * m, tiles[1] * m, o)
    height, width = (size + sum(p) - KERNEL + 1 for size, p in zip(image, padding, strict=True))
    return y[:, :height, :width]


def _sums(matrix: Sequence[Sequence[float]], terms: Sequence[jax.Array]) -> list[jax.Array]:
    """Multiply the matrix by a column of arrays."""
    found = []
    for row in matrix:
        total = None
        for factor, term in zip(row, terms, strict=True):
            if not factor:
                continue
            term = term if factor == 1 else term * jnp.asarray(factor, term.dtype)
            total = term if total is None else total + term
        assert total is not None
        found.append(total)
    return found
