"""Monte-Carlo tree search over e-graphs: UCT (Kocsis, Szepesvári 2006) with a policy for rollouts.

A state is an e-graph, an action a rule, which is applied wherever it matches (MCTS-GEB: He, Singh,
Yoneki 2023). E-graphs only grow, so costs only fall along a path, and the end of a rollout is its
best. The search keeps the cheapest e-graph that any simulation saw.

Rollouts prefer actions that occurred in good simulations (MAST: Finnsson, Björnsson 2008).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

S = TypeVar("S")


@dataclass(frozen=True)
class UCT:
    """Parameters of the search.

    Attributes:
      exploration: weight of the term that grows for actions seldom tried; values are between 0 and
        1, the best value so far.
      temperature: of the rollouts' preferences for actions, which are between 0 and 1.
      patience: simulations without a better result before the search ends.
    """

    exploration: float = 1.0
    temperature: float = 0.15
    patience: int = 60


DEFAULT = UCT()


class Request(NamedTuple, Generic[S]):
    """A simulation to make: take an action, then others at random.

    Attributes:
      preferences: [actions]; an action is drawn with a probability proportional to the exponential
        of its preference.
    """

    state: S
    action: int
    key: jax.Array
    preferences: np.ndarray


class Simulated(NamedTuple, Generic[S]):
    """What a simulation found.

    Attributes:
      child: the state after the action; None if the action changes nothing.
      cost: of the child.
      ended: whether the child is at the limit, so that it has no actions.
      final, final_cost: the state at the end of the rollout.
      used: [actions] how often the rollout took each.
    """

    child: S | None
    cost: float
    ended: bool
    final: S
    final_cost: float
    used: np.ndarray


class Environment(Protocol[S]):
    """States and what actions do."""

    n_actions: int

    def weights(self, state: S) -> np.ndarray:
        """Return how promising each action [actions] is, not negative: the probability of being
        tried first is proportional to it. Actions that change nothing may have 0, and are not
        tried.
        """
        ...

    def simulate(self, requests: Sequence[Request[S]]) -> Sequence[Simulated[S]]:
        """Return the results of simulations, which may be made at the same time."""
        ...


@dataclass
class _Node(Generic[S]):
    """A state in the tree. `children` are in the order of their expansion."""

    state: S
    cost: float
    untried: dict[int, float] | None  # actions and their weights; None if not known yet
    children: list[_Node[S]] = field(default_factory=list)
    visits: int = 0
    total: float = 0.0

    @property
    def is_leaf(self) -> bool:
        """Whether a path through the tree ends here."""
        return self.untried is None or bool(self.untried) or not self.children


class Searched(NamedTuple, Generic[S]):
    """The cheapest state that the search saw; its first state if none was cheaper."""

    state: S
    cost: float
    simulations: int


def search(
    environment: Environment[S],
    state: S,
    cost: float,
    key: jax.Array,
    *,
    settings: UCT = DEFAULT,
    simulations: int,
    batch: int = 1,
    going: Callable[[], bool] = lambda: True,
) -> Searched[S]:
    """Search from a state. Same key, same result, unless `going` ends it.

    Args:
      cost: of the state; positive.
      simulations: the most that are made.
      batch: simulations that are made at once; until their results are known they count as visits
        without gain (Liu et al., ICLR 2020).
      going: whether to go on, asked before each batch.
    """
    tree = _Tree(environment, _Node(state, cost, None), settings)
    made = 0
    while made < simulations and tree.since < settings.patience and going():
        chosen: list[tuple[list[_Node[S]], Request[S]]] = []
        while len(chosen) < min(batch, simulations - made):
            key, this = jax.random.split(key)
            path, request = tree.select(this)
            if request is None:
                break
            chosen.append((path, request))
        made += len(chosen)
        found = environment.simulate([request for _, request in chosen])
        for (path, request), result in zip(chosen, found, strict=True):
            tree.learn(path, request.action, result)
        if not chosen and tree.root.is_leaf:
            break  # no action changes anything
    return Searched(tree.best.state, tree.best.cost, made)


class _Tree(Generic[S]):
    """A search tree, its best state, and what is known about actions."""

    def __init__(self, environment: Environment[S], root: _Node[S], settings: UCT) -> None:
        self.environment, self.root, self.settings = environment, root, settings
        self.best = Searched(root.state, root.cost, 0)
        self.values, self.counts = np.zeros((2, environment.n_actions))
        self.since = 0  # simulations and visits since the best state was found

    @property
    def scale(self) -> float:
        """The best value so far, by which values are divided."""
        return max((self.root.cost - self.best.cost) / self.root.cost, 1e-9)

    def select(self, key: jax.Array) -> tuple[list[_Node[S]], Request[S] | None]:
        """Return the path to a node, and what to try there; None if nothing is left there."""
        expanding, rolling = jax.random.split(key)
        path = self._path()
        leaf = path[-1]
        for node in path:
            node.visits += 1
        if leaf.untried is None:
            weights = self.environment.weights(leaf.state)
            leaf.untried = {int(a): float(weights[a]) for a in np.flatnonzero(weights)}
        if not leaf.untried:
            self.since += 1
            for node in path:
                node.total += self._value(leaf.cost)
            return path, None
        action = _drawn(leaf.untried, float(jax.random.uniform(expanding)))
        del leaf.untried[action]
        preferences = _preferences(self.values, self.counts)
        preferences /= self.scale * self.settings.temperature
        return path, Request(leaf.state, action, rolling, preferences)

    def learn(self, path: list[_Node[S]], action: int, found: Simulated[S]) -> None:
        """Add what a simulation found."""
        if found.child is None:
            for node in path:
                node.visits -= 1
            return
        untried: dict[int, float] | None = {} if found.ended else None
        child = _Node(found.child, found.cost, untried, visits=1)
        path[-1].children.append(child)
        value = self._value(found.final_cost)
        for node in (*path, child):
            node.total += value
        taken = found.used.copy()
        taken[action] += 1
        self.values += np.where(taken > 0, value, 0.0)
        self.counts += taken > 0
        self.since += 1
        if found.final_cost < self.best.cost:
            self.best, self.since = Searched(found.final, found.final_cost, 0), 0

    def _value(self, cost: float) -> float:
        return (self.root.cost - cost) / self.root.cost

    def _path(self) -> list[_Node[S]]:
        """Return the nodes from the root to one that has untried actions, or no children."""
        path, scale = [self.root], self.scale
        while not path[-1].is_leaf:
            log = math.log(path[-1].visits + 1)

            def score(node: _Node[S], log: float = log) -> float:
                mean = node.total / node.visits / scale
                return mean + self.settings.exploration * math.sqrt(log / node.visits)

            path.append(max(path[-1].children, key=score))
        return path


def _drawn(weights: dict[int, float], at: float) -> int:
    """Return an action with a probability proportional to its weight; `at` is in [0, 1)."""
    ends = np.cumsum(list(weights.values()))
    index = int(np.searchsorted(ends, at * ends[-1], side="right"))
    return list(weights)[min(index, len(weights) - 1)]


def _preferences(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the mean value of the simulations in which each action was taken; the mean over all
    for actions that were not.
    """
    overall = values.sum() / max(counts.sum(), 1.0)
    return np.where(counts > 0, values / np.maximum(counts, 1.0), overall)
