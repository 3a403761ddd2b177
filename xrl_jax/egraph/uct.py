"""Monte-Carlo tree search over e-graphs: UCT (Kocsis, Szepesvári 2006) with a policy for rollouts.

A state is an e-graph, an action a rule, which is applied wherever it matches (MCTS-GEB: He, Singh,
Yoneki 2023). E-graphs only grow, so costs only fall along a path, and the end of a rollout is its
best. The search keeps the cheapest e-graph that any simulation saw.

Rollouts prefer actions that occurred in good simulations (MAST: Finnsson, Björnsson 2008).
"""

from __future__ import annotations

import math
from collections.abc import Callable
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

    def simulate(
        self, state: S, action: int, key: jax.Array, preferences: np.ndarray
    ) -> Simulated[S]:
        """Take an action, then others at random: an action is drawn with a probability proportional
        to the exponential of its preference [actions].
        """
        ...


@dataclass
class _Node(Generic[S]):
    """A state in the tree. `children` are in the order of their expansion."""

    state: S
    cost: float
    untried: list[int]
    children: list[_Node[S]] = field(default_factory=list)
    visits: int = 0
    total: float = 0.0


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
    going: Callable[[], bool] = lambda: True,
) -> Searched[S]:
    """Search from a state. Same key, same result, unless `going` ends it.

    Args:
      cost: of the state; positive.
      simulations: the most that are made.
      going: whether to go on, asked before each simulation.
    """
    n_actions = environment.n_actions
    root = _Node(state, cost, list(range(n_actions)))
    best = Searched(state, cost, 0)
    values, counts = np.zeros(n_actions), np.zeros(n_actions)
    since, made = 0, 0
    while made < simulations and since < settings.patience and going():
        scale = max((cost - best.cost) / cost, 1e-9)
        path = _path(root, scale, settings.exploration)
        leaf = path[-1]
        if leaf.untried:
            key, expanding, rolling = jax.random.split(key, 3)
            at = int(jax.random.randint(expanding, (), 0, len(leaf.untried)))
            action = leaf.untried.pop(at)
            preferences = _preferences(values, counts) / (scale * settings.temperature)
            found = environment.simulate(leaf.state, action, rolling, preferences)
            made += 1
            if found.child is None:
                continue
            left = [] if found.ended else list(range(n_actions))
            child = _Node(found.child, found.cost, left)
            leaf.children.append(child)
            path.append(child)
            value = (cost - found.final_cost) / cost
            taken = found.used.copy()
            taken[action] += 1
            values += np.where(taken > 0, value, 0.0)
            counts += taken > 0
            since += 1
            if found.final_cost < best.cost:
                best, since = Searched(found.final, found.final_cost, made), 0
        elif leaf is root:
            break  # no action changes anything
        else:
            value = (cost - leaf.cost) / cost
            since += 1
        for node in path:
            node.visits += 1
            node.total += value
    return best._replace(simulations=made)


def _path(root: _Node[S], scale: float, exploration: float) -> list[_Node[S]]:
    """Return the nodes from the root to one that has untried actions, or no children."""
    path = [root]
    while not path[-1].untried and path[-1].children:
        log = math.log(path[-1].visits + 1)

        def score(node: _Node[S], log: float = log) -> float:
            mean = node.total / node.visits / scale
            return mean + exploration * math.sqrt(log / node.visits)

        path.append(max(path[-1].children, key=score))
    return path


def _preferences(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the mean value of the simulations in which each action was taken; the mean over all
    for actions that were not.
    """
    overall = values.sum() / max(counts.sum(), 1.0)
    return np.where(counts > 0, values / np.maximum(counts, 1.0), overall)
