"""Searches by name. A search is a `base.Strategy`; adding one is a module and an entry here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType

import jax

from xrl_jax.search.backtracking import taso
from xrl_jax.search.base import Budget, Problem, SearchResult, Strategy, without_engine
from xrl_jax.search.greedy import greedy, local
from xrl_jax.search.random import random


@without_engine
def xrlflow(problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
    """See `rl.strategy.xrlflow`; imported late, because Flax takes a second."""
    from xrl_jax.rl import strategy

    return strategy.xrlflow(problem, budget, key)


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {"random": random, "local": local, "greedy": greedy, "taso": taso, "xrlflow": xrlflow}
)


def find_strategy(search: str | Strategy) -> Strategy:
    """The strategy of that name, or the strategy itself.

    Raises:
      ValueError: there is none of that name; the message has the nearest.
    """
    if not isinstance(search, str):
        return search
    if search not in STRATEGIES:
        near = difflib.get_close_matches(search, STRATEGIES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"there is no search {search!r} (there are: {', '.join(STRATEGIES)}){hint}"
        )
    return STRATEGIES[search]
