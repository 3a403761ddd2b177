"""E-graphs as instances of extraction, and choices back."""

from __future__ import annotations

import numpy as np

from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.extraction.instance import Instance, instance_of


def instance_of_egraph(graph: EGraph, cost: np.ndarray) -> Instance:
    """Return the instance of an e-graph whose e-nodes cost `cost` [N]; those that cost infinitely
    much are left out. Classes keep their names as numbers, e-nodes their slots as names.

    Raises:
      InstanceError: a root has no e-node that can be chosen.
    """
    args, parent = np.asarray(graph.args), np.asarray(graph.parent).tolist()
    there = np.flatnonzero((np.asarray(graph.op) != HOLE) & np.isfinite(cost)).tolist()
    rows = [(str(e), parent[e], float(cost[e]), [a for a in args[e].tolist() if a]) for e in there]
    return instance_of(rows, np.asarray(graph.roots).tolist(), graph.bucket)


def enodes_of(instance: Instance, node: np.ndarray) -> np.ndarray:
    """Return the e-node [N] of each class for a choice of an e-graph's instance; 0 for none."""
    names = np.array([*map(int, instance.names), HOLE], np.int32)
    return names[node]
