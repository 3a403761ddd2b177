"""The error that lower precisions cause in the results, measured by rounding.

The program runs once as it is and once with the chosen weights and operands rounded. The difference
is the error of the rounding alone: both runs compute everything else alike, which leaves noise of
about 1e-6. Weights are rounded on their own, so that one compiled program measures all choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.accept.accuracy import relative_error
from xrl_jax.accept.coarse import coarse_results
from xrl_jax.backends.hoist import split
from xrl_jax.graph.graph import Node
from xrl_jax.lower.table import lower
from xrl_jax.program.host import HostProgram, disassemble, reassemble
from xrl_jax.program.program import Program, evaluate
from xrl_jax.transform.narrow import OPERANDS, Site, rounding, stored, type_of

_MOST_BYTES = 2 << 30  # of rounded weights that are kept
_DEVIATIONS = 3.5  # standard deviations from the mean that hardly any input exceeds
AtSite = Callable[[Site, Node, Any, Any], Any]  # computes a site, given its operands


class _Alone(NamedTuple):
    """A program whose sites have the plain lowering, and the lowerings that they had."""

    program: Program
    lowerings: dict[Site, int]


class Errors:
    """Measures the errors of choices on a few inputs; it compiles the program once.

    Args:
      program: numbered as `sites` numbers it.
      places: the sites that may be chosen, with their precisions; not empty.
      inputs: flat argument lists.
      unusual: others, on which a larger error may be allowed.
    """

    def __init__(
        self,
        program: Program,
        places: Mapping[Site, Sequence[str]],
        inputs: Sequence[Sequence[Any]],
        unusual: Sequence[Sequence[Any]] = (),
    ) -> None:
        self._number = {site: n for n, site in enumerate(places)}
        is_weight = program.weights
        self._program, self._inputs, self._unusual = program, inputs, unusual
        sites_alone = _with_plain(program, places)
        self._nodes, self._weights = _uses(sites_alone, places, inputs[0])

        def run(kinds: jax.Array, given: list[Any], *flat: Any) -> list[Any]:
            """Return the results, given for each use its weight, and for each site the number of
            the type to which its first operand is rounded, from 1 on.
            """
            rest = iter(given)

            def at_site(site: Site, node: Node, x: Any, _: Any) -> Any:
                own = [p for p in OPERANDS if p in places[site]]
                kind = kinds[self._number[site]]
                for precision in own:
                    number = 1 + OPERANDS.index(precision)
                    x = jnp.where(kind == number, rounding(node, precision).left(node, x), x)
                # Where only the weight is rounded, it would be packed for a few rows.
                node = node if own else replace(node, lowering=0)
                return lower(node, x, next(rest))

            return _evaluated(sites_alone, places, at_site, flat)

        n = len(self._weights)
        avals = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in self._weights]
        kinds = jax.ShapeDtypeStruct((len(places),), jnp.int32)
        self._split = split(
            lambda kinds, *flat: run(kinds, list(flat[:n]), *flat[n:]),
            [kinds, *avals, *program.in_avals],
            [False, *[True] * n, *is_weight],
        )
        self._other_weights = [x for x, w in zip(inputs[0], is_weight, strict=True) if w]
        self._kept: dict[tuple[int, str], np.ndarray] = {}
        self._run = jax.jit(self._split.call)
        self._exact = self._results({}, self._inputs)
        self._exact_unusual = self._results({}, self._unusual)

    def _results(
        self, chosen: Mapping[Site, str], inputs: Sequence[Sequence[Any]]
    ) -> list[list[np.ndarray]]:
        """Return the float results on some inputs."""
        kinds = np.zeros(len(self._number), np.int32)
        for site, precision in chosen.items():
            if precision in OPERANDS:
                kinds[self._number[site]] = 1 + OPERANDS.index(precision)
        weights = [
            self._weight(use, chosen[site]) if site in chosen else self._weights[use]
            for use, (site, _) in enumerate(self._nodes)
        ]
        prepared = self._split.prepare([*weights, *self._other_weights])
        is_weight = self._program.weights
        rest = ([x for x, w in zip(flat, is_weight, strict=True) if not w] for flat in inputs)
        return [_floats(self._run(prepared, [kinds, *flat])) for flat in rest]

    def _weight(self, use: int, precision: str) -> np.ndarray:
        """Return the weight of a use of a site, rounded; it is kept for other choices."""
        if (use, precision) not in self._kept:
            rounded = _rounded(self._nodes[use][1], precision, self._weights[use])
            if sum(x.nbytes for x in self._kept.values()) + rounded.nbytes > _MOST_BYTES:
                return rounded
            self._kept[use, precision] = rounded
        return self._kept[use, precision]

    def of(self, chosen: Mapping[Site, str], *, inputs: int | None = None) -> np.ndarray:
        """Return the errors that these precisions cause, one for each input: the largest of a
        result, relative to the largest element of its array.

        Args:
          inputs: only the first so many inputs; None for all.
        """
        n = len(self._inputs) if inputs is None else min(inputs, len(self._inputs))
        return _largest(self._results(chosen, self._inputs[:n]), self._exact[:n])

    def excess(self, chosen: Mapping[Site, str], most: float) -> float:
        """Return the largest ratio of the error on an unusual input to the one allowed there, which
        is `most`, or that of bfloat16 if it is more.
        """
        found = _largest(self._results(chosen, self._unusual), self._exact_unusual)
        if (found <= most).all():
            return float(found.max(initial=0.0)) / most
        limits = np.maximum(self._in_bfloat16, most)
        # Both are infinite where both overflow.
        pairs = zip(found.tolist(), limits.tolist(), strict=True)
        return max(1.0 if error == limit else error / limit for error, limit in pairs)

    @cached_property
    def _in_bfloat16(self) -> np.ndarray:
        """The errors on unusual inputs with all products in bfloat16."""
        coarse = coarse_results(self._program, "bf16")
        return _largest([_floats(coarse(flat)) for flat in self._unusual], self._exact_unusual)


def _floats(results: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(x) for x in results if jnp.issubdtype(x.dtype, jnp.floating)]


def _largest(
    found: Sequence[Sequence[np.ndarray]], exact: Sequence[Sequence[np.ndarray]]
) -> np.ndarray:
    """Return for each input the largest error of a result."""
    pairs = (zip(*each, strict=True) for each in zip(found, exact, strict=True))
    return np.asarray([max((relative_error(x, y) for x, y in own), default=0.0) for own in pairs])


def error_bound(errors: np.ndarray) -> float:
    """Return an error that hardly any input exceeds, given the errors on some: the largest of them,
    or 3.5 standard deviations above the mean, of logarithms, if that is more. An input without an
    error, such as zeros, says nothing about others.

    >>> round(error_bound(np.asarray([1e-3, 1e-3, 1e-3])), 6)
    0.001
    >>> round(error_bound(np.asarray([1e-3, 1e-4, 1e-5])), 3)
    0.072
    >>> round(error_bound(np.asarray([1e-3, 0.0])), 6)
    0.001
    """
    errors = errors[errors != 0]
    if not errors.size or not np.isfinite(errors).all():
        return math.inf if errors.size else 0.0
    logs = np.log(errors)
    return max(float(errors.max()), math.exp(logs.mean() + _DEVIATIONS * logs.std()))


def _with_plain(program: Program, places: Mapping[Site, Any]) -> _Alone:
    """Return the program with the plain lowering at these sites, so that they are computed on their
    own, and the lowerings that they had.
    """
    host, lowerings = disassemble(program), {}
    graphs = []
    for g, graph in enumerate((host.main, *host.bodies)):
        nodes = list(graph.nodes)
        for site in places:
            if site.graph == g:
                lowerings[site] = nodes[site.index].lowering
                nodes[site.index] = replace(nodes[site.index], lowering=0)
        graphs.append(replace(graph, nodes=tuple(nodes)))
    parts = HostProgram(graphs[0], tuple(graphs[1:]), host.bindings)
    return _Alone(reassemble(program, parts), lowerings)


def _evaluated(
    alone: _Alone, places: Mapping[Site, Any], at_site: AtSite, flat: Sequence[Any]
) -> list[Any]:
    """Return the results of the program on flat arguments, with its sites computed by `at_site`."""

    def compute(graph: int, slot: int, node: Node, operands: Sequence[Any]) -> Any:
        site = Site(graph, slot - 1)
        if site not in places:
            return lower(node, *operands)
        return at_site(site, replace(node, lowering=alone.lowerings[site]), *operands)

    return evaluate(alone.program, 0, flat, compute=compute)


def _uses(
    alone: _Alone, places: Mapping[Site, Any], flat: Sequence[Any]
) -> tuple[list[tuple[Site, Node]], list[jax.Array]]:
    """Return the uses of the sites, of which those in bodies have several, and the weight of each
    in float32.
    """
    uses: list[tuple[Site, Node]] = []

    def read(*flat: Any) -> list[Any]:
        uses.clear()
        found: list[Any] = []

        def at_site(site: Site, node: Node, _: Any, w: Any) -> Any:
            uses.append((site, node))
            found.append(w.astype(jnp.float32))
            return jnp.zeros(node.shape, node.dtype)  # no weight depends on it

        _evaluated(alone, places, at_site, flat)
        return found

    weights = jax.jit(read)(*flat)
    return uses, weights


def _rounded(node: Node, precision: str, w: jax.Array) -> np.ndarray:
    """Return a weight rounded to a precision; NaN if it has infinities, which have no levels."""
    host = np.asarray(w)
    if "int" in type_of(precision) and not np.isfinite(host).all():
        return np.full_like(host, np.nan)
    if precision in OPERANDS:
        return rounding(node, precision).right(node, host).astype(np.float32)
    return stored(node, host, precision).astype(np.float32)
