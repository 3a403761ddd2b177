"""Searches by name.

A search is a `search.base.Strategy`. To add one, write a module and add an entry to `SEARCHES`.

>>> from xrl_jax.search.chain import name_of
>>> name_of(find_strategy("taso"))
'taso'
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from xrl_jax.search.backtracking import Taso
from xrl_jax.search.base import Strategy
from xrl_jax.search.chain import alone, pipeline
from xrl_jax.search.eqsat_mcts import EqsatMCTS
from xrl_jax.search.greedy import Greedy, Local
from xrl_jax.search.random import Random
from xrl_jax.search.tensat import Tensat


class Named(NamedTuple):
    """A search and the stages that complete it.

    Attributes:
      search: returns the search with default hyperparameters.
      uses_engine: whether it calls the engine of `search.states`, which is then compiled first.
      complete: adds the stages before and after the search.
    """

    search: Callable[[], Strategy]
    uses_engine: bool = True
    complete: Callable[..., Strategy] = pipeline

    def strategy(self) -> Strategy:
        """Return the search with its stages."""
        return self.complete(self.search(), uses_engine=self.uses_engine)

    def without_stages(self) -> Strategy:
        """Return the search such that only its own results are judged."""
        return alone(self.search(), uses_engine=self.uses_engine)


def _xrlflow() -> Strategy:
    from xrl_jax.rl.strategy import XRLflow  # Flax takes a second to import

    return XRLflow()


SEARCHES: Mapping[str, Named] = MappingProxyType(
    {
        "random": Named(Random),
        "local": Named(Local, complete=alone),  # a baseline for other searches, so not refined
        "greedy": Named(Greedy),
        "taso": Named(Taso),
        "tensat": Named(Tensat),
        "eqsat-mcts": Named(EqsatMCTS),
        "xrlflow": Named(_xrlflow, uses_engine=False),  # it has its own engine
    }
)


def named(search: str) -> Named:
    """Return the search of that name.

    Raises:
      ValueError: there is no search of that name; the message suggests the nearest name.
    """
    if search not in SEARCHES:
        near = difflib.get_close_matches(search, SEARCHES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no search {search!r} (there are: {', '.join(SEARCHES)}){hint}")
    return SEARCHES[search]


def find_strategy(search: str | Strategy) -> Strategy:
    """Return the strategy of that name, or the strategy itself.

    Raises:
      ValueError: there is no search of that name; the message suggests the nearest name.
    """
    return named(search).strategy() if isinstance(search, str) else search
