"""Operators of a library call that move elements, or read them in another type."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import lax

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Reshape:
    shape: Shape

    def __call__(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.shape)


@dataclass(frozen=True)
class Repeat:
    """Broadcast along axes of size 1."""

    shape: Shape

    def __call__(self, x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, self.shape, tuple(range(x.ndim)))


@dataclass(frozen=True)
class Transpose:
    order: Shape

    def __call__(self, x: jax.Array) -> jax.Array:
        return lax.transpose(x, self.order)


@dataclass(frozen=True)
class Slice:
    """Every `step`-th element along each axis, from `start` to before `stop`."""

    start: Shape
    stop: Shape
    step: Shape

    @property
    def sizes(self) -> Shape:
        """The shape of the result."""
        bounds = zip(self.start, self.stop, self.step, strict=True)
        return tuple(len(range(*each)) for each in bounds)

    def __call__(self, x: jax.Array) -> jax.Array:
        return lax.slice(x, self.start, self.stop, self.step)


@dataclass(frozen=True)
class Widen:
    """An adjacent slice of an input in a narrow type, in float32; at least one whole vector."""

    dtype: str
    part: Slice

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.part(x).astype(jax.numpy.float32)
