"""Programs from e-graphs: extraction with costs that depend on what is extracted.

What an e-node costs depends on its neighbours in the program, and on timings that are not taken
yet. So a program is extracted under the present costs, its operators are timed, and costs are
computed anew under this choice, until they no longer change what is extracted. This begins with
costs that assume nothing, then with the best program found. Only programs that are priced as wholes
are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from xrl_jax.cost.enodes import Choice, allowed_lowerings, enode_costs_now, fitting_now, no_choice
from xrl_jax.egraph.arrays import EGraph
from xrl_jax.egraph.extraction.extract import extract
from xrl_jax.egraph.extraction.instance import Instance
from xrl_jax.egraph.extraction.of_egraph import enodes_of, instance_of_egraph
from xrl_jax.egraph.followed import followed
from xrl_jax.egraph.tensor_graph import bucket_for, egraph_of, extracted
from xrl_jax.egraph.tensor_saturation import grow_by, tensor_rules
from xrl_jax.graph import graph as graph_lib
from xrl_jax.graph.graph import TensorGraph
from xrl_jax.measure.stopwatch import Stopwatch
from xrl_jax.search.base import Problem, Step
from xrl_jax.search.descend import Descent, measure_graph, untimed
from xrl_jax.search.moves import chooses_lowering
from xrl_jax.search.run import Reached, Turn
from xrl_jax.search.states import Space, State, in_one_bucket


def room_for(nodes: int, n: int) -> int:
    """Return the limit on the e-nodes of a graph that begins with n: a large program is searched
    like a small one, however low the limit.
    """
    return max(nodes, 2 * n)


def start_buckets(problem: Problem, nodes: int) -> list[tuple[TensorGraph, int]]:
    """Return the graphs of the program, each with the bucket that it is searched in if the e-graph
    begins with it alone and has at most so many e-nodes.
    """
    return [
        (g, bucket_for(room_for(nodes, int(np.count_nonzero(np.asarray(g.nodes.op))))))
        for g in in_one_bucket(problem.program)
    ]


def compile_for_egraphs(problem: Problem, graph: TensorGraph, bucket: int) -> None:
    """Compile what searches on e-graphs of a bucket call, or read it from JAX's cache."""
    space = Space(problem.rules, jnp.asarray(problem.program.digests()))
    rules = tensor_rules(problem.rules.rules)
    costs = problem.oracle.costs
    egraph = egraph_of([space.start(graph, costs).graph], bucket)
    grow_by(rules, np.zeros(len(rules.rule_of), bool), egraph, bucket)
    right = fitting_now(egraph, allowed_lowerings(problem.rules.rules))
    enode_costs_now(costs, egraph, right, no_choice(bucket), jnp.int32(1))


@dataclass(frozen=True)
class Extraction:
    """Extraction of programs from an e-graph.

    Attributes:
      rounds: most programs that are extracted.
      rounds_share: share of the time for these rounds; the rest is for timing operators.
      exact_share: share of the time left, at most, for mixed-integer programs, which are solved
        once costs do not change any more.
      keep: number of programs that are returned.
      descent: gives the operators of a program their lowerings under exact costs.
    """

    rounds: int = 20
    rounds_share: float = 0.75
    exact_share: float = 0.4
    keep: int = 3
    descent: Descent = field(default_factory=Descent)

    def __call__(
        self,
        turn: Turn,
        egraph: EGraph,
        steps: list[Step],
        *,
        afresh: bool = True,
        programs: bool = True,
    ) -> list[Reached]:
        """Return the best of the turn's states and of the programs found whose operators are all
        timed, best first: a prediction may be far too good, and extraction looks for such.

        Args:
          turn: its states are of the graph that the e-graph was made from.
          steps: what led to the e-graph; those of a descent are added.
          afresh: whether programs unlike the best one are looked for.
          programs: whether mixed-integer programs are solved at the end.
        """
        work = _Work(self, turn, egraph, steps)
        clock = turn.clock.part(self.rounds_share)
        if afresh:
            work.begin_with_nothing()
            work.rounds(clock)
        work.begin_with_best()
        work.rounds(clock)
        while programs and work.rounds(clock, programs=True):
            pass
        return work.ranked()


