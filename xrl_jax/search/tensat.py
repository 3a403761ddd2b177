"""Equality saturation as a search, after Tensat (Yang et al., MLSys 2021).

All rewrites of a graph are kept in one e-graph; then the cheapest program is extracted. Differences
from Tensat: the e-graph also holds what greedy descents made of the graph; costs are those of each
operator's best lowering and depend on its neighbours (`search.extracting`); cycles are excluded
from what is extracted, not from the e-graph; and the extracted programs are timed whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from xrl_jax.egraph.limits import Limits, Stop
from xrl_jax.egraph.tensor_graph import BUCKETS, egraph_of, roots_of
from xrl_jax.egraph.tensor_saturation import (
    Saturation,
    TensorRules,
    saturate_graph,
    tensor_rules,
)
from xrl_jax.graph.graph import TensorGraph
from xrl_jax.search.base import Budget, Problem, SearchResult, Step
from xrl_jax.search.descend import Descent
from xrl_jax.search.extracting import (
    Extraction,
    compile_for_egraphs,
    room_for,
    start_buckets,
)
from xrl_jax.search.moves import chooses_lowering
from xrl_jax.search.run import Reached, Turn
from xrl_jax.search.starting_points import run_macro, siblings_merged
from xrl_jax.search.walk import GraphSearch, Phase, Walk

STEP = "equality-saturation"


@dataclass(frozen=True)
class Tensat:
    """Equality saturation and extraction.

    Attributes:
      nodes: most e-nodes of a graph (Tensat: 50,000), if it begins with at most half as many.
      iterations: most iterations (Tensat's k_max).
      merging: iterations in which rules that merge two operators are used (Tensat's k_multi);
        unless 0, the e-graph also begins with the program in which all siblings are merged.
      filter_cycles: whether e-nodes that close cycles are removed, as Tensat does.
      greedy_share: share of the time for greedy descents, whose results begin in the e-graph; 0 for
        none.
      saturation_share: share of the time left, at most, for saturation.
      own_start: begin with the program itself only, not with the other starting points.
    """

    nodes: int = 10_000
    iterations: int = 15
    merging: int = 1
    filter_cycles: bool = False
    greedy_share: float = 0.4
    saturation_share: float = 0.3
    own_start: bool = False
    extraction: Extraction = field(default_factory=Extraction)
    descent: Descent = field(default_factory=Descent)
    walk: Walk = field(default_factory=Walk)

    def compile(self, problem: Problem) -> None:
        """Compile what the search calls."""
        for graph, last in start_buckets(problem, self.nodes):
            first = egraph_of([graph]).bucket
            for bucket in BUCKETS:
                if first <= bucket <= last:
                    compile_for_egraphs(problem, graph, bucket)

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        phases = after_descents(self.descent, self.greedy_share, self._saturated)
        return self.walk(problem, budget, key, phases, from_starting_points=not self.own_start)

    def _saturated(self, turn: Turn) -> list[Reached]:
        """Return the best programs of the e-graph and those it was made from, best first."""
        done, steps = saturated(
            turn,
            Limits(self.iterations, self.nodes, self.saturation_share * turn.clock.left),
            merging=self.merging,
            filter_cycles=self.filter_cycles,
        )
        found = self.extraction(turn, done.graph, steps)
        best = self.descent(turn._replace(reached=found[:1]), phase="descending")
        return [best, *found]


def saturated(
    turn: Turn, limits: Limits, *, merging: int, filter_cycles: bool = False
) -> tuple[Saturation, list[Step]]:
    """Return the saturated e-graph of the turn's states, and what led to it.

    Args:
      limits: more e-nodes are allowed where the states have many.
      merging, filter_cycles: see `Tensat`.

    Raises:
      KeyboardInterrupt: after Ctrl-C.
    """
    rules = tensor_rules(turn.space.rules.rules)
    seeds = with_merged(turn) if merging else turn.reached
    start = egraph_of(in_one_egraph(seeds))
    done = saturate_graph(
        rules,
        start,
        limits=replace(limits, nodes=room_for(limits.nodes, int(start.n))),
        merging=merging,
        filter_cycles=filter_cycles,
        tell=lambda _: turn.run.report("saturating"),
    )
    if done.stop is Stop.INTERRUPTED:
        raise KeyboardInterrupt
    turn.run.candidates += sum(sum(i.matches) for i in done.iterations)
    used = np.sum([i.matches for i in done.iterations], axis=0) > 0
    nodes, classes = done.counts
    text = f"{nodes:,} e-nodes in {classes:,} classes; {done.stop.value}"
    return done, steps_to(seeds, rules, used, Step(turn.index, STEP, text, 0.0))


def after_descents(descent: Descent, share: float, search: GraphSearch) -> tuple[Phase, ...]:
    """Return the phases of a search that begins with what two descents find, with lowerings only
    and then with every rule.

    Args:
      share: of the time for the descents; 0 for none.
    """

    def greedily(turn: Turn) -> list[Reached]:
        lowered = descent(
            turn._replace(clock=turn.clock.part(0.5)), only=chooses_lowering, phase="lowerings"
        )
        return [descent(turn._replace(reached=[lowered]), phase="greedy"), lowered, *turn.reached]

    return (*([Phase(greedily, share)] if share else []), Phase(search))


def with_merged(turn: Turn) -> list[Reached]:
    """Return the states of the turn, and the first one with all products and convolutions of one
    operand merged, where there are several. Rules alone get there through all subsets.
    """
    run, space, reached, index, clock, _ = turn
    merged = reached[0]
    for macro in siblings_merged(space.rules):
        merged = run_macro(space, merged, index, run.problem.oracle.costs, macro, clock.part(0.1))
    return [*reached, merged] if len(merged[1]) > len(reached[0][1]) else reached


def in_one_egraph(reached: Sequence[Reached]) -> list[TensorGraph]:
    """Return the graphs of states that one e-graph may hold: those that fit, and the first only if
    it has pinned nodes, which must not be run twice.
    """
    graphs = [state.graph for state, _ in reached]
    if any(map(_has_pinned, graphs)):
        return graphs[:1]
    sizes = itertools.accumulate(np.count_nonzero(np.asarray(g.nodes.op)) for g in graphs)
    return [g for g, n in zip(graphs, sizes, strict=True) if 2 * n < BUCKETS[-1]]


def _has_pinned(graph: TensorGraph) -> bool:
    return len(roots_of(graph)) > int((np.asarray(graph.globals.outputs) >= 0).sum())


def steps_to(
    seeds: Sequence[Reached], rules: TensorRules, used: np.ndarray, step: Step
) -> list[Step]:
    """Return what led to an e-graph: the steps to the first of the programs that it began with, one
    for the e-graph, and whatever assumes something, since any program in it may rest on that.

    Args:
      used: [rules] bool, rules that the e-graph was grown by.
      step: the one for the e-graph.
    """
    assuming = {r.name for r in rules.rules if r.assumes}
    steps = [*seeds[0][1], step]
    steps += [s for _, taken in seeds[1:] for s in taken if s.rule in assuming and s not in steps]
    grown = [r.name for r, n in zip(rules.rules, used, strict=True) if r.assumes and n]
    return steps + [Step(step.graph, name, "in the e-graph", 0.0) for name in grown]
