"""What makers of operators have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xrl_jax.verify.instances import Maker

Want = tuple[int | None, ...] | None
Made = tuple[list[int], dict[str, Any]]


class Rejected(Exception):  # noqa: N818 - not an error: this proposal does not fit
    """A draw that leads nowhere."""


def permutation(m: Maker, rank: int) -> tuple[int, ...]:
    return tuple(int(i) for i in m.rng.permutation(rank))


def subset(m: Maker, rank: int, k: int) -> tuple[int, ...]:
    return tuple(sorted(int(i) for i in m.rng.choice(rank, size=k, replace=False)))
