"""Equal repeated regions of a graph: the layers of a network, the steps of an unrolled loop.

Regions are found as in compressors. Each node is a token, which describes everything about it
except where its arguments come from. A window of tokens that recurs p nodes later proposes the
period p, and a stretch of tokens equal to those p later is a run of repeats. The dataflow of the
repeats is then compared exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node
from xrl_jax.graph.operands import is_pinned
from xrl_jax.program.host import HostGraph, source_key

MIN_REGION = 8  # compute nodes in a region that is worth a call
_MAX_PERIODS = 64  # proposed periods to examine, the most frequent first
_MAX_PHASES = 8  # places to cut a run that are tried, those crossed by the fewest values first
_MAX_REFUSED = 64  # the search ends after so many stretches whose dataflow does not repeat


@dataclass(frozen=True)
class Run:
    """`copies` regions of `period` nodes each, one after the other from `start` in `order`."""

    order: Sequence[int]  # indices of the nodes that are not sources
    last_use: np.ndarray  # by position in `order`: position of the last use, the end for outputs
    start: int
    period: int
    copies: int

    def members(self, copy: int) -> Sequence[int]:
        first = self.start + copy * self.period
        return self.order[first : first + self.period]


def _tokens(graph: HostGraph, order: Sequence[int]) -> np.ndarray:
    """Return an integer per node of `order`, equal for nodes that differ in arguments only."""
    numbers: dict[Any, int] = {}

    def argument(node: Node) -> Any:
        if node.op in ("const", "iota"):
            return source_key(node)
        return (node.shape, node.dtype)

    out = []
    for i in order:
        node = graph.nodes[i]
        own = (node.op, node.attrs, node.lowering, node.shape, node.dtype, node.ref)
        args = tuple(argument(graph.nodes[a]) for a in node.args)
        key = i if is_pinned(node) else (own, args)
        out.append(numbers.setdefault(key, len(numbers)))
    return np.asarray(out, np.int64)


def _order(graph: HostGraph) -> list[int]:
    """Return the nodes that are not sources, in trace order, non-repeated independent ones first.

    The nodes moved to the front occur once and depend only on others like them. For example, the
    slices that give each step of an unrolled loop its row then precede the loop, and the steps are
    equal.
    """
    order = [i for i, n in enumerate(graph.nodes) if n.op not in ops.SOURCES]
    tokens = _tokens(graph, order)
    often = np.bincount(tokens)[tokens] > 1
    ready = [n.op in ops.SOURCES for n in graph.nodes]
    for i, repeats in zip(order, often, strict=True):
        node = graph.nodes[i]
        ready[i] = not repeats and not is_pinned(node) and all(ready[a] for a in node.args)
    return [i for i in order if ready[i]] + [i for i in order if not ready[i]]


def find_runs(graph: HostGraph) -> list[Run]:
    """Return disjoint runs, ordered by their start.

    They are chosen greedily, those that save most nodes first.
    """
    order = _order(graph)
    tokens = _tokens(graph, order)
    last_use = _last_uses(graph, order)
    found: list[Run] = []
    unique = -1  # tokens of taken or refused nodes are replaced by unique negative ones
    refused = 0
    while True:
        stretch = _best_stretch(tokens)
        if stretch is None or refused > _MAX_REFUSED:
            return sorted(found, key=lambda r: r.start)
        start, period, length = stretch
        run = _cut(graph, order, start, period, length, last_use)
        # If the dataflow does not repeat, one token is replaced to split the stretch, and its parts
        # are tried.
        taken = slice(start + length // 2, start + length // 2 + 1)
        if run is not None:
            found.append(run)
            taken = slice(run.start, run.start + run.period * run.copies)
        refused += run is None
        n = len(tokens[taken])
        tokens[taken] = np.arange(unique - n + 1, unique + 1)
        unique -= n


def _best_stretch(tokens: np.ndarray) -> tuple[int, int, int] | None:
    """Return the stretch that saves most nodes, as (start, period, length).

    In a stretch, tokens[i] == tokens[i + period].
    """
    best, saved = None, 0
    for period in _periods(tokens):
        equal = np.concatenate([[0], tokens[period:] == tokens[:-period], [0]]).astype(np.int8)
        edges = np.diff(equal)
        for start, end in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
            saves = (end - start) // period * period
            if saves > saved or (saves == saved and best is not None and period < best[1]):
                best, saved = (int(start), period, int(end - start)), saves
    return best


def _periods(tokens: np.ndarray) -> list[int]:
    """Return the distances at which windows of `MIN_REGION` tokens recur, most frequent first."""
    if len(tokens) < 2 * MIN_REGION:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(tokens, MIN_REGION)
    seen: dict[bytes, int] = {}
    votes: Counter[int] = Counter()
    for i, window in enumerate(windows):
        distance = i - seen.setdefault(window.tobytes(), i)
        if distance >= MIN_REGION:  # shorter periods count by their multiples
            votes[distance] += 1
            seen[window.tobytes()] = i
    return [period for period, _ in votes.most_common(_MAX_PERIODS)]


def _last_uses(graph: HostGraph, order: Sequence[int]) -> np.ndarray:
    """Return the last position in `order` that uses each node; the end for outputs."""
    at = {n: i for i, n in enumerate(order)}
    last = np.arange(len(order))
    for i, n in enumerate(order):
        for a in graph.nodes[n].args:
            if a in at:
                last[at[a]] = i
    last[[at[o] for o in graph.outputs if o in at]] = len(order)
    return last


def _cut(
    graph: HostGraph,
    order: Sequence[int],
    start: int,
    period: int,
    length: int,
    last_use: np.ndarray,
) -> Run | None:
    """Return the best run in a stretch: most copies, then fewest values that cross its cuts."""
    copies = length // period + 1
    # At each position, the number of values computed before it and used at or after it.
    crossing = np.zeros(len(order) + 2, np.int64)
    for i, end in enumerate(last_use):
        crossing[i + 1] += 1
        crossing[min(end, len(order)) + 1] -= 1
    crossing = np.cumsum(crossing)
    phases = range(start, start + length % period + 1)
    costs = [int(crossing[s : s + copies * period + 1 : period].sum()) for s in phases]
    best: Run | None = None
    for k in np.argsort(costs, kind="stable")[:_MAX_PHASES]:
        run = _same_dataflow(graph, Run(order, last_use, phases[int(k)], period, copies))
        if run is not None and (best is None or run.copies > best.copies):
            best = run
        if best is not None and best.copies == copies:
            break
    return best


def _same_dataflow(graph: HostGraph, run: Run) -> Run | None:
    """Return the longest part of the run whose copies have equal inner dataflow."""
    signatures = []
    for c in range(run.copies):
        members = run.members(c)
        at = {n: i for i, n in enumerate(members)}
        args = [[at.get(a) for a in graph.nodes[n].args] for n in members]
        outside = {a for n in members for a in graph.nodes[n].args if a not in at}
        inside_used = [members[r] for r in results_of(run, c)]
        whole = not any(graph.nodes[a].dtype == "tuple" for a in [*outside, *inside_used])
        signatures.append((tuple(map(tuple, args)), True) if whole else (c, False))
    best = (0, 0)
    first = 0
    for c in range(1, run.copies + 1):
        if c == run.copies or signatures[c] != signatures[first]:
            best = max(best, (c - first, -first))
            first = c
    copies, first = best[0], -best[1]
    if copies < 2:
        return None
    return Run(run.order, run.last_use, run.start + first * run.period, run.period, copies)


def results_of(run: Run, copy: int) -> set[int]:
    """Return the members of a copy, counted from its start, that are used outside the copy."""
    first = run.start + copy * run.period
    last_use = run.last_use[first : first + run.period]
    return {int(r) for r in np.flatnonzero(last_use >= first + run.period)}
