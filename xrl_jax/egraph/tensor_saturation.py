"""Equality saturation on tensor graphs: iterations until nothing changes or a limit is reached.

Rules that merge two products or convolutions make e-graphs grow doubly exponentially, so they are
used in the first iterations only (Yang et al., MLSys 2021).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.egraph import arrays, seminaive
from xrl_jax.egraph.arrays import HOLE, EGraph
from xrl_jax.egraph.limits import DEFAULT, Iteration, Limits, Stop, reached
from xrl_jax.egraph.patterns import Patterns
from xrl_jax.egraph.seminaive import Stamps, no_stamps
from xrl_jax.egraph.tensor_graph import BUCKETS, COMMUTATIVE
from xrl_jax.egraph.tensor_step import TensorStep, iterate_now, patterns_of
from xrl_jax.language.rule import Rule, Var
from xrl_jax.language.table import CompiledRules, RuleTable, compile_rules
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.runtime.engine_jit import engine_jit

WINDOW = 1024
_FULL = 0.9  # of the limit; below, rebuilding has made room again


def applies(rule: Rule) -> bool:
    """Return whether a rule is of use in an e-graph, which has no lowerings and no equal nodes."""
    joins_equal = len(rule.lhs) == 2 and all(isinstance(t, Var) for t in rule.rhs)
    return rule.lowering is None and not joins_equal


class TensorRules(NamedTuple):
    """Rules in the form that e-graphs of tensors take."""

    rules: tuple[Rule, ...]
    table: RuleTable
    patterns: Patterns
    rule_of: np.ndarray  # [V] index into `rules` of each variant; -1 for unused ones

    def variants(self, wanted: Callable[[Rule], bool]) -> np.ndarray:
        """Return [V] bool, the variants of wanted rules."""
        return self.of(np.array([wanted(r) for r in self.rules], bool))

    def of(self, rules: np.ndarray) -> np.ndarray:
        """Return [V] bool, the variants of these rules [rules] bool."""
        return np.append(rules, False)[self.rule_of]  # the last for unused ones


def tensor_rules(rules: Sequence[Rule]) -> TensorRules:
    """Return those of the rules that are of use in e-graphs."""
    return _compiled(tuple(r for r in rules if applies(r)))


@functools.lru_cache(maxsize=4)  # takes half a second; a search asks several times
def _compiled(rules: tuple[Rule, ...]) -> TensorRules:
    compiled: CompiledRules = compile_rules(rules)
    rule_of = np.asarray(compiled.table.variant_rule)
    return TensorRules(compiled.rules, compiled.table, patterns_of(compiled.table), rule_of)


class Before(NamedTuple):
    """An e-graph before an iteration, the variants [V] that the iteration applied, and pairs of
    classes that were found equal otherwise.
    """

    graph: EGraph
    active: np.ndarray
    equal: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Saturation:
    """How far a saturation came.

    Attributes:
      unpaired: matches of one root of a rule with two that were not paired, for lack of room.
      history: of each iteration, if it was asked for.
    """

    graph: EGraph
    iterations: tuple[Iteration, ...]
    stop: Stop
    unpaired: int = 0
    history: tuple[Before, ...] = ()

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of e-nodes and classes."""
        nodes, classes = arrays.counts(self.graph)
        return int(nodes), int(classes)


def saturate_graph(
    rules: TensorRules,
    graph: EGraph,
    *,
    limits: Limits = DEFAULT,
    merging: int = 1,
    filter_cycles: bool = False,
    remember: bool = False,
    proven: Callable[[EGraph], bool] = lambda _: False,
    tell: Callable[[Iteration], None] = lambda _: None,
) -> Saturation:
    """Saturate an e-graph. Ctrl-C keeps what was found.

    Args:
      graph: rebuilt; in a bucket of any size.
      limits: the number of e-nodes is never exceeded.
      merging: iterations in which rules with two roots are used (Tensat's k_multi).
      filter_cycles: whether e-nodes that close cycles are removed after each iteration, as Tensat
        does; this loses programs, and extraction does not need it.
      remember: whether the e-graphs before each iteration are kept, for proofs.
      proven: whether the saturation may end, given the e-graph after an iteration.
      tell: called after each iteration.
    """
    single = rules.variants(lambda r: len(r.lhs) == 1)
    every = rules.variants(lambda r: True)
    done: list[Iteration] = []
    history: list[Before] = []
    stamps = no_stamps(graph.bucket, len(single))
    unpaired, clock, stop = 0, Stopwatch(limits.seconds), None
    try:
        while stop is None:
            merges = len(done) < merging
            active = every if merges else single
            history += [Before(graph, active)] if remember else []
            step = _step(rules, active, graph, stamps, limits.nodes)
            graph, stamps = step.graph, step.stamps
            unpaired += int(step.missing)
            if filter_cycles:
                graph = without_cycles(graph)
                stamps = no_stamps(graph.bucket, len(single))
            nodes, classes = arrays.counts(graph)
            done.append(Iteration(int(nodes), int(classes), by_rule(rules, step)))
            tell(done[-1])
            if proven(graph):
                stop = Stop.PROVEN
            elif bool(step.full) and (nodes >= _FULL * limits.nodes or not bool(step.changed)):
                stop = Stop.NODES
            elif not bool(step.changed):
                stop = Stop.SATURATED
            else:
                stop = reached(limits, done, clock)
    except KeyboardInterrupt:
        stop = Stop.INTERRUPTED
    return Saturation(graph, tuple(done), stop, unpaired, tuple(history))


