"""Monte-Carlo tree search over e-graphs, after Hartmann, He and Yoneki (PACT 2024).

An e-graph of all programs outgrows any limit, so which rules are applied, and in which order,
decides what it holds. Tree search looks for a good order; an action applies a rule, or a group of
rules, wherever they match. Differences from the paper: the groups; the reward sees merges
(`egraph.dag_cost`); rollouts prefer actions that occurred in good ones; after each round the best
program is extracted and timed, and the next round begins with a small e-graph of it; the first
round, and any after a tree search that found nothing, is plain saturation; a trained policy may
say which rules are promising.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost.enodes import allowed_lowerings, least_cost_now, no_choice
from xrl_jax.egraph import uct
from xrl_jax.egraph.arrays import EGraph, grow
from xrl_jax.egraph.limits import Limits
from xrl_jax.egraph.tensor_graph import bucket_for, egraph_of
from xrl_jax.egraph.tensor_saturation import tensor_rules
from xrl_jax.search.base import Budget, Problem, SearchResult, Step
from xrl_jax.search.descend import Descent
from xrl_jax.search.extracting import (
    Extraction,
    compile_for_egraphs,
    room_for,
    start_buckets,
)
from xrl_jax.search.run import Reached, Turn
from xrl_jax.search.saturating import NO_PRIOR, Saturating
from xrl_jax.search.tensat import (
    after_descents,
    in_one_egraph,
    saturated,
    steps_to,
    with_merged,
)
from xrl_jax.search.walk import Walk

STEP = "mcts-over-e-graphs"


class Prior(Protocol):
    """What is known of a program's rules before the search."""

    def compile(self, problem: Problem) -> None: ...

    def __call__(self, problem: Problem, key: jax.Array) -> Mapping[str, float]:
        """Return how promising rules are, by name; the sum is at most 1."""
        ...


@dataclass(frozen=True)
class EqsatMCTS:
    """Tree search over e-graphs.

    Attributes:
      nodes: see `Tensat` (Hartmann: 2,000).
      simulations: of each round (Hartmann: 128 for each action that is taken).
      rounds: most rounds.
      patience: rounds in a row that may find nothing better.
      batch: simulations that are made at the same time.
      tree_share: share of a round's time for tree search; the rest is for extraction.
      exact_share: share of the time, at least, for mixed-integer programs, after the last round.
      greedy_share: see `Tensat`.
      own_start: see `Tensat`.
      prior: None for none.
      uct: parameters of the tree search.
    """

    nodes: int = 2000
    simulations: int = 128
    rounds: int = 8
    patience: int = 2
    batch: int = 2
    tree_share: float = 0.75
    exact_share: float = 0.4
    greedy_share: float = 0.4
    own_start: bool = False
    prior: Prior | None = None
    uct: uct.UCT = uct.DEFAULT
    extraction: Extraction = field(default_factory=Extraction)
    descent: Descent = field(default_factory=Descent)
    walk: Walk = field(default_factory=Walk)

    def compile(self, problem: Problem) -> None:
        """Compile what the search calls."""
        allowed = allowed_lowerings(problem.rules.rules)
        for graph, bucket in start_buckets(problem, self.nodes):
            compile_for_egraphs(problem, graph, bucket)
            egraph, costs = egraph_of([graph], bucket), problem.oracle.costs
            least_cost_now(costs, egraph, allowed, no_choice(bucket), jnp.int32(1))
        if self.prior is not None:
            self.prior.compile(problem)

    def __call__(self, problem: Problem, budget: Budget, key: jax.Array) -> SearchResult:
        asking, key = jax.random.split(key)

        @functools.cache
        def prior() -> Mapping[str, float]:
            return NO_PRIOR if self.prior is None else self.prior(problem, asking)

        search = functools.partial(self._searched, prior=prior)
        phases = after_descents(self.descent, self.greedy_share, search)
        return self.walk(problem, budget, key, phases, from_starting_points=not self.own_start)

    def _searched(self, turn: Turn, prior: Callable[[], Mapping[str, float]]) -> list[Reached]:
        """Return the best programs found, best first."""
        clock, run, key = turn.clock, turn.run, turn.key
        reached = sorted(turn.reached, key=lambda r: r[0].seconds)
        searching = clock.part(1 - self.exact_share)
        idle, last, plainly = 0, None, True
        for n in range(self.rounds):
            if run.out_of_budget(searching) or idle > self.patience:
                break
            key, this = jax.random.split(key)
            part = searching.part(1 / (self.rounds - n))
            now = turn._replace(reached=reached, clock=part, key=this)
            grown = self._saturated(now) if plainly else self._grown(now, prior())
            found = reached
            if grown is not None:
                found = self.extraction(now, *grown, afresh=plainly, programs=False)
            better = found[0][0].seconds < reached[0][0].seconds * (1 - 1e-3)
            last = grown if better or last is None else last
            idle = 0 if better else idle + 1
            plainly = not plainly and not better
            reached = found
        if last is not None:
            reached = self.extraction(turn._replace(reached=reached), *last)
        best = self.descent(turn._replace(reached=reached[:1]), phase="descending")
        return [best, *reached]

    def _saturated(self, turn: Turn) -> tuple[EGraph, list[Step]]:
        """Return the e-graph that all rules make, and what led to it."""
        seconds = self.tree_share * turn.clock.left
        done, steps = saturated(turn, Limits(nodes=self.nodes, seconds=seconds), merging=1)
        return done.graph, steps

    def _grown(self, turn: Turn, prior: Mapping[str, float]) -> tuple[EGraph, list[Step]] | None:
        """Return the best e-graph that tree search finds, and what led to it; None where it finds
        none that is better than the first.
        """
        run, space, _, index, clock, key = turn
        rules = tensor_rules(space.rules.rules)
        seeds = with_merged(turn)
        graphs = in_one_egraph(seeds)
        n_outputs = int((np.asarray(graphs[0].globals.outputs) >= 0).sum())
        start = egraph_of(graphs)
        nodes = room_for(self.nodes, int(start.n))
        environment = Saturating(
            rules,
            run.problem.oracle.costs,
            nodes=nodes,
            allowed=allowed_lowerings(space.rules.rules),
            n_outputs=n_outputs,
            threads=self.batch,
            prior=prior,
        )
        start = grow(start, max(start.bucket, bucket_for(nodes)))
        state = environment.start(start, seeds[0][0].graph)
        searching = clock.part(self.tree_share)

        def going() -> bool:
            run.report("tree search")
            return not searching.done

        found = uct.search(
            environment,
            state,
            environment.cost(state),
            key,
            settings=self.uct,
            simulations=self.simulations,
            batch=self.batch,
            going=going,
        )
        run.candidates += found.simulations
        if found.state is state:
            return None
        grown = found.state.graph
        text = f"{int(grown.n) - 1:,} e-nodes after {found.simulations} simulations"
        steps = steps_to(seeds, rules, environment.used, Step(index, STEP, text, 0.0))
        return grown, steps
