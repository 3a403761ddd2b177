"""Searches composed of stages, as optax composes gradient transformations.

A stage is a strategy that starts from the results of the stages before it (`Problem.found`) and
returns all results known after it. So `taso`, `xrlflow` and a user's own search are completed by
the same stages:

    pipeline(my_search)
    chain(Recall(), KernelsInLibrary(), HowToCompile(), Search(my_search), TimeWhole(),
          Refine())
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.runtime.ctrl_c import plain_ctrl_c
from xrl_jax.search.base import (
    Budget,
    Problem,
    SearchResult,
    StopReason,
    Strategy,
    unpriced,
)
from xrl_jax.search.refine import Refine
from xrl_jax.search.stages import HowToCompile, KernelsInLibrary, Recall, Search, SearchAlone
from xrl_jax.search.time_whole import TimeWhole

_LEAST_SECONDS = 1e-3  # given to a stage when no time is left: it returns the known results


@dataclasses.dataclass(frozen=True)
class Chain:
    """Stages that run one after the other, each with the time that is left.

    Ctrl-C ends the running stage and marks the result as interrupted; the stages after it do only
    what is needed for a result.
    """

    stages: tuple[Strategy, ...]

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        clock = Stopwatch(budget.seconds)
        found = _or_interrupted(lambda: problem.so_far, unpriced(problem.program))
        for stage, key_of_stage in zip(
            self.stages, jax.random.split(key, len(self.stages)), strict=True
        ):
            left = dataclasses.replace(budget, seconds=max(clock.left, _LEAST_SECONDS))
            begun = dataclasses.replace(problem, found=found)
            found = _or_interrupted(functools.partial(stage, begun, left, key_of_stage), found)
        return found


def _or_interrupted(stage: Callable[[], SearchResult], known: SearchResult) -> SearchResult:
    """Return the result of the stage or, after Ctrl-C, `known` marked as interrupted."""
    try:
        with plain_ctrl_c():
            return stage()
    except KeyboardInterrupt:
        return dataclasses.replace(known, stop=StopReason.INTERRUPTED)


def chain(*stages: Strategy) -> Strategy:
    """Return a strategy that runs these stages in order."""
    return Chain(stages)


@dataclasses.dataclass(frozen=True)
class WithShare:
    """A strategy that gets a share of the time left."""

    strategy: Strategy
    share: float

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        own = dataclasses.replace(budget, seconds=self.share * budget.seconds)
        return self.strategy(problem, own, key)


def pipeline(search: Strategy, *, uses_engine: bool = True) -> Strategy:
    """Return the search with the stages that improve its result: programs known without the search
    are timed beside those it finds, and the fastest program is refined.

    Args:
      uses_engine: see `Search`.
    """
    return chain(
        Recall(),
        KernelsInLibrary(),
        HowToCompile(),
        Search(search, uses_engine=uses_engine),
        TimeWhole(),
        Refine(),
    )


def alone(search: Strategy, *, uses_engine: bool = True) -> Strategy:
    """Return the search on its own, to be judged by its own results: no programs known without it
    are timed beside them, the fastest is not refined, and the search gets most of the time.

    Args:
      uses_engine: see `Search`.
    """
    return chain(HowToCompile(), SearchAlone(search, uses_engine=uses_engine), TimeWhole())


def name_of(strategy: Strategy) -> str:
    """Return the name of a strategy in reports; for a chain, the name of its search."""
    searches = [s.search for s in _stages(strategy) if isinstance(s, Search)]
    names = [getattr(s, "__name__", None) or type(s).__name__.lower() for s in searches]
    return "+".join(names) or getattr(strategy, "__name__", None) or type(strategy).__name__.lower()


def _stages(strategy: Strategy) -> Iterator[Strategy]:
    if isinstance(strategy, Chain):
        for stage in strategy.stages:
            yield from _stages(stage)
    else:
        yield strategy


def settings(*of: Any) -> dict[str, Any]:
    """Return the hyperparameters of strategies and other frozen dataclasses by name, `Class.field`;
    those of a function are unknown and left out.

    >>> def mine(problem, budget, key): ...
    >>> settings(Search(mine, share=0.8))["Search.share"]
    0.8
    """
    return {name: value for each in of for name, value, _ in _hyperparameters(each)}


def changed_settings(*of: Any) -> tuple[str, ...]:
    """Return the names of the hyperparameters that differ from their defaults.

    >>> def mine(problem, budget, key): ...
    >>> changed_settings(Search(mine, share=0.8))
    ('Search.share',)
    """
    found = itertools.chain.from_iterable(map(_hyperparameters, of))
    return tuple(name for name, value, default in found if value != default)


def _hyperparameters(of: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, value and default of each hyperparameter."""
    for stage in _stages(of):
        for field in dataclasses.fields(stage) if dataclasses.is_dataclass(stage) else ():
            value = getattr(stage, field.name)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                yield from _hyperparameters(value)
            elif field.metadata.get("setting", True) and _is_plain(value):
                yield f"{type(stage).__name__}.{field.name}", value, field.default


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
