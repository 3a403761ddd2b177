"""Equality of constants by value: classes of an e-graph that are computed from arrays alone.

Other tools fold a scale into a weight, or store a weight transposed. No rule shows that such an
array equals what it was computed from; its value does, up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.tensor_graph import features_of
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Nodes, node_at
from xrl_jax.lower.table import lower

TOLERANCE = 4e-6  # a few roundings of float32, of the terms that an element is the sum of
_MOST_BYTES = 2**30  # of arrays that are kept while others are computed
_PROBES = 4
_LEAVES = ("array", "const", "iota")
_SUMS = ("add", "sub")
_LINEAR = ("mul", "dot", "conv", "reshape", "transpose", "broadcast", "slice", "concat", "rev")


def equal_constants(graph: EGraph, arrays: Mapping[int, Any]) -> list[tuple[int, int]]:
    """Return pairs of classes whose constant values are equal up to rounding.

    Args:
      graph: rebuilt.
      arrays: values of `array` e-nodes, by `ref`.
    """
    constants = _Constants(graph, arrays)
    alike: dict[tuple, list[int]] = {}
    for c in constants.classes:
        alike.setdefault(constants.type_of(c), []).append(c)
    pairs = []
    for group in alike.values():
        seen: list[tuple[int, np.ndarray]] = []
        for c in group if len(group) > 1 else ():
            probe = _probe(constants.value(c))
            same = (d for d, other in seen if np.all(np.abs(probe - other) <= 0.01))
            equal = next((d for d in same if constants.close(c, d)), None)
            if equal is None:
                seen.append((c, probe))
            else:
                pairs.append((equal, c))
    return pairs


class _Constants:
    """The constant classes of an e-graph, and their values."""

    def __init__(self, graph: EGraph, arrays: Mapping[int, Any]) -> None:
        self.features: Nodes = jax.tree.map(np.asarray, features_of(graph))
        self.args = [[a for a in row if a] for row in np.asarray(graph.args).tolist()]
        self.arrays = arrays
        self.chosen = self._chosen(np.asarray(graph.op), np.asarray(graph.parent).tolist())
        self._kept: dict[int, jax.Array] = {}
        self._bytes = 0

    def _chosen(self, op: np.ndarray, parent: list[int]) -> dict[int, int]:
        """Return an e-node for each constant class, arguments first."""
        chosen: dict[int, int] = {}
        leaves = [ops.OPS[name].code for name in _LEAVES]
        live = [s for s in np.flatnonzero(op != HOLE).tolist() if self.features.weight_only[s]]
        going = True
        while going:
            going = False
            for slot in live:
                if parent[slot] in chosen or (not self.args[slot] and op[slot] not in leaves):
                    continue
                if all(a in chosen for a in self.args[slot]):
                    chosen[parent[slot]] = slot
                    going = True
        return chosen

    @property
    def classes(self) -> list[int]:
        """Names of the classes with floating-point values."""
        kinds = {ops.DTYPE_CODE[d] for d in ("float32", "float16", "bfloat16")}
        return [c for c in self.chosen if int(self.features.dtype[self.chosen[c]]) in kinds]

    def type_of(self, c: int) -> tuple:
        """Return the shape and type of a class."""
        node = node_at(self.features, self.chosen[c], ())
        return node.shape, node.dtype

    def value(self, c: int) -> jax.Array:
        """Return the value of a class."""
        if c not in self._kept:
            slot = self.chosen[c]
            operands = [self.value(a) for a in self.args[slot]]
            node = node_at(self.features, slot, ())
            value = jnp.asarray(self.arrays[node.ref]) if node.ref >= 0 else lower(node, *operands)
            if self._bytes > _MOST_BYTES:
                self._kept, self._bytes = {}, 0
            self._kept[c] = value
            self._bytes += value.nbytes
        return self._kept[c]

    def close(self, c: int, d: int) -> bool:
        """Return whether the values of two classes are equal up to rounding, element by element."""
        a, b = (np.asarray(self.value(x), np.float64) for x in (c, d))
        terms = (np.asarray(self._terms(x), np.float64) for x in (c, d))
        with np.errstate(invalid="ignore"):
            return bool(np.all((a == b) | (np.abs(a - b) <= TOLERANCE * np.fmax(*terms))))

    def _terms(self, c: int) -> jax.Array:
        """Return the sum of the absolute terms that each element is computed from, which bounds its
        rounding errors where terms cancel; finite.
        """
        slot = self.chosen[c]
        node = node_at(self.features, slot, ())
        if node.op in _SUMS:
            found = lower(replace(node, op="add"), *map(self._terms, self.args[slot]))
        elif node.op in _LINEAR:
            found = lower(node, *map(self._terms, self.args[slot]))
        else:
            found = jnp.abs(self.value(c))
        return jnp.where(jnp.isfinite(found), found, 0.0)


def _probe(value: jax.Array) -> np.ndarray:
    """Return a few numbers that are nearly equal for nearly equal arrays of one shape."""
    host = np.asarray(value, np.float64).reshape(-1)
    host = np.where(np.isfinite(host), host, 0.0)
    size = float(np.max(np.abs(host), initial=0.0)) or 1.0
    rng = np.random.default_rng(host.size)
    weights = rng.choice([-1.0, 1.0], size=(_PROBES, host.size)) / np.sqrt(max(host.size, 1))
    return np.array([*(weights @ (host / size)), np.log(size)])
