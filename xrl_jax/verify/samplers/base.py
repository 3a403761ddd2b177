"""The interface between samplers of random operators and the graph that is being drawn."""

from __future__ import annotations

import abc
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from xrl_jax.graph.graph import Node
from xrl_jax.graph.ops import OpSpec
from xrl_jax.language.rule import Pattern, Var

Want = tuple[int | None, ...] | None
Drawn = tuple[list[int], dict[str, Any]]


class Rejected(Exception):  # noqa: N818 - not an error: this proposal does not fit
    """A draw cannot be completed and is discarded."""


class Drawing(abc.ABC):
    """A graph that is being drawn; samplers use it to draw numbers and arguments of nodes.

    Attributes:
      dtypes: dtypes to choose from; one listed twice is chosen twice as often.
      sizes: sizes of dimensions to choose from.
      zero: whether dimensions of size 0 are drawn.
      most: maximal rank of new shapes.
      features: numbers of features of convolutions to choose from.
      bound: node indices by the variables that stand for them.
    """

    dtypes: tuple[str, ...] = ("float32",)
    sizes: tuple[int, ...] = (1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4, 5, 5)
    most = 4
    features: tuple[int, ...] = (1, 2)

    def __init__(self, rng: np.random.Generator, *, zero: bool = False) -> None:
        self.rng = rng
        self.zero = zero
        self.nodes: list[Node] = []
        self.bound: dict[str, int] = {}

    @abc.abstractmethod
    def make(self, p: Pattern | Var, want: Want, dtype: str) -> int:
        """Return the index of a node drawn for a pattern, or of the node of a variable.

        Raises:
          Rejected: this draw does not fit.
        """

    # --- small draws ---

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def number(self, low: int, high: int) -> int:
        """Draw an integer between low and high, inclusive."""
        return int(self.rng.integers(low, high + 1))

    def size(self) -> int:
        if self.zero and self.chance(0.2):
            return 0
        return int(self.rng.choice(self.sizes))

    def shape(self, low: int = 0, high: int | None = None) -> tuple[int, ...]:
        most = self.most if high is None else high
        rank = self.number(low, most)
        if rank == 0 and self.chance(0.7):
            rank = min(2, most)
        return tuple(self.size() for _ in range(rank))

    def fill(self, want: Sequence[int | None]) -> tuple[int, ...]:
        return tuple(self.size() if d is None else d for d in want)

    def dtype_among(self, dtypes: Collection[str]) -> str:
        choices = [d for d in self.dtypes if d in dtypes] or sorted({"bool"}.intersection(dtypes))
        if not choices:
            raise Rejected
        return str(self.rng.choice(choices))

    # --- known nodes ---

    def known(self, p: Pattern | Var) -> bool:
        """Return whether the argument determines a shape (a pattern or a bound variable)."""
        return isinstance(p, Pattern) or p.name in self.bound

    def shape_of(self, index: int) -> tuple[int, ...]:
        return self.nodes[index].shape

    # --- for subclasses to override ---

    def rank_of(self, p: Pattern | Var) -> int | None:
        """Return the rank that an argument must have; None if it is unknown."""
        return None

    def is_value(self, p: Pattern | Var) -> bool:
        """Return whether an argument has to be a scalar constant."""
        return False


def permutation(m: Drawing, rank: int) -> tuple[int, ...]:
    return tuple(int(i) for i in m.rng.permutation(rank))


def subset(m: Drawing, rank: int, k: int) -> tuple[int, ...]:
    return tuple(sorted(int(i) for i in m.rng.choice(rank, size=k, replace=False)))


def argument_dtypes(m: Drawing, spec: OpSpec, n_args: int, dtype: str) -> list[str]:
    """Return dtypes of arguments for which the result has `dtype`."""
    if spec.dtype == "bool" and dtype != "bool":
        raise Rejected
    shared = m.dtype_among(spec.dtypes_of(0)) if spec.dtype in ("bool", "attr") else dtype
    takes = [spec.dtypes_of(i) for i in range(n_args)]
    return [shared if shared in t else m.dtype_among(t) for t in takes]
