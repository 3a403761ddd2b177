"""The error that narrow weights cause in the results, measured by rounding the weights.

The program runs in float32 through the plain lowering of every operator, once as it is and once
with the chosen weights rounded. The difference is the error of the rounding alone: both runs round
everything else alike, which leaves noise of about 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrl_jax.accept.accuracy import relative_error
from xrl_jax.accept.coarse import rounded
from xrl_jax.backends.hoist import split
from xrl_jax.graph.graph import Node
from xrl_jax.libraries.xla.plain import dot_dims
from xrl_jax.lower.table import lower
from xrl_jax.program.program import Program, evaluate, plain
from xrl_jax.transform.narrow import LEAST_SCALE, LEVELS, STORAGE, Site

_DEVIATIONS = 3.0  # standard deviations from the mean that hardly any input exceeds


class Errors:
    """Measures the errors of choices on a few inputs; it compiles the program once.

    Args:
      program: numbered as `sites` numbers it.
      places: the products that may be chosen; not empty.
      inputs: flat argument lists.
    """

    def __init__(
        self, program: Program, places: Sequence[Site], inputs: Sequence[Sequence[Any]]
    ) -> None:
        self._places = tuple(places)
        at, with_plain = {site: n for n, site in enumerate(places)}, plain(program)

        def run(kinds: jax.Array, *flat: Any) -> list[Any]:
            def compute(graph: int, slot: int, node: Node, operands: Sequence[Any]) -> Any:
                n = at.get(Site(graph, slot - 1))
                if n is None:
                    return lower(node, *operands)
                # Branches on products: branches on weights would copy these.
                return lax.switch(kinds[n], _branches(node), *operands)

            return evaluate(with_plain, 0, flat, compute=compute)

        kinds = jax.ShapeDtypeStruct((len(places),), jnp.int32)
        hoisted = split(run, [kinds, *program.in_avals], [False, *program.weights])
        weights = [x for x, w in zip(inputs[0], program.weights, strict=True) if w]
        self._prepared = hoisted.prepare(weights)
        self._run = jax.jit(hoisted.call)
        self._inputs = [
            [x for x, w in zip(flat, program.weights, strict=True) if not w] for flat in inputs
        ]
        self._exact = [self._results({}, n) for n in range(len(inputs))]

    def _results(self, chosen: Mapping[Site, str], n: int) -> list[np.ndarray]:
        """Return the float results on input `n`."""
        kinds = np.zeros(len(self._places), np.int32)
        for i, site in enumerate(self._places):
            kinds[i] = 1 + STORAGE.index(chosen[site]) if site in chosen else 0
        found = self._run(self._prepared, [kinds, *self._inputs[n]])
        return [np.asarray(x) for x in found if jnp.issubdtype(x.dtype, jnp.floating)]

    def of(self, chosen: Mapping[Site, str], *, inputs: int | None = None) -> np.ndarray:
        """Return the errors that these types of weights cause, one for each input: the largest of a
        result, relative to the largest element of its array.

        Args:
          inputs: only the first so many inputs; None for all.
        """
        found = []
        for n, exact in enumerate(self._exact[:inputs]):
            pairs = zip(self._results(chosen, n), exact, strict=True)
            found.append(max((relative_error(x, y) for x, y in pairs), default=0.0))
        return np.asarray(found)


def error_bound(errors: np.ndarray) -> float:
    """Return an error that hardly any input exceeds, given the errors on some: the largest of them,
    or three standard deviations above the mean, of logarithms, if that is more. An input without
    an error, such as zeros, says nothing about others.

    >>> round(error_bound(np.asarray([1e-3, 1e-3, 1e-3])), 6)
    0.001
    >>> round(error_bound(np.asarray([1e-3, 1e-4, 1e-5])), 3)
    0.028
    >>> round(error_bound(np.asarray([1e-3, 0.0])), 6)
    0.001
    """
    errors = errors[errors != 0]
    if not errors.size or not np.isfinite(errors).all():
        return math.inf if errors.size else 0.0
    logs = np.log(errors)
    return max(float(errors.max()), math.exp(logs.mean() + _DEVIATIONS * logs.std()))


def _branches(node: Node) -> list[Callable[[Any, Any], Any]]:
    """Return the product as it is, and with its weight rounded to each type of `STORAGE`."""
    (_, contracted), _ = dot_dims(node)

    def in_levels(w: jax.Array) -> jax.Array:
        w = w.astype(jnp.float32)
        size = jnp.max(jnp.abs(w), axis=contracted, keepdims=True)
        scale = jnp.maximum(size / LEVELS, LEAST_SCALE)
        return jnp.round(w / scale) * scale

    def product(dtype: str) -> Callable[[Any, Any], Any]:
        if dtype == "int8":
            return lambda x, w: lower(node, x, in_levels(w))
        return lambda x, w: lower(node, x, rounded(w, dtype))

    return [lambda x, w: lower(node, x, w), *map(product, STORAGE)]