class _Work:
    """An extraction under way."""

    def __init__(self, config: Extraction, turn: Turn, egraph: EGraph, steps: list[Step]) -> None:
        self.config, self.turn, self.egraph, self.steps = config, turn, egraph, steps
        self.like = turn.reached[0][0].graph
        self.n_outputs = int((np.asarray(self.like.globals.outputs) >= 0).sum())
        self.right = fitting_now(egraph, allowed_lowerings(turn.space.rules.rules))
        self.made = 0  # rounds
        self.choice: Choice
        self.found = list(turn.reached)
        self.seen: set[tuple[int, int]] = set()

    def begin_with_nothing(self) -> None:
        """Compute the next costs as if all values were written to memory."""
        self.choice = no_choice(self.egraph.bucket)

    def begin_with_best(self) -> None:
        """Compute the next costs under the best program found, where the e-graph has it."""
        best = followed(self.egraph, self.found[0][0].graph)
        self.choice = Choice(best.node, best.lowering)

    def rounds(self, clock: Stopwatch, *, programs: bool = False) -> bool:
        """Extract until nothing changes; return whether the first program was a new one.

        Args:
          clock: for extraction.
          programs: whether mixed-integer programs are solved for the first one.
        """
        first = self.made
        while self.made < self.config.rounds and not self.turn.run.out_of_budget(clock):
            self.made += 1
            if not self.round(clock.part(self.config.exact_share), programs=programs):
                return self.made > first + 1
            self.turn.run.report("extracting")
            programs = False
        return False

    def round(self, clock: Stopwatch, *, programs: bool) -> bool:
        """Extract a program; return whether another one may be better.

        Args:
          clock: for extraction.
          programs: whether mixed-integer programs are solved.
        """
        run, space = self.turn.run, self.turn.space
        oracle = run.problem.oracle
        cost, lowering = enode_costs_now(
            oracle.costs, self.egraph, self.right, self.choice, jnp.int32(self.n_outputs)
        )
        instance = instance_of_egraph(self.egraph, np.asarray(cost, np.float64))
        done = extract(instance, lambda: clock.left, start=self._start(instance), programs=programs)
        node = enodes_of(instance, done.full)
        graph = extracted(self.egraph, node, self.n_outputs, np.asarray(lowering))
        self.choice = Choice(jnp.asarray(node), lowering)
        state = space.start(self._in_bucket(graph), oracle.costs)
        run.candidates += 1
        if done.interrupted:
            self._keep([(state, self.steps)])
            raise KeyboardInterrupt
        identity = space.identity(state)
        new = identity not in self.seen
        self.seen.add(identity)
        known = self._time(state)
        reached = [(space.reprice(state, oracle.costs), self.steps)]
        if not new and not known:
            return False
        try:
            turn = self.turn._replace(reached=reached)
            reached = [self.config.descent(turn, only=chooses_lowering, phase="extracting")]
        finally:  # the descent has recorded its own state, which may not be the best
            self._keep(reached)
        return True

    def ranked(self) -> list[Reached]:
        """Return the best of the programs whose operators are all timed and those of the turn, best
        first.
        """
        oracle = self.turn.run.problem.oracle
        while self._time(self._keep([])[0][0]):
            pass
        self.found = [r for r in self.found if not untimed(oracle, r[0].graph)]
        return self._keep(self.turn.reached)

    def _keep(self, more: Sequence[Reached]) -> list[Reached]:
        """Keep the best programs under the present costs; return them, best first."""
        run, space = self.turn.run, self.turn.space
        costs = run.problem.oracle.costs
        found = {
            space.identity(s): (space.reprice(s, costs), steps) for s, steps in [*more, *self.found]
        }
        self.found = sorted(found.values(), key=lambda r: r[0].seconds)[: self.config.keep]
        run.keep(self.turn.index, self.found)
        return self.found

    def _time(self, state: State) -> int:
        """Time the operators of a program; return how many were unknown."""
        run = self.turn.run
        limit = run.budget.measurements
        return measure_graph(run.problem.oracle, state.graph, self.turn.clock, limit)

    def _start(self, instance: Instance) -> np.ndarray | None:
        """Return the last choice among the e-nodes of an instance, -1 for classes without one; None
        where the instance lacks some.
        """
        place = {int(name): i for i, name in enumerate(instance.names)}
        last = np.asarray(self.choice.node)
        start = np.full(instance.n_classes, -1)
        for c in np.unique(instance.owner).tolist():
            if last[c] and int(last[c]) not in place:
                return None
            start[c] = place[int(last[c])] if last[c] else -1
        return start

    def _in_bucket(self, graph: TensorGraph) -> TensorGraph:
        """Return the graph in the bucket of the graph searched, so that nothing is compiled."""
        graph = graph_lib.with_room_for_outputs(graph, len(self.like.globals.outputs))
        size = len(self.like.nodes.op)
        return graph_lib.grow(graph, size) if len(graph.nodes.op) < size else graph
