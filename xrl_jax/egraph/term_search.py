"""Which rules to apply, and in which order: search for the cheapest form of a term.

An e-graph of all forms outgrows any limit, so what is found depends on the order of the rules.
`search_terms` looks for a good order by Monte-Carlo tree search, with one rule for an action. When
it ends, it starts again from the expression found, whose e-graph is small.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.egraph import uct
from xrl_jax.egraph.arrays import EGraph
from xrl_jax.egraph.patterns import TermTable, compile_terms
from xrl_jax.egraph.term_graph import egraph_of, terms_of
from xrl_jax.egraph.term_step import Folds, folded_now, folds_of, is_contradictory_now, iterate
from xrl_jax.egraph.tree_cost import cheapest, cheapest_now, expression_of
from xrl_jax.egraph.uct import UCT, Request, Simulated
from xrl_jax.language.rule import Rule
from xrl_jax.language.terms import Expression, Language
from xrl_jax.runtime.engine_jit import engine_jit

BUCKET = 2048
_WINDOW = 256
_MOST_ACTIONS = 40  # of a rollout


class Found(NamedTuple):
    """The result of a search.

    Attributes:
      cost: number of operators and leaves of the expression.
      simulations: made in all.
      starts: number of expressions that an e-graph was grown from.
    """

    expression: Expression
    cost: float
    simulations: int
    starts: int


def search_terms(
    expression: Expression,
    language: Language,
    rules: Sequence[Rule] | None = None,
    *,
    key: jax.Array,
    nodes: int = 500,
    simulations: int = 1000,
    restarts: bool = True,
    folding: bool = True,
    settings: UCT = uct.DEFAULT,
    going: Callable[[], bool] = lambda: True,
) -> Found:
    """Search for the smallest expression that the rules show to equal the given one.

    Args:
      rules: None for all rules of the language.
      nodes: an e-graph with so many e-nodes is not grown further.
      simulations: the most that are made in all.
      restarts: whether to search again from the expression found, as long as that helps.
      folding: whether operators of numbers are computed.
      going: whether to go on, asked before each simulation.

    Raises:
      ValueError: the expression is too large for the e-graph's bucket, or the rules prove that two
        numbers are equal.
    """
    rules = language.rules if rules is None else tuple(rules)
    folds = folds_of(language) if folding else ()
    environment = _Environment(rules, language, folds, nodes)
    found = Found(expression, float("inf"), 0, 0)
    while found.simulations < simulations and going():
        key, this = jax.random.split(key)
        terms = terms_of([found.expression], language)
        if 2 * len(terms.nodes) > BUCKET:
            raise ValueError(f"the expression has {len(terms.nodes)} parts, at most {BUCKET // 2}")
        graph = folded_now(egraph_of(terms, BUCKET), folds=folds)
        cost = float(_cost_of(graph))
        done = uct.search(
            environment,
            graph,
            cost,
            this,
            settings=settings,
            simulations=simulations - found.simulations,
            going=going,
        )
        if bool(is_contradictory_now(done.state)):
            raise ValueError("the rules prove that two different numbers are equal")
        choice = cheapest_now(done.state, jnp.ones(BUCKET, jnp.float32))
        best = expression_of(done.state, choice, int(done.state.roots[0]), language, terms.symbols)
        better = done.cost < found.cost
        found = Found(
            best if better else found.expression,
            min(done.cost, found.cost),
            found.simulations + max(done.simulations, 1),
            found.starts + 1,
        )
        if not restarts or done.cost >= cost:
            break
    return found


class _Environment:
    """E-graphs below a limit of e-nodes; an action applies a rule wherever it matches."""

    def __init__(self, rules: Sequence[Rule], language: Language, folds: Folds, nodes: int) -> None:
        self.table = compile_terms(rules, language)
        self.n_actions = len(rules)
        self._simulate = functools.partial(
            _simulate, n_ops=len(language.vocabulary.operators), folds=folds
        )
        self.nodes = nodes

    def weights(self, state: EGraph) -> np.ndarray:
        return np.ones(self.n_actions)

    def simulate(self, requests: Sequence[Request[EGraph]]) -> list[Simulated[EGraph]]:
        return [self._simulated(request) for request in requests]

    def _simulated(self, request: Request[EGraph]) -> Simulated[EGraph]:
        state, action, key, preferences = request
        missing = len(self.table.rule) - self.n_actions
        logits = np.pad(preferences, (0, missing), constant_values=-np.inf).astype(np.float32)
        done = self._simulate(
            self.table, state, jnp.int32(action), key, jnp.asarray(logits), jnp.int32(self.nodes)
        )
        return Simulated(
            done.child if bool(done.changed) else None,
            float(done.cost),
            int(done.child.n) > self.nodes,
            done.final,
            float(done.final_cost),
            np.asarray(done.used)[: self.n_actions],
        )


class _Rollout(NamedTuple):
    child: EGraph
    changed: jax.Array
    cost: jax.Array
    final: EGraph
    final_cost: jax.Array
    used: jax.Array  # [V]


class _Rolling(NamedTuple):
    """A rollout under way."""

    made: jax.Array  # int32, number of rules tried
    graph: EGraph
    key: jax.Array
    idle: jax.Array  # [V] bool, rules that change nothing now
    used: jax.Array  # [V] int32, how often each rule changed the e-graph


@functools.partial(engine_jit, static_argnames=("n_ops", "folds"))
def _simulate(
    table: TermTable,
    graph: EGraph,
    action: jax.Array,
    key: jax.Array,
    logits: jax.Array,
    nodes: jax.Array,
    *,
    n_ops: int,
    folds: Folds,
) -> _Rollout:
    """Apply a rule, then others at random until the e-graph has so many e-nodes, or no rule changes
    it.
    """
    rules = jnp.arange(len(table.rule))

    def applied(graph: EGraph, rule: jax.Array) -> tuple[EGraph, jax.Array]:
        done = iterate(
            table, rules == rule, graph, jnp.bool_(False), n_ops=n_ops, window=_WINDOW, folds=folds
        )
        return done.graph, done.changed

    child, changed = applied(graph, action)

    def going(carry: _Rolling) -> jax.Array:
        made, graph, _, idle, _ = carry
        left = jnp.any(jnp.isfinite(logits) & ~idle)
        return changed & left & (graph.n <= nodes) & (made < _MOST_ACTIONS)

    def roll(carry: _Rolling) -> _Rolling:
        made, graph, key, idle, used = carry
        key, drawing = jax.random.split(key)
        rule = jax.random.categorical(drawing, jnp.where(idle, -jnp.inf, logits))
        new, differs = applied(graph, rule)
        idle = jnp.where(differs, False, idle).at[rule].set(~differs)
        used = used.at[rule].add(differs.astype(jnp.int32))
        return _Rolling(made + 1, new, key, idle, used)

    none = jnp.zeros(len(rules), jnp.int32)
    start = _Rolling(jnp.int32(0), child, key, rules < 0, none)
    _, final, _, _, used = jax.lax.while_loop(going, roll, start)
    return _Rollout(child, changed, _smallest(child), final, _smallest(final), used)


def _smallest(graph: EGraph) -> jax.Array:
    """Return the number of parts of the smallest form of the first expression."""
    return cheapest(graph, jnp.ones(graph.bucket, jnp.float32)).cost[graph.roots[0]]


_cost_of = engine_jit(_smallest)
