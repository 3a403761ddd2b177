"""Families of graphs in which greedy search gets stuck, with optima known by exhaustive search.

A member of a family is a chain of blocks, separated by sines that no rule of the family touches, so
that rewrites of one block do not affect the next: the states of a member are all combinations of
the states of its blocks, and its least cost is the sum of theirs (a test visits all states of a
member, too). A block is small enough for all of its states to be visited. The time of each is
measured, and whether a block is a trap depends on the machine: some of the sizes below are traps,
and others gain at once or not at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.frontends.jaxpr import from_jax
from xrl_jax.language.rule_files import all_rules
from xrl_jax.language.table import CompiledRules, compile_rules
from xrl_jax.program.program import Program

Size = tuple[int, ...]
Weights = Sequence[jax.Array]


@dataclass(frozen=True)
class Family:
    """A kind of trap.

    Attributes:
      why: the loss that a search has to accept, and the gain that follows.
      rules: names of all rules that may be used. None is symmetric: otherwise the slots of two
        roots would decide their order, and with it the later rewrites, and a member would have
        states that its blocks do not have.
      shape: shape of the value passed from block to block.
      weights: size of a block -> shapes of its weights.
      block: function of a value and a block's weights; its result has the value's shape.
      sizes: sizes of the blocks of members for training.
      unseen: sizes of blocks that only members for evaluation have.
    """

    why: str
    rules: tuple[str, ...]
    shape: Size
    weights: Callable[[Size], Sequence[Size]]
    block: Callable[[jax.Array, Weights], jax.Array]
    sizes: tuple[Size, ...]
    unseen: tuple[Size, ...]

    def compiled(self) -> CompiledRules:
        """Return the rules as a table."""
        by_name = {rule.name: rule for rule in all_rules()}
        return compile_rules([by_name[name] for name in self.rules])


def _conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")


_IMAGE = (1, 32, 28, 28)


def _convolutions(x: jax.Array, weights: Weights) -> jax.Array:
    *first, last = weights
    for w in first:
        x = jax.nn.relu(_conv(x, w))
    return _conv(x, last)


def _kernels(size: Size) -> Sequence[Size]:
    width, kernel, n = size
    channels = [_IMAGE[1], *[width] * (n - 1), _IMAGE[1]]
    return [(o, i, kernel, kernel) for i, o in itertools.pairwise(channels)]


def _fire(x: jax.Array, weights: Weights) -> jax.Array:
    small, large = (jax.nn.relu(_conv(x, w)) for w in weights)
    return jnp.concatenate([small, large], axis=1)


def _fire_kernels(size: Size) -> Sequence[Size]:
    (narrow,) = size
    features = _IMAGE[1]
    return [(narrow, features, 1, 1), (features - narrow, features, 3, 3)]


_TOKENS = (128, 256)


def _adapter(x: jax.Array, weights: Weights) -> jax.Array:
    a, b, *w = weights
    return x @ w[0] + (x @ a) @ b if w else (x @ a) @ b


def _adapter_matrices(size: Size) -> Sequence[Size]:
    rank, beside = size
    features = _TOKENS[1]
    low_rank = [(features, rank), (rank, features)]
    return [*low_rank, (features, features)] if beside else low_rank


def _widened(x: jax.Array, weights: Weights) -> jax.Array:
    a, w = weights
    return jnp.concatenate([x, x @ a], axis=1) @ w


def _widening_matrices(size: Size) -> Sequence[Size]:
    (rank,) = size
    features = _TOKENS[1]
    return [(features, rank), (features + rank, features)]


FAMILIES: Mapping[str, Family] = {
    "layout": Family(
        "a convolution in layout NHWC costs two transposes; those between neighbours cancel",
        ("conv-to-nhwc", "transpose-transpose", "transpose-away", "max-pull-transpose-scalar"),
        _IMAGE,
        _kernels,
        _convolutions,
        tuple((width, k, n) for width in (16, 32, 48, 64, 96) for k in (1, 3) for n in (2, 3)),
        tuple((width, k, n) for width in (24, 80) for k in (1, 3) for n in (2, 3)),
    ),
    "merge": Family(
        "a 1x1 kernel enlarged to 3x3 costs nine times as much; it then merges with its neighbour",
        ("enlarge-pointwise", "concat-of-relus", "concat-of-convs"),
        _IMAGE,
        _fire_kernels,
        _fire,
        ((1,), (2,), (4,), (5,), (7,), (8,), (9,), (10,), (11,), (13,), (14,), (16,)),
        ((3,), (6,), (12,)),
    ),
    "adapter": Family(
        "a low-rank product multiplied out costs more; it then merges with the weight beside it",
        ("dot-assoc-right", "dot-factor-left"),
        _TOKENS,
        _adapter_matrices,
        _adapter,
        tuple((rank, beside) for rank in (4, 16, 64) for beside in (0, 1)),
        tuple((rank, beside) for rank in (8, 32) for beside in (0, 1)),
    ),
    "split": Family(
        "a product of a concatenation split in two costs more; one part then folds into the other",
        ("dot-of-concat", "dot-assoc-right", "dot-factor-left"),
        _TOKENS,
        _widening_matrices,
        _widened,
        ((4,), (16,), (64,), (128,)),
        ((8,), (32,)),
    ),
}


def member(family: Family, sizes: Sequence[Size]) -> Program:
    """Return the chain of blocks of these sizes, with a sine before, between and after them."""
    shapes = [family.weights(size) for size in sizes]
    rng = np.random.default_rng(0)  # not JAX's, which is compiled for each shape

    def normal(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    weights = [[normal(s) / np.sqrt(np.prod(s[1:])) for s in of] for of in shapes]

    def chain(x: jax.Array, weights: Sequence[Weights]) -> jax.Array:
        x = jnp.sin(x)
        for of in weights:
            x = jnp.sin(family.block(x, of))
        return x

    return from_jax(chain, normal(family.shape), weights, weights=(1,), fold=False)


class Members(NamedTuple):
    """Sizes of members' blocks: for training, and unseen members of up to twice as many blocks."""

    training: list[tuple[Size, ...]]
    unseen: list[tuple[Size, ...]]


def draw_members(family: Family, *, training: int, unseen: int, blocks: int, seed: int) -> Members:
    """Draw members: `training` ones of `blocks` / 2 to `blocks` blocks, and `unseen` ones of
    `blocks` to twice as many, of all sizes.
    """
    rng = np.random.default_rng(seed)

    def some(sizes: Sequence[Size], low: int, high: int) -> tuple[Size, ...]:
        chosen = rng.integers(len(sizes), size=rng.integers(low, high + 1))
        return tuple(sizes[i] for i in chosen)

    half, everything = max(blocks // 2, 1), (*family.sizes, *family.unseen)
    return Members(
        [some(family.sizes, half, blocks) for _ in range(training)],
        [some(everything, blocks, 2 * blocks) for _ in range(unseen)],
    )
