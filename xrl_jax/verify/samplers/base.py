"""What samplers of random operators are asked for, and what they ask."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np

from xrl_jax.graph.graph import Node
from xrl_jax.graph.ops import OpSpec
from xrl_jax.language.rule import Pattern, Var

Want = tuple[int | None, ...] | None
Made = tuple[list[int], dict[str, Any]]


class Rejected(Exception):  # noqa: N818 - not an error: this proposal does not fit
    """A draw that leads nowhere."""


class Drawing(Protocol):
    """A graph that is being drawn: the source of random numbers, and of arguments."""

    rng: np.random.Generator
    nodes: list[Node]
    bound: dict[str, int]  # by variable
    zero: bool
    most: int  # dimensions
    features: tuple[int, ...]  # of convolutions, to choose from

    def chance(self, p: float) -> bool: ...
    def number(self, low: int, high: int) -> int: ...
    def size(self) -> int: ...
    def shape(self, low: int = 0, high: int | None = None) -> tuple[int, ...]: ...
    def fill(self, want: Sequence[int | None]) -> tuple[int, ...]: ...
    def dtype_among(self, dtypes: Collection[str]) -> str: ...
    def make(self, p: Pattern | Var, want: Want, dtype: str) -> int: ...
    def known(self, p: Pattern | Var) -> bool: ...
    def rank_of(self, p: Pattern | Var) -> int | None: ...
    def is_value(self, p: Pattern | Var) -> bool: ...
    def shape_of(self, index: int) -> tuple[int, ...]: ...


def permutation(m: Drawing, rank: int) -> tuple[int, ...]:
    return tuple(int(i) for i in m.rng.permutation(rank))


def subset(m: Drawing, rank: int, k: int) -> tuple[int, ...]:
    return tuple(sorted(int(i) for i in m.rng.choice(rank, size=k, replace=False)))


def argument_dtypes(m: Drawing, spec: OpSpec, n_args: int, dtype: str) -> list[str]:
    """Dtypes of arguments that give a result of `dtype`."""
    if spec.dtype == "bool" and dtype != "bool":
        raise Rejected
    shared = m.dtype_among(spec.dtypes_of(0)) if spec.dtype in ("bool", "attr") else dtype
    takes = [spec.dtypes_of(i) for i in range(n_args)]
    return [shared if shared in t else m.dtype_among(t) for t in takes]
