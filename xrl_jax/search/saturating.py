"""Growing e-graphs of tensors by some of the rules, as moves of a tree search."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xrl_jax.cost.enodes import Choice, least_cost_now
from xrl_jax.cost.roofline import CostTable
from xrl_jax.egraph.arrays import EGraph
from xrl_jax.egraph.followed import Followed, followed, moved
from xrl_jax.egraph.seminaive import Stamps, no_stamps
from xrl_jax.egraph.tensor_saturation import TensorRules, by_rule, grow_by
from xrl_jax.egraph.tensor_step import TensorStep
from xrl_jax.egraph.uct import Request, Simulated
from xrl_jax.graph.graph import TensorGraph
from xrl_jax.graph.hash import dot_words
from xrl_jax.language.rule import Rule
from xrl_jax.runtime.engine_jit import engine_jit

_MOST_ACTIONS = 10  # of a rollout
_PRIOR = 4.0  # weight of a prior, of that of all rules
NO_PRIOR: Mapping[str, float] = MappingProxyType({})
_LEAST_SECONDS = 1e-12  # costs are positive, also of a graph of views only


class Action(NamedTuple):
    """Rules that are applied together wherever they match.

    Attributes:
      rules: [rules] bool.
      weight: how likely it is to be tried, where nothing is known of any action.
    """

    rules: np.ndarray
    weight: float


def actions_of(rules: Sequence[Rule], prior: Mapping[str, float] = NO_PRIOR) -> list[Action]:
    """Return the actions: every rule, every family, all rules with one root, and all rules.

    So plain saturation is one of the paths through the tree.

    Args:
      prior: how promising rules are, by name; the sum is at most 1.
    """
    one = np.eye(len(rules), dtype=bool)
    names = sorted({r.family for r in rules})
    families = [np.array([r.family == name for r in rules]) for name in names]
    single = np.array([len(r.lhs) == 1 for r in rules])
    groups = [*families, single, np.ones(len(rules), bool)]
    weight = len(rules) / len(groups)  # as likely together as all rules
    each = [1.0 + _PRIOR * len(rules) * prior.get(r.name, 0.0) for r in rules]
    return [*map(Action, one, each), *(Action(row, weight) for row in groups)]


class Grown(NamedTuple):
    """An e-graph, what was applied to it, and the best program known, which is in it."""

    graph: EGraph
    stamps: Stamps
    best: Followed


class Saturating:
    """E-graphs below a limit of e-nodes (`uct.Environment`).

    Args:
      nodes: most e-nodes.
      allowed: from `cost.enodes.allowed_lowerings`.
      n_outputs: see `tensor_graph.extracted`.
      threads: simulations that are made at the same time.
      prior: see `actions_of`.
    """

    def __init__(
        self,
        rules: TensorRules,
        costs: CostTable,
        *,
        nodes: int,
        allowed: jax.Array,
        n_outputs: int,
        threads: int,
        prior: Mapping[str, float] = NO_PRIOR,
    ) -> None:
        self.rules, self.costs, self.nodes = rules, costs, nodes
        self.allowed, self.n_outputs = allowed, jnp.int32(n_outputs)
        self.actions = actions_of(rules.rules, prior)
        self.n_actions = len(self.actions)
        self.threads = threads
        self.used = np.zeros(len(rules.rules), bool)  # rules that some e-graph was grown by
        self._lock = threading.Lock()
        self._likely = np.log([a.weight for a in self.actions])
        self.known: dict[tuple[int, ...], float] = {}  # costs, by hash of the e-graph

    def cost(self, state: Grown) -> float:
        """Return the least cost of an e-graph in seconds; positive."""
        key = tuple(np.asarray(_hash(state.graph)).tolist())
        if key not in self.known:
            best = Choice(state.best.node, state.best.lowering)
            found = least_cost_now(self.costs, state.graph, self.allowed, best, self.n_outputs)
            self.known[key] = max(float(found.seconds), _LEAST_SECONDS)
        return self.known[key]

    def start(self, graph: EGraph, best: TensorGraph) -> Grown:
        """Return the state of an e-graph to which nothing was applied.

        Args:
          best: the best program known.
        """
        return Grown(graph, no_stamps(graph.bucket, len(self.rules.rule_of)), followed(graph, best))

    def weights(self, state: Grown) -> np.ndarray:
        """Return the weights of actions with a rule that matches anew, and 0 for the others."""
        every = self.rules.variants(lambda r: True)
        there = np.array(by_rule(self.rules, self._step(state, every))) > 0
        return np.array([a.weight * bool(np.any(a.rules & there)) for a in self.actions])

    def simulate(self, requests: Sequence[Request[Grown]]) -> list[Simulated[Grown]]:
        if len(requests) < 2:
            return [self._simulated(request) for request in requests]
        with ThreadPoolExecutor(self.threads) as pool:
            return list(pool.map(self._simulated, requests))

    def _simulated(self, request: Request[Grown]) -> Simulated[Grown]:
        used = np.zeros(self.n_actions, np.int64)
        first = self._applied(request.state, request.action)
        if not bool(first.changed):
            return Simulated(None, 0.0, False, request.state, 0.0, used)
        child, ended = _after(request.state, first), bool(first.full)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(request.key)))
        state, over = child, ended
        idle = np.zeros(self.n_actions, bool)
        for _ in range(_MOST_ACTIONS):
            if over or idle.all():
                break
            # The largest of these is drawn with a probability as of the softmax (Gumbel 1954).
            noisy = request.preferences + self._likely + rng.gumbel(size=self.n_actions)
            action = int(np.argmax(np.where(idle, -np.inf, noisy)))
            step = self._applied(state, action)
            state = _after(state, step)
            if bool(step.changed):
                over = bool(step.full)
                idle[:] = False
                used[action] += 1
            idle[action] = True
        cost, final = self.cost(child), self.cost(state)
        return Simulated(child, cost, ended, state, final, used)

    def _applied(self, state: Grown, action: int) -> TensorStep:
        step = self._step(state, self.rules.of(self.actions[action].rules))
        with self._lock:
            self.used |= np.array(by_rule(self.rules, step)) > 0
        return step

    def _step(self, state: Grown, active: np.ndarray) -> TensorStep:
        return grow_by(self.rules, active, state.graph, self.nodes, state.stamps)


def _after(state: Grown, step: TensorStep) -> Grown:
    return Grown(step.graph, step.stamps, _moved(state.best, step.place, step.graph.parent))


_moved = engine_jit(moved)


@engine_jit
def _hash(graph: EGraph) -> jax.Array:
    """Return the hash [2] of an e-graph."""
    words = jnp.concatenate([graph.op[:, None], graph.args, graph.data], axis=1)
    return dot_words(words.astype(jnp.uint32).reshape(1, -1))[0]