def grow_by(
    rules: TensorRules,
    active: np.ndarray,
    graph: EGraph,
    nodes: int,
    stamps: Stamps | None = None,
) -> TensorStep:
    """Do one iteration with active variants [V], up to so many e-nodes.

    Args:
      stamps: of the e-graph; by default nothing was applied to it.
    """
    stamps = no_stamps(graph.bucket, len(active)) if stamps is None else stamps
    return iterate_now(
        rules.table,
        rules.patterns,
        jnp.asarray(active),
        graph,
        stamps,
        jnp.int32(nodes + 1),
        window=WINDOW,
        n_halves=4 * graph.bucket,
    )


def _step(
    rules: TensorRules, active: np.ndarray, graph: EGraph, stamps: Stamps, nodes: int
) -> TensorStep:
    """Return the next iteration, in a larger bucket if the limit allows more e-nodes."""
    while True:
        step = grow_by(rules, active, graph, nodes, stamps)
        larger = [b for b in BUCKETS if b > graph.bucket]
        if not bool(step.full) or graph.bucket > nodes or not larger:
            return step
        graph, stamps = arrays.grow(graph, larger[0]), seminaive.grown(stamps, larger[0])


def by_rule(rules: TensorRules, step: TensorStep) -> tuple[int, ...]:
    """Return the number of matches of each rule."""
    count = np.zeros(len(rules.rules) + 1, np.int64)
    np.add.at(count, rules.rule_of, np.asarray(step.matches))
    return tuple(count[:-1].tolist())


def without_cycles(graph: EGraph) -> EGraph:
    """Return the e-graph without the e-nodes that close cycles: of each cycle that a depth-first
    search meets, the one that was added last is removed.
    """
    args, parent = np.asarray(graph.args), np.asarray(graph.parent)
    op = np.asarray(graph.op).copy()
    members: dict[int, list[int]] = {}
    for slot in np.flatnonzero(op != HOLE).tolist():
        members.setdefault(int(parent[slot]), []).append(slot)
    while (last := _last_on_a_cycle(members, args, np.asarray(graph.roots).tolist())) is not None:
        op[last] = HOLE
        members[int(parent[last])].remove(last)
    return graph if np.all(op == np.asarray(graph.op)) else _restored(graph, jnp.asarray(op))


def _last_on_a_cycle(
    members: dict[int, list[int]], args: np.ndarray, roots: Sequence[int]
) -> int | None:
    """Return the last e-node of a cycle, if there is one."""
    state: dict[int, int] = {}  # of a class: 1 while what is below it is visited, 2 afterwards
    for root in roots:
        path: list[tuple[int, int]] = []  # classes, and their e-nodes that lead on
        stack = [(root, 0, False)]  # a class, the e-node that reads it, whether it is left
        while stack:
            c, reader, leaving = stack.pop()
            if leaving:
                state[c] = 2
                path.pop()
            elif state.get(c) == 1:
                classes = [d for d, _ in path]
                cycle = [e for _, e in path[classes.index(c) + 1 :]]
                return max([*cycle, reader])
            elif c not in state:
                state[c] = 1
                path.append((c, reader))
                stack.append((c, reader, True))
                stack.extend((int(a), e, False) for e in members[c] for a in args[e] if a)
    return None


@engine_jit
def _restored(graph: EGraph, op: jax.Array) -> EGraph:
    return arrays.rebuild(graph._replace(op=op), jnp.asarray(COMMUTATIVE))
