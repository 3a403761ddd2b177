"""Folding: equal repeated regions of the main graph become one body that is called several times;
and its inverse.

The twelve layers of a transformer are one graph twelve times over. Folded, matching, policy, cost
and timing see it once, and a rewrite of the body is a rewrite of all layers. Regions are found as
in compressors: each node is a token (everything about it but where its arguments come from), a
window of tokens that comes back after p nodes proposes the period p, and a stretch of tokens equal
to those p later is a run of repeats. What then counts is the dataflow, compared exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from xrl_jax.frontends.host import (
    Bindings,
    HostGraph,
    HostProgram,
    assemble,
    attach,
    disassemble,
    is_pinned,
    live,
    source_key,
    struct,
)
from xrl_jax.graph import ops
from xrl_jax.graph.graph import Node, flat_operands, pack_attrs
from xrl_jax.graph.program import Array, Call, Input, Program

MIN_REGION = 8  # compute nodes in a region that is worth a call
_MAX_PERIODS = 64  # proposed periods that are looked at, the most frequent first
_MAX_PHASES = 8  # places to cut a run at that are tried, those with the fewest values across first
_MAX_REFUSED = 64  # stretches whose dataflow does not repeat, before the search ends
_SHARED_SOURCES = ("const", "iota", "array")  # go into the body where all its copies use the same


def fold(program: Program) -> Program:
    """The program with equal repeated regions of its main graph as bodies with a count.

    Only consecutive repeats of at least `MIN_REGION` nodes without effects are folded. What differs
    between the copies becomes an input of the body; what is used outside of a copy an output.
    """
    host = disassemble(program)
    folded = fold_host(host)
    return program if folded is host else _like(program, folded)


def fold_host(host: HostProgram) -> HostProgram:
    """`fold` on the host: a graph too large for any bucket may fit once it is folded."""
    main = live(host.main)
    runs = _find_runs(main)
    return _replace_runs(replace(host, main=main), runs) if runs else host


def unfold(program: Program) -> Program:
    """The program with every "inline" call replaced by its body's nodes, in all graphs."""
    host = disassemble(program)
    done: list[HostGraph] = []
    for body in host.bodies:
        done.append(_inline(body, done, host))
    return _like(program, HostProgram(_inline(host.main, done, host), tuple(done), host.bindings))


def _like(program: Program, host: HostProgram) -> Program:
    return assemble(
        host,
        program.weights,
        in_tree=program.in_tree,
        out_tree=program.out_tree,
        fn=program.fn,
    )


# --- finding -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """`copies` regions of `period` nodes each, one after the other from `start` in `order`."""

    order: Sequence[int]  # indices of the nodes that are no sources
    last_use: (
        np.ndarray
    )  # by position in `order`: the last position with a use; the end for outputs
    start: int
    period: int
    copies: int

    def members(self, copy: int) -> Sequence[int]:
        first = self.start + copy * self.period
        return self.order[first : first + self.period]


def _tokens(graph: HostGraph, order: Sequence[int]) -> np.ndarray:
    """A number for each node of `order`: equal for nodes that differ in their arguments only."""
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
    """The nodes that are no sources, in trace order, but first those that come once and need no
    others.

    So the slices that hand step t of an unrolled loop its row stand before the loop, and the steps
    are equal.
    """
    order = [i for i, n in enumerate(graph.nodes) if n.op not in ops.SOURCES]
    tokens = _tokens(graph, order)
    often = np.bincount(tokens)[tokens] > 1
    ready = [n.op in ops.SOURCES for n in graph.nodes]
    for i, repeats in zip(order, often, strict=True):
        node = graph.nodes[i]
        ready[i] = not repeats and not is_pinned(node) and all(ready[a] for a in node.args)
    return [i for i in order if ready[i]] + [i for i in order if not ready[i]]


