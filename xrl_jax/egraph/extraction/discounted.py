"""Greedy extraction. The cost of an e-node may be divided by a power of the number of classes that
may read it, because it is paid once for all that do.
"""

from __future__ import annotations

import numpy as np

from xrl_jax.egraph.extraction.instance import Instance

POWERS = (0.0, 0.5, 1.0)
_LEAST = 1e-9  # of the largest cost: e-nodes that cost nothing still count as a step


def by_tree_cost(instance: Instance, cost: np.ndarray) -> np.ndarray:
    """Return the e-nodes [C] that make the costs of trees least, for e-nodes that cost `cost` [N].

    Costs of zero are raised a little, so that the choice is acyclic.
    """
    least = _LEAST * max(float(instance.cost.max(initial=0.0)), 1e-300)
    own = np.maximum(cost, least)
    best = np.full(instance.n_classes + 1, np.inf)
    best[-1] = 0.0
    starts = instance.first[:-1]
    filled = starts < instance.first[1:]
    while True:
        value = own + best[instance.padded].sum(axis=1)
        new = best.copy()
        new[:-1][filled] = np.minimum.reduceat(value, starts[filled])
        if not np.any(new < best):
            break
        best = new
    chosen = np.full(instance.n_classes, -1)
    # Backwards, so that the first of equally cheap e-nodes is left.
    cheapest = np.flatnonzero(np.isfinite(value) & (value <= best[instance.owner]))[::-1]
    chosen[instance.owner[cheapest]] = cheapest
    return chosen


def readers_of(instance: Instance) -> np.ndarray:
    """Return for each e-node [N] the number of classes that may read its class, at least 1."""
    readers = [len({int(instance.owner[n]) for n in nodes}) for nodes in instance.readers]
    return np.maximum(np.array(readers), 1)[instance.owner]
