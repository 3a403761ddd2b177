"""Extractors of others, for comparison: greedy ones that build choices from the leaves upwards.

Each class keeps the best e-node found so far and a history: what the classes below it cost. An
e-node is tried again when a class that it reads has improved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from xrl_jax.egraph.extraction.discounted import by_tree_cost
from xrl_jax.egraph.extraction.instance import NONE, Choice, Instance, valued

History = dict[int, float]  # what each class below, and the class itself, was charged
Summary = tuple[float, History]
Combine = Callable[[Instance, int, Sequence[Summary]], Summary]


def by_trees(instance: Instance) -> Choice:
    """Return egg's choice: the least cost of a tree, in which shared parts count each time."""
    return valued(instance, by_tree_cost(instance, instance.cost))


def by_sets(instance: Instance) -> Choice:
    """Return extraction-gym's greedy choice for shared parts: costs of the set of classes below."""
    return _greedy(instance, _of_sets)


def by_estimate(instance: Instance) -> Choice:
    """Return the choice by the estimate of Hartmann, He and Yoneki (PACT 2024): of what a child
    shares with its siblings, the most expensive class is subtracted.
    """
    return _greedy(instance, _estimated)


def _of_sets(instance: Instance, n: int, children: Sequence[Summary]) -> Summary:
    below: History = {}
    for _, history in children:
        below |= history
    own = float(instance.cost[n])
    return own + sum(below.values()), below | {int(instance.owner[n]): own}


def _estimated(instance: Instance, n: int, children: Sequence[Summary]) -> Summary:
    total, below = float(instance.cost[n]), {}
    for c, (cost, history) in zip(instance.children[n], children, strict=True):
        if c not in below:
            known = [value for d, value in history.items() if d in below]
            total += max(cost - max(known, default=0.0), 0.0)
        below = history | below
    return total, below | {int(instance.owner[n]): total}


def _greedy(instance: Instance, combine: Combine) -> Choice:
    summaries: dict[int, Summary] = {}
    chosen = np.full(instance.n_classes, NONE)
    waiting = deque(n for n, classes in enumerate(instance.children) if not classes)
    queued = set(waiting)
    while waiting:
        n = waiting.popleft()
        queued.discard(n)
        children = [summaries.get(c) for c in instance.children[n]]
        known = [s for s in children if s is not None]
        owner = int(instance.owner[n])
        if len(known) < len(children) or any(owner in history for _, history in known):
            continue
        new = combine(instance, n, known)
        if owner in summaries and new[0] >= summaries[owner][0] - 1e-12:
            continue
        summaries[owner], chosen[owner] = new, n
        for reader in instance.readers[owner]:
            if reader not in queued:
                queued.add(reader)
                waiting.append(reader)
    return valued(instance, chosen)