def _find_runs(graph: HostGraph) -> list[_Run]:
    """Disjoint runs, those that save most nodes first."""
    order = _order(graph)
    tokens = _tokens(graph, order)
    last_use = _last_uses(graph, order)
    found: list[_Run] = []
    unique = -1  # tokens of taken or refused nodes are replaced by numbers that equal nothing
    refused = 0
    while True:
        stretch = _best_stretch(tokens)
        if stretch is None or refused > _MAX_REFUSED:
            return sorted(found, key=lambda r: r.start)
        start, period, length = stretch
        run = _cut(graph, order, start, period, length, last_use)
        # Where the dataflow does not repeat, one token breaks the stretch, and its parts are tried.
        taken = slice(start + length // 2, start + length // 2 + 1)
        if run is not None:
            found.append(run)
            taken = slice(run.start, run.start + run.period * run.copies)
        refused += run is None
        n = len(tokens[taken])
        tokens[taken] = np.arange(unique - n + 1, unique + 1)
        unique -= n


def _best_stretch(tokens: np.ndarray) -> tuple[int, int, int] | None:
    """The stretch with tokens[i] == tokens[i + period] that saves most: (start, period, length)."""
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
    """Distances after which a window of `MIN_REGION` tokens comes back, the most frequent first."""
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
    """For each position in `order`, the last position that uses its node; the end for outputs."""
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
) -> _Run | None:
    """The best run in a stretch: most copies, then fewest values that cross its cuts."""
    copies = length // period + 1
    crossing = np.zeros(
        len(order) + 2, np.int64
    )  # at each position, values made before it and used at or after it
    for i, end in enumerate(last_use):
        crossing[i + 1] += 1
        crossing[min(end, len(order)) + 1] -= 1
    crossing = np.cumsum(crossing)
    phases = range(start, start + length % period + 1)
    costs = [int(crossing[s : s + copies * period + 1 : period].sum()) for s in phases]
    best: _Run | None = None
    for k in np.argsort(costs, kind="stable")[:_MAX_PHASES]:
        run = _same_dataflow(graph, _Run(order, last_use, phases[int(k)], period, copies))
        if run is not None and (best is None or run.copies > best.copies):
            best = run
        if best is not None and best.copies == copies:
            break
    return best


def _same_dataflow(graph: HostGraph, run: _Run) -> _Run | None:
    """The longest part of the run whose copies have equal inner dataflow."""
    signatures = []
    for c in range(run.copies):
        members = run.members(c)
        at = {n: i for i, n in enumerate(members)}
        args = [[at.get(a) for a in graph.nodes[n].args] for n in members]
        outside = {a for n in members for a in graph.nodes[n].args if a not in at}
        inside_used = [members[r] for r in _results(run, c)]
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
    return _Run(run.order, run.last_use, run.start + first * run.period, run.period, copies)


def _results(run: _Run, copy: int) -> set[int]:
    """The members of a copy, counted from its start, that are used outside of it."""
    first = run.start + copy * run.period
    last_use = run.last_use[first : first + run.period]
    return {int(r) for r in np.flatnonzero(last_use >= first + run.period)}


# --- replacing -----------------------------------------------------------------------------------


def _replace_runs(host: HostProgram, runs: Sequence[_Run]) -> HostProgram:
    """The runs as calls of new bodies."""
    bindings = Bindings(host.bindings)
    bodies = list(host.bodies)
    calls: dict[int, tuple[list[int], list[int], Node]] = {}  # by the last member of a copy
    inside: set[int] = set()
    for run in runs:
        body, operands, results = _body(host.main, run, bindings)
        bodies.append(body)
        ref = bindings.add(Call("inline", (len(bodies) - 1,)))
        for c in range(run.copies):
            members = run.members(c)
            inside.update(members)
            outs = [members[r] for r in results]
            single = host.main.nodes[outs[0]] if len(outs) == 1 else Node("call", dtype="tuple")
            call = Node("call", shape=single.shape, dtype=single.dtype, ref=ref)
            calls[members[-1]] = ([o[c] for o in operands], outs, call)
    nodes: list[Node] = []
    new: dict[int, int] = {}
    for i, node in enumerate(host.main.nodes):
        if i in calls:
            operands, outs, call = calls[i]
            index = attach(nodes, call, [new[o] for o in operands])
            if len(outs) == 1:
                new[outs[0]] = index
                continue
            for k, o in enumerate(outs):
                old = host.main.nodes[o]
                attrs = pack_attrs("proj", {"index": k})
                nodes.append(Node("proj", (index,), attrs, shape=old.shape, dtype=old.dtype))
                new[o] = len(nodes) - 1
        elif i not in inside:
            new[i] = len(nodes)
            nodes.append(replace(node, args=tuple(new[a] for a in node.args)))
    outputs = tuple(new[o] for o in host.main.outputs)
    main = replace(host.main, nodes=tuple(nodes), outputs=outputs)
    return HostProgram(main, tuple(bodies), tuple(bindings.rows))


