"""Equality saturation on terms: iterations until nothing changes or a limit is reached."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from xrl_jax.egraph import arrays
from xrl_jax.egraph.arrays import EGraph
from xrl_jax.egraph.limits import DEFAULT, Iteration, Limits, Stop, reached
from xrl_jax.egraph.patterns import TermTable, compile_terms
from xrl_jax.egraph.term_graph import class_of, egraph_of, terms_of
from xrl_jax.egraph.term_step import Step, folded_now, folds_of, is_contradictory_now, iterate_now
from xrl_jax.language.rule import Rule
from xrl_jax.language.terms import Expression, Language
from xrl_jax.measure.stopwatch import Stopwatch

BUCKETS = (2048, 16384, 131072)


class Schedule(enum.Enum):
    """Which rules an iteration applies.

    BACKOFF bans a rule with more than 1,000 matches for five iterations, then twice as many matches
    for twice as long, and so on, as egg does.
    """

    ALL = "all rules"
    TURNS = "one rule after the other"
    BACKOFF = "all rules but those with very many matches"


@dataclass(frozen=True)
class Saturated:
    """An e-graph of terms and how it came about.

    Attributes:
      graph: `graph.roots` are the classes of the expressions.
      symbols: names of symbols, by number.
    """

    language: Language
    rules: tuple[Rule, ...]
    graph: EGraph
    symbols: tuple[str, ...]
    iterations: tuple[Iteration, ...]
    stop: Stop

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of e-nodes and classes."""
        nodes, classes = arrays.counts(self.graph)
        return int(nodes), int(classes)

    @property
    def is_contradictory(self) -> bool:
        """Whether two different numbers are known to be equal, so that the rules are wrong."""
        return bool(is_contradictory_now(self.graph))

    def equals_first(self, expression: Expression) -> bool:
        """Return whether an expression is in the e-graph, in the class of the first one."""
        found = class_of(self.graph, expression, self.language, self.symbols)
        return found == int(self.graph.roots[0])


def saturate_terms(
    expressions: Sequence[Expression],
    language: Language,
    rules: Sequence[Rule] | None = None,
    *,
    goals: Sequence[Expression] = (),
    limits: Limits = DEFAULT,
    schedule: Schedule = Schedule.BACKOFF,
    folding: bool = True,
) -> Saturated:
    """Saturate the e-graph of expressions. Ctrl-C keeps what was found.

    Args:
      rules: None for all rules of the language.
      goals: stop once all of these are equal to the first expression; they are not added.
      folding: whether operators of numbers are computed.

    Raises:
      ValueError: there are no expressions, or too many.
    """
    rules = language.rules if rules is None else tuple(rules)
    run = _Run(language, rules, folding)
    terms = terms_of(expressions, language)
    bucket = next((b for b in BUCKETS if 2 * len(terms.nodes) < b), None)
    if not expressions or bucket is None:
        raise ValueError(
            f"saturation takes 1 to {BUCKETS[-1] // 2} e-nodes, not {len(terms.nodes)}"
        )
    graph = run.fold(egraph_of(terms, bucket))
    chooser = _CHOOSERS[schedule](run)
    iterations: list[Iteration] = []
    clock, stop = Stopwatch(limits.seconds), None
    try:
        while stop is None:
            done = run.step(graph, chooser.active(graph))
            if done is None:
                stop = Stop.NODES
                break
            graph = done.graph
            matches = tuple(np.asarray(done.matches)[: len(rules)].tolist())
            iterations.append(Iteration(*run.counts(graph), matches))
            proven = bool(goals) and all(
                class_of(graph, goal, language, terms.symbols) == int(graph.roots[0])
                for goal in goals
            )
            saturated = chooser.is_saturated(bool(done.changed))
            if proven or saturated:
                stop = Stop.PROVEN if proven else Stop.SATURATED
            else:
                stop = reached(limits, iterations, clock)
    except KeyboardInterrupt:
        stop = Stop.INTERRUPTED
    return Saturated(language, rules, graph, terms.symbols, tuple(iterations), stop)


class _Run:
    """What stays the same during a saturation."""

    def __init__(self, language: Language, rules: tuple[Rule, ...], folding: bool) -> None:
        self.table: TermTable = compile_terms(rules, language)
        self.n_rules = len(rules)
        self.folds = folds_of(language) if folding else ()
        self.n_ops = len(language.vocabulary.operators)

    def window(self, graph: EGraph) -> int:
        """Rows of a window: more in a large bucket, where there are more matches."""
        return max(256, min(graph.bucket // 4, 8192))

    def step(self, graph: EGraph, active: np.ndarray, *, counting: bool = False) -> Step | None:
        """Return the next iteration, in a larger bucket if needed; None where none is larger."""
        while True:
            done = iterate_now(
                self.table,
                jnp.asarray(active),
                graph,
                jnp.bool_(counting),
                n_ops=self.n_ops,
                window=self.window(graph),
                folds=self.folds,
            )
            if not bool(done.full):
                return done
            bucket = next((b for b in BUCKETS if b > graph.bucket), None)
            if bucket is None:
                return None
            graph = arrays.grow(graph, bucket)

    def fold(self, graph: EGraph) -> EGraph:
        return folded_now(graph, folds=self.folds) if self.folds else graph

    def counts(self, graph: EGraph) -> tuple[int, int]:
        nodes, classes = arrays.counts(graph)
        return int(nodes), int(classes)

    @property
    def every(self) -> np.ndarray:
        """All rules, as flags [V]."""
        return np.asarray(self.table.rule) >= 0


class _All:
    """Chooses all rules."""

    def __init__(self, run: _Run) -> None:
        self.run = run

    def active(self, graph: EGraph) -> np.ndarray:
        """Return the rules that the next iteration applies, as flags [V]."""
        return self.run.every

    def is_saturated(self, changed: bool) -> bool:
        """Return whether nothing is left to try, after an iteration that changed something or not;
        called once for each iteration.
        """
        return not changed


class _Turns(_All):
    """Chooses one rule after the other."""

    turn, unchanged = -1, 0

    def active(self, graph: EGraph) -> np.ndarray:
        self.turn = (self.turn + 1) % max(self.run.n_rules, 1)
        return np.arange(len(self.run.every)) == self.turn

    def is_saturated(self, changed: bool) -> bool:
        self.unchanged = 0 if changed else self.unchanged + 1
        return self.unchanged >= self.run.n_rules


class _Backoff(_All):
    """Bans rules with very many matches for a while."""

    MATCHES, ITERATIONS = 1000, 5

    def __init__(self, run: _Run) -> None:
        super().__init__(run)
        self.now = -1
        self.bans = np.zeros(len(run.every), np.int64)
        self.until = np.zeros(len(run.every), np.int64)

    def active(self, graph: EGraph) -> np.ndarray:
        self.now += 1
        free = self.run.every & (self.until <= self.now)
        counted = self.run.step(graph, free, counting=True)
        assert counted is not None  # counting needs no room
        banned = free & (np.asarray(counted.matches) > self.MATCHES << self.bans)
        self.until[banned] = self.now + (self.ITERATIONS << self.bans[banned])
        self.bans[banned] += 1
        return free & ~banned

    def is_saturated(self, changed: bool) -> bool:
        waiting = self.run.every & (self.until > self.now + 1)
        if changed or not waiting.any():
            return not changed
        self.until[waiting] -= self.until[waiting].min() - self.now - 1  # the first is free next
        return False


_CHOOSERS = {Schedule.ALL: _All, Schedule.TURNS: _Turns, Schedule.BACKOFF: _Backoff}