def _body(
    graph: HostGraph, run: _Run, bindings: Bindings
) -> tuple[HostGraph, list[tuple[int, ...]], list[int]]:
    """A run's body, the operands of each of its inputs (one per copy), and which members result."""
    copies = [run.members(c) for c in range(run.copies)]
    at = {n: i for i, n in enumerate(copies[0])}
    inputs: dict[tuple[int, ...], int] = {}
    operands: list[tuple[int, ...]] = []
    nodes: list[Node] = []
    new: list[int] = []  # index in the body of each member
    for j, member in enumerate(copies[0]):
        args = []
        for slot, arg in enumerate(graph.nodes[member].args):
            if arg in at:
                args.append(new[at[arg]])
                continue
            each = tuple(graph.nodes[c[j]].args[slot] for c in copies)
            if each not in inputs:
                source = graph.nodes[arg]
                inputs[each] = len(nodes)
                if source.op not in _SHARED_SOURCES or len(set(each)) > 1:
                    ref = bindings.add(Input(len(operands)))
                    operands.append(each)
                    source = Node("input", shape=source.shape, dtype=source.dtype, ref=ref)
                nodes.append(source)
            args.append(inputs[each])
        new.append(len(nodes))
        nodes.append(replace(graph.nodes[member], args=tuple(args)))
    results = sorted(set().union(*(_results(run, c) for c in range(run.copies))))
    in_avals = tuple(_aval(graph, each, bindings) for each in operands)
    name = f"repeat of {run.period}"
    return (
        HostGraph(tuple(nodes), tuple(new[j] for j in results), in_avals, name),
        operands,
        results,
    )


def _aval(graph: HostGraph, each: Sequence[int], bindings: Bindings) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an operand; where the table cannot name the dtype, from the bindings."""
    node = graph.nodes[each[0]]
    if node.dtype != "extended":
        return jax.ShapeDtypeStruct(node.shape, node.dtype)
    index = 0
    if node.op == "proj":
        index, node = int(node.attr("index")), graph.nodes[node.args[0]]  # type: ignore[arg-type]
    binding = bindings.rows[node.ref]
    if isinstance(binding, Input):
        return graph.in_avals[binding.position]
    if isinstance(binding, Array):
        return struct(binding.value)
    equation = binding.equation if isinstance(binding, Call) else binding
    assert equation is not None
    return struct(equation.avals[index])


# --- unfolding -----------------------------------------------------------------------------------


def _inline(graph: HostGraph, bodies: Sequence[HostGraph], host: HostProgram) -> HostGraph:
    """The graph with the nodes of `bodies`, which hold no inline calls, in place of its calls."""
    nodes: list[Node] = []
    sources: dict[Any, int] = {}

    def append(node: Node, args: Sequence[int]) -> int:
        if node.op in ops.SOURCES:
            if source_key(node) in sources:
                return sources[source_key(node)]
            sources[source_key(node)] = len(nodes)
        nodes.append(replace(node, args=tuple(args)))
        return len(nodes) - 1

    def inlined(body: HostGraph, operands: Sequence[int]) -> list[int]:
        new: list[int] = []
        for node in body.nodes:
            binding = host.bindings[node.ref] if node.ref >= 0 else None
            if isinstance(binding, Input):
                new.append(operands[binding.position])
            else:
                new.append(append(node, [new[a] for a in node.args]))
        return [new[o] for o in body.outputs]

    new: list[int] = []
    results: dict[int, list[int]] = {}  # of inlined calls with several results
    for i, node in enumerate(graph.nodes):
        binding = host.bindings[node.ref] if node.ref >= 0 else None
        if isinstance(binding, Call) and binding.kind == "inline":
            operands = [new[a] for a in flat_operands(graph.nodes, node)]
            results[i] = inlined(bodies[binding.bodies[0]], operands)
            # A tuple has no node of its own any more: only its projections refer to it.
            new.append(results[i][0] if results[i] else -1)
        elif node.op == "proj" and node.args[0] in results:
            new.append(results[node.args[0]][node.attr("index")])  # type: ignore[index]
        else:
            new.append(append(node, [new[a] for a in node.args]))
    outputs = tuple(new[o] for o in graph.outputs)
    return live(replace(graph, nodes=tuple(nodes), outputs=outputs))
